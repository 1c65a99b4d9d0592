"""Random changes of texts, bytes and JSON values."""

import copy
import math
from random import Random
from typing import Any

ODD_TEXT = (
    "", "\0", "\ud800", "\U0001f600", "é", "'", '"', "\\", "(", ")", "((((", ",", "=", ":", "-",
    "+", "*", "/", "**", "1e999", "nan", "inf", "-1", "0", "9" * 30, "9" * 5000, "1/0", "None",
    "True", "lambda: 0", "__import__('os')", "f'{x}'", "[0]", "{}", "x" * 300, "\n", "#", "@", "..",
    "~", "R-Con", "RCon()", "PGD", "Linf(8/255)", "Custom('os:system')", "b''", "1j", "*a", "**a",
    "()",
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 10**30, 0.5, -0.0, math.inf, -math.inf, math.nan, "", "x", "\0",
    "\U0001f600", "../x", [], {}, [[]], [None], [0.5, 0.5, 0.5], {"": None}, {"lo": "a"}, "9" * 999,
)  # fmt: skip
ODD_BYTES = (b"\0", b"\xff", b"\xff" * 4, b"\xff" * 8, b"\0" * 8, b"\x7f\xff\xff\xff", b"{", b"}")


def mutate_text(random: Random, text: str, words: tuple[str, ...] = ODD_TEXT) -> str:
    """The text with one to four changes: a span deleted, repeated, replaced or moved."""
    for _ in range(random.choice((1, 1, 2, 4))):
        start = random.randrange(len(text) + 1)
        stop = min(len(text), start + random.choice((0, 1, 1, 2, 8, 40)))
        span = text[start:stop]
        other = random.randrange(len(text) + 1)
        new = random.choice((
            "", span * 2, random.choice(words), random.choice(words), chr(random.randrange(0x300)),
            text[other : other + 10], span.swapcase(), span[::-1],
        ))  # fmt: skip
        text = text[:start] + new + text[stop:]
    return text


def mutate_bytes(random: Random, content: bytes) -> bytes:
    """The bytes with one to four changes: bits flipped, spans cut, repeated or replaced."""
    for _ in range(random.choice((1, 1, 2, 4))):
        start = random.randrange(len(content) + 1)
        stop = min(len(content), start + random.choice((0, 1, 1, 2, 4, 8, 30)))
        span = content[start:stop]
        other = random.randrange(len(content) + 1)
        new = random.choice((
            b"", span * 2, random.choice(ODD_BYTES), random.randbytes(len(span)),
            bytes(b ^ (1 << random.randrange(8)) for b in span), content[other : other + 10],
        ))  # fmt: skip
        content = content[:start] + new + content[stop:]
    return content[: random.randrange(len(content) + 1)] if random.random() < 0.02 else content


def mutate_json(random: Random, values: dict[str, Any]) -> dict[str, Any]:
    """A copy with one to three values replaced, removed, added or nested."""
    values = copy.deepcopy(values)
    for _ in range(random.choice((1, 1, 2, 3))):
        holder: Any = values
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            key: Any = random.choice(keys) if keys else "new"
            inner = holder[key] if keys else None
            if not isinstance(inner, dict | list) or not inner or random.random() < 0.5:
                break
            holder = inner
        if not keys and isinstance(holder, list):
            holder.append(random.choice(ODD_VALUES))
        elif random.random() < 0.2 and keys:
            del holder[key]
        elif random.random() < 0.05:
            holder[key] = _nested(random.choice((5, 50, 500, 980)))
        else:
            holder[key] = copy.deepcopy(random.choice(ODD_VALUES))
    return values


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value
