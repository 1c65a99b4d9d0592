"""What a user asked for cannot be done: one sentence that says what to do.

    raise BadInput(f"no recipe is called {name!r}; {suggestion(name, RECIPES)}")

The command prints the sentence and exits with 2; the library lets it through as a ValueError.
"""

import difflib
from collections.abc import Iterable

LONGEST = 80  # characters of what a user wrote that a sentence repeats
MOST = 60  # known words that a sentence names


class BadInput(ValueError):
    """A request that is wrong, said in one sentence a user can act on."""


class Diverged(BadInput):
    """A training whose loss has run away."""


def brief(text: str) -> str:
    """A text as a sentence can show it: its beginning, where it is long."""
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def suggestion(word: str, known: Iterable[str]) -> str:
    """The known words nearest to `word`, as the end of a sentence."""
    words = sorted(known)
    if not words:
        return "there is nothing to choose from"
    near = difflib.get_close_matches(word[:LONGEST], words, n=3, cutoff=0.5)
    if near:
        return "did you mean " + " or ".join(near) + "?"
    if len(words) > MOST:
        return f"demur list says which {len(words)} are known"
    return "known: " + ", ".join(words)
