"""Errors in a user's request, as one sentence that says what to do instead.

    raise BadInput(f"no recipe is called {name!r}; {suggestion(name, RECIPES)}")

The command prints the sentence and exits with code 2. The library raises it as a ValueError.
"""

import difflib
from collections.abc import Iterable

LONGEST = 80  # characters of user input that a message repeats
MOST_NAMES = 30  # known names that a message lists


class BadInput(ValueError):
    """A wrong request, with a message of one sentence: what is wrong and what to write instead.

    Example:
        >>> from demur import PGD, BadInput, Linf
        >>> try:
        ...     PGD(Linf(8 / 255), steps=0)
        ... except BadInput as error:
        ...     message = str(error)
        >>> message
        'PGD.steps must be a whole number of at least 1, not 0'
    """


class Diverged(BadInput):
    """A training run whose loss has diverged."""


def first_line(error: Exception) -> str:
    """The first line of an error message, or the type of the error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def shorten(text: str) -> str:
    """The text, cut to LONGEST characters."""
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def suggestion(word: str, known: Iterable[str]) -> str:
    """End of an error message that names the known words nearest to `word`, never itself."""
    words = sorted({*known} - {word})
    if not words:
        return "there is nothing to choose from"
    near = difflib.get_close_matches(word[:LONGEST], words, n=3, cutoff=0.5)
    if near:
        return "did you mean " + " or ".join(near) + "?"
    if len(words) > MOST_NAMES:
        return f"demur list shows the {len(words)} known names"
    return "known: " + ", ".join(words)
