"""Field types with conditions, and a check of values against them."""

import math
from collections.abc import Callable
from contextlib import suppress
from numbers import Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from demur.errors import BadInput


class Condition(NamedTuple):
    """A condition on a field's value, with its wording in an error message."""

    holds: Callable[[Any], bool]
    words: str


_FITS_INT64 = Condition(lambda v: v < 2**63, "below 2^63")
PositiveInt = Annotated[int, Condition(lambda v: v >= 1, "of at least 1"), _FITS_INT64]
NonNegativeInt = Annotated[int, Condition(lambda v: v >= 0, "of at least 0"), _FITS_INT64]
Positive = Annotated[float, Condition(lambda v: v > 0, "above 0")]
NonNegative = Annotated[float, Condition(lambda v: v >= 0, "of at least 0")]
NumberOrInfinity = Annotated[
    object, Condition(lambda v: _is_number(v) and not math.isnan(v), "that is a number")
]
UnitInterval = Annotated[float, Condition(lambda v: 0 <= v <= 1, "between 0 and 1")]


def convert_value(value: Any, kind: Any, where: str) -> Any:
    """Value converted to the type `kind`, where a float also accepts an int.

    Raises:
        BadInput: If the value does not fit; `where` names the field in the message.
    """
    try:
        return _convert(value, kind)
    except TypeError:
        raise BadInput(
            f"{where} must be {describe_type(kind, value)}, not {_brief_repr(value)}"
        ) from None


def _convert(value: Any, kind: Any) -> Any:
    """Value converted to `kind`; raises TypeError if it does not fit."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for one in args:
            with suppress(TypeError):
                return _convert(value, one)
        raise TypeError
    if origin in (tuple, list, dict):
        return _convert_container(value, origin, args)
    if origin is Annotated:
        value = _convert(value, args[0])
        ok = all(condition.holds(value) for condition in args[1:])
    elif origin is Literal:
        ok = value in args
    elif kind is float and _is_number(value):
        with suppress(OverflowError):
            value = float(value)
        ok = isinstance(value, float) and math.isfinite(value)
    else:
        ok = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
    if not ok:
        raise TypeError
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _convert_container(value: Any, container: Any, kinds: tuple[Any, ...]) -> Any:
    """A tuple, a list or a dictionary whose keys are words, with its values converted."""
    if not isinstance(value, container):
        raise TypeError
    if isinstance(value, dict):
        return {_convert(k, str): _convert(v, kinds[1]) for k, v in value.items()}
    if container is list or kinds[1:] == (Ellipsis,):
        kinds = kinds[:1] * len(value)
    if len(kinds) != len(value):
        raise TypeError
    return container(_convert(v, k) for v, k in zip(value, kinds, strict=True))


def describe_type(kind: Any, value: Any = None) -> str:
    """Description of a type for an error message, with the condition that `value` violates."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        condition = args[1 if value is None else _violated(args, value)]
        return f"{describe_type(args[0])} {condition.words}"
    if origin in (Union, UnionType):
        return " or ".join(describe_type(arg, value) for arg in args)
    if origin is Literal:
        return "one of " + ", ".join(str(arg) for arg in args)
    if origin in (tuple, list, dict):
        name = {tuple: "tuple", list: "list", dict: "dictionary"}[origin]
        return f"a {name} of " + ", ".join(describe_type(a) for a in args if a is not Ellipsis)
    plain = {float: "a number", int: "a whole number", str: "a word", bool: "True or False",
             object: "a value"}  # fmt: skip
    if kind in plain or kind is NoneType:
        return plain.get(kind, "None")
    return f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}"


def _violated(annotated: tuple[Any, ...], value: Any) -> int:
    """Index of the first condition that a numeric value violates; 1 for other values."""
    indices = range(1, len(annotated))
    numeric = isinstance(value, int | float) and annotated[0] in (int, float)
    return next((i for i in indices if numeric and not annotated[i].holds(value)), 1)


def _brief_repr(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more than 4,300 digits; a deep tuple
        return f"such {describe_type(type(value))}"
    return text if len(text) <= 60 else text[:57] + "..."


def takes_specs(kind: Any) -> bool:
    """Whether a field of this type can hold a Spec."""
    plain = (float, int, str, bool, NoneType)
    parts = [a for a in get_args(kind) if not isinstance(a, Condition) and a is not Ellipsis]
    return any(takes_specs(a) for a in parts) if parts else kind not in plain
