"""What a user asked for cannot be done: one sentence that says what to do.

    raise BadInput(f"no recipe is called {name!r}; {suggestion(name, RECIPES)}")

The command prints the sentence and exits with 2; the library lets it through as a ValueError.
"""

import difflib
from collections.abc import Iterable


class BadInput(ValueError):
    """A request that is wrong, said in one sentence a user can act on."""


class Diverged(BadInput):
    """A training whose loss has run away."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """The known words nearest to `word`, as the end of a sentence."""
    words = sorted(known)
    if not words:
        return "there is nothing to choose from"
    near = difflib.get_close_matches(word, words, n=3, cutoff=0.5)
    if near:
        return "did you mean " + " or ".join(near) + "?"
    return "known: " + ", ".join(words)
