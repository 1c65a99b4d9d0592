"""Types of fields with conditions, and values checked against them.

steps: Count        # a whole number of at least 1
as_declared("ten", Count, "PGD.steps")
# BadInput: PGD.steps must be a whole number of at least 1, not 'ten'
"""

import math
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from demur.errors import BadInput


class Where(NamedTuple):
    """A condition on a field's value, with the words that name it in an error."""

    holds: Callable[[Any], bool]
    words: str


Count = Annotated[int, Where(lambda v: v >= 1, "of at least 1")]
Natural = Annotated[int, Where(lambda v: v >= 0, "of at least 0")]
Positive = Annotated[float, Where(lambda v: v > 0, "above 0")]
NonNegative = Annotated[float, Where(lambda v: v >= 0, "of at least 0")]
Share = Annotated[float, Where(lambda v: 0 <= v <= 1, "between 0 and 1")]


def as_declared(value: Any, kind: Any, where: str) -> Any:
    """`value` as `kind` (a whole number counts as a float), or BadInput."""
    try:
        return _as(value, kind)
    except TypeError:
        raise BadInput(f"{where} must be {words(kind)}, not {_brief(value)}") from None


def _as(value: Any, kind: Any) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        base, conditions = args[0], args[1:]
        value = _as(value, base)
        if all(condition.holds(value) for condition in conditions):
            return value
        raise TypeError
    if origin in (Union, UnionType):
        return _first_fit(value, args)
    if origin is Literal:
        ok = value in args
    elif origin is tuple:
        return _as_tuple(value, args)
    elif kind is float:
        ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        value = float(value) if ok else value
    elif kind is int:
        ok = isinstance(value, int) and not isinstance(value, bool)
    else:
        ok = isinstance(value, kind)
    if not ok:
        raise TypeError
    return value


def _first_fit(value: Any, kinds: tuple[Any, ...]) -> Any:
    for kind in kinds:
        try:
            return _as(value, kind)
        except TypeError:
            continue
    raise TypeError


def _as_tuple(value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        raise TypeError
    if kinds[1:] == (Ellipsis,):
        kinds = kinds[:1] * len(value)
    if len(kinds) != len(value):
        raise TypeError
    return tuple(_as(v, k) for v, k in zip(value, kinds, strict=True))


def words(kind: Any) -> str:
    """A type as a user would say it."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return " ".join([words(args[0]), *(condition.words for condition in args[1:])])
    if origin in (Union, UnionType):
        return " or ".join(words(arg) for arg in args)
    if origin is Literal:
        return "one of " + ", ".join(str(arg) for arg in args)
    if origin is tuple:
        return "a tuple of " + ", ".join(words(a) for a in args if a is not Ellipsis)
    plain = {float: "a number", int: "a whole number", str: "a word", bool: "True or False"}
    return plain.get(kind, "None" if kind is NoneType else f"a {kind.__name__}")


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def takes_specs(kind: Any) -> bool:
    """Whether a field of this type can hold anything but plain values."""
    plain = (float, int, str, bool, NoneType)
    parts = [a for a in get_args(kind) if not isinstance(a, Where) and a is not Ellipsis]
    return any(takes_specs(a) for a in parts) if parts else kind not in plain
