"""Frozen dataclasses written as text: read, shown, changed by KEY=VALUE, names suggested.

Text is parsed with `ast` and never evaluated: numbers, strings, tuples and known class names. A
class of the user's own is written as Custom("module:Class", ...), or module:Class(...) if `typed`.
"""

import ast
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin
from typing import get_type_hints as type_hints

from demur.errors import BadInput, shorten, suggestion
from demur.spec.field_types import convert_value, describe_type, takes_specs
from demur.spec.importing import allow_import, import_object

LONG = 8  # a decimal with more characters is written as a fraction, if it is one
CUSTOM = "Custom"  # how a class outside this package is written: Custom("module:Class", ...)
T = TypeVar("T")
Vocabulary = Mapping[str, type["Spec"]]


@dataclass(frozen=True)
class Spec:
    """A frozen value whose fields are checked against their declared types on construction.

    A subclass outside this package must be importable from a module: its runs name it as
    Custom("module:Class", ...).
    """

    VERSION: ClassVar[int] = 1  # raised when the meaning of the class changes

    def __post_init__(self) -> None:
        kinds = field_types(type(self))
        for f in fields(self):
            value = getattr(self, f.name)
            if "renamed" in f.metadata and isinstance(value, str):
                value = f.metadata["renamed"].get(value, value)
            value = convert_value(value, kinds[f.name], f"{type(self).__name__}.{f.name}")
            object.__setattr__(self, f.name, value)


def later(neutral: Any) -> dict[str, Any]:
    """Metadata of a field added after a release: at `neutral` it leaves digests as they were."""
    return {"neutral": neutral}


def renamed(**old: str) -> dict[str, Any]:
    """Metadata of a field with renamed values, old=new: `read` takes both, digests use the old."""
    return {"renamed": old}


_FIELD_TYPES: dict[type, dict[str, Any]] = {}


def field_types(cls: type[Spec]) -> dict[str, Any]:
    """The declared type of each field."""
    if cls not in _FIELD_TYPES:
        hints = type_hints(cls, include_extras=True)
        _FIELD_TYPES[cls] = {f.name: hints[f.name] for f in fields(cls)}
    return _FIELD_TYPES[cls]


# ---------------------------------------------------------------------------------- writing


def show(value: Any, full: bool = False) -> str:
    """`value` as text that `read` turns back into it; `full` writes defaults too."""
    if isinstance(value, Spec):
        parts, required = [], required_fields(type(value))
        for f in fields(value):
            held = getattr(value, f.name)
            default = f.default if f.default_factory is MISSING else f.default_factory()
            if f.name in required and not full:
                parts.append(show(held))
            elif full or held != default:
                parts.append(f"{f.name}={show(held, full)}")
        return _call(type(value), ", ".join(parts))
    if isinstance(value, tuple):
        inside = ", ".join(show(v, full) for v in value)
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, float):
        return _number(value)
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    """The text in quotes, in ASCII, with the escapes that Python reads back.

    JSON writes a character above U+FFFF as two, which Python does not join again.
    """
    letters = (f"\\U{ord(c):08x}" if ord(c) > 0xFFFF else json.dumps(c)[1:-1] for c in text)
    return f'"{"".join(letters)}"'


def lines(value: Spec) -> str:
    """`value` with every field named on a line of its own, defaults too; `read` takes it back."""
    inside = "".join(
        f"    {f.name}={show(getattr(value, f.name), full=True)},\n" for f in fields(value)
    )
    return _call(type(value), f"\n{inside}") + "\n"


def _call(cls: type[Spec], arguments: str) -> str:
    if cls.__module__.partition(".")[0] == "demur":
        return f"{cls.__name__}({arguments})"
    separator = "," if arguments.startswith("\n") else ", " if arguments else ""
    return f'{CUSTOM}("{cls.__module__}:{cls.__qualname__}"{separator}{arguments})'


def check_readable(value: Spec) -> None:
    """Raise BadInput if `read` cannot restore the value: a class that no module exports."""
    for part in specs_in(value):
        cls = type(part)
        if cls.__module__.partition(".")[0] != "demur":
            path, found = f"{cls.__module__}:{cls.__qualname__}", None
            with suppress(BadInput):
                found = import_object(path, Spec)
            if cls.__module__ == "__main__" or found is not cls:
                raise BadInput(
                    f"{cls.__name__} cannot be found again by {path!r}; define it at the top level "
                    "of a module that Python can import, not in a script or a notebook cell"
                )


def specs_in(value: Any) -> Iterator[Spec]:
    """Iterate over a spec, or a tuple of specs, and all specs inside it."""
    if isinstance(value, Spec):
        yield value
        for f in fields(value):
            yield from specs_in(getattr(value, f.name))
    elif isinstance(value, tuple):
        for part in value:
            yield from specs_in(part)


def replace_specs(value: T, new: Mapping[Any, Any]) -> T:
    """The spec or tuple with other specs in place of some, wherever they occur in it."""
    found: Any = value
    if isinstance(value, tuple) and type(value) is tuple:
        found = tuple(replace_specs(part, new) for part in value)
    elif isinstance(value, Spec) and any(part in new for part in specs_in(value)):
        parts = {f.name: getattr(value, f.name) for f in fields(value)}
        changed = {name: replace_specs(part, new) for name, part in parts.items()}
        found = new[value] if value in new else replace(value, **changed)
    return found  # type: ignore[no-any-return]


def _number(value: float) -> str:
    """The decimal, or where that is long the small fraction that gives exactly this float."""
    ratio = Fraction(value).limit_denominator(1000)
    fraction = f"{ratio.numerator}/{ratio.denominator}"
    exact = ratio.numerator / ratio.denominator == value
    return fraction if exact and len(repr(value)) > LONG else repr(value)


def digest(value: Spec) -> str:
    """64 hex digits over the class names, versions and every field."""
    return hashlib.sha256(_canonical(value).encode()).hexdigest()


def older_version(value: Spec, known: str) -> str:
    """Say which older version of a class gives a spec a known digest; empty if none does."""
    for kind in {type(one) for one in specs_in(value)}:
        for version in range(1, kind.VERSION):
            older = _canonical(value, {kind: version})
            if hashlib.sha256(older.encode()).hexdigest() == known:
                return f"it is of version {version} of {kind.__name__}, now {kind.VERSION}"
    return ""


def _canonical(value: Any, versions: Mapping[type[Spec], int] = MappingProxyType({})) -> str:
    if isinstance(value, Spec):
        version = versions.get(type(value), value.VERSION)
        counted = [
            f for f in fields(value) if f.metadata.get("neutral", MISSING) != getattr(value, f.name)
            and f.metadata.get("since", 1) <= version
        ]  # fmt: skip
        inside = []
        for f in counted:
            held, names = getattr(value, f.name), f.metadata.get("renamed", {}).items()
            held = next((old for old, new in names if new == held), held)  # of the first digest
            inside.append(f"{f.name}={_canonical(held, versions)}")
        return f"{type(value).__name__}.{version}({','.join(sorted(inside))})"
    if isinstance(value, tuple):
        return f"({','.join(_canonical(v, versions) for v in value)})"
    return repr(value)


def differences(asked: Spec, found: Spec) -> list[str]:
    """One phrase for each field in which two specs differ."""
    if type(asked) is not type(found):
        return [f"{show(asked)} asked, {show(found)} found"]
    phrases = []
    for f in fields(asked):
        a, b = getattr(asked, f.name), getattr(found, f.name)
        if isinstance(a, Spec) and isinstance(b, Spec):
            mark = "." if type(a) is type(b) else ": "
            phrases += [f"{f.name}{mark}{phrase}" for phrase in differences(a, b)]
        elif a != b:
            phrases.append(f"{f.name}: {show(a)} asked, {show(b)} found")
    return phrases


# ---------------------------------------------------------------------------------- reading


_PATH = re.compile(r"([A-Za-z_][\w.]*:[A-Za-z_][\w.]*)\s*(\(\s*(\))?)?")  # module:Class( or ()
_QUOTED = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""")


def typed(text: str) -> str:
    """Allow the import of every module:Class in a text that the user typed, and return the text."""
    for part in _QUOTED.split(text)[::2]:
        for found in _PATH.finditer(part):
            allow_import(found[1])
    return text


def _spelled(text: str) -> str:
    """The text with module:Class(...) as Custom("module:Class", ...), outside of quotes."""
    parts = _QUOTED.split(text)
    for at in range(0, len(parts), 2):
        plain = re.sub(r"\bR-Con\b", "RCon", parts[at])
        parts[at] = _PATH.sub(
            lambda m: f'{CUSTOM}("{m[1]}"' + (", " if m[2] and not m[3] else ")"), plain
        )
    return "".join(parts)


def read(text: str, vocabulary: Vocabulary) -> Any:
    """The value that `text` spells, made of numbers, strings, tuples and known classes."""
    shown = shorten(text.strip())
    try:
        spelled = _spelled(text)
        return _value(ast.parse(spelled.strip(), mode="eval").body, vocabulary, shown)
    except BadInput:
        raise
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        pass  # MemoryError: the parser's word for deep nesting
    raise BadInput(
        f"cannot read {shown!r}; write it like PGD(Linf(8/255), steps=10, step_size=2/255)"
    )


def _value(node: ast.expr, vocabulary: Vocabulary, text: str) -> Any:
    match node:
        case ast.Constant(value=int() | float() | str() | None as value):
            return value
        case ast.Name(id=name):
            return _made(_class(name, vocabulary), [], [])
        case ast.Tuple(elts=elements):
            return tuple(_value(e, vocabulary, text) for e in elements)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _value(operand, vocabulary, text)
            if isinstance(value, int | float):
                return -value
            raise BadInput(
                f"only a number can be negative in {text!r}; write -1*CE() for an objective"
            )
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _combined(type(op), left, right, vocabulary, text)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            values = [_value(a, vocabulary, text) for a in args]
            named = [(k.arg, _value(k.value, vocabulary, text)) for k in keywords]
            cls = _custom(values) if name == CUSTOM else _class(name, vocabulary)
            return _made(cls, values, named)
    raise BadInput(
        f"{shorten(ast.unparse(node))!r} in {text!r} is neither a value nor a known name"
    )


_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def _combined(
    op: type[ast.operator], left: ast.expr, right: ast.expr, vocabulary: Vocabulary, text: str
) -> Any:
    a, b = _value(left, vocabulary, text), _value(right, vocabulary, text)
    if not all(isinstance(v, int | float | Spec) for v in (a, b)):
        raise BadInput(f"only numbers and objectives can be combined in {text!r}")
    try:
        return _OPERATIONS[op](a, b)
    except (TypeError, ZeroDivisionError, OverflowError) as error:
        raise BadInput(f"cannot work out {text!r}: {error}") from None


def _class(name: str, vocabulary: Vocabulary) -> type[Spec]:
    found = find_name(name, vocabulary)
    if found is None:
        raise BadInput(f"nothing is called {shorten(name)!r}; {suggestion(name, vocabulary)}")
    return vocabulary[found]


def _custom(values: list[Any]) -> type[Spec]:
    """Return the class that the first value names, and remove that value."""
    path = values.pop(0) if values else None
    if not isinstance(path, str) or ":" not in path:
        raise BadInput(f'{CUSTOM} must begin with "module:Class", not {path!r}')
    found = import_object(path, Spec)
    if not (isinstance(found, type) and issubclass(found, Spec)):
        raise BadInput(f"{shorten(path)!r} does not fit; name a subclass of Rejector or Attack")
    return found


def find_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that a spelling means: R-Con, RCon and rcon are one name."""
    names = list(known)
    if name in names:
        return name
    alike = [other for other in names if _letters(other) == _letters(name)]
    return alike[0] if len(alike) == 1 else None


def _letters(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).lower()


def _made(cls: type[Spec], values: list[Any], named: list[tuple[str | None, Any]]) -> Spec:
    known = field_types(cls)
    for key, _ in named:
        if key is None or key not in known:
            raise BadInput(
                f"{cls.__name__} has no {shorten(str(key))!r}; {suggestion(str(key), known)}"
            )
    given = [*list(known)[: len(values)], *(key for key, _ in named if key)]
    if len(set(given)) < len(given):
        raise BadInput(f"{cls.__name__} is given the same field twice")
    takes = f"it takes {', '.join(known) or 'none'}"
    if len(values) > len(known):
        raise BadInput(f"{cls.__name__} is given too many values; {takes}")
    if lacking := [name for name in required_fields(cls) if name not in given]:
        raise BadInput(f"{cls.__name__} lacks {' and '.join(lacking)}; {takes}")
    return cls(*values, **{key: value for key, value in named if key})


def required_fields(cls: type[Spec]) -> list[str]:
    """The fields that have to be given."""
    return [f.name for f in fields(cls) if f.default is f.default_factory is MISSING]


# ---------------------------------------------------------------------------------- editing


def edit(value: Spec, key: str, text: str, vocabulary: Vocabulary) -> Any:
    """`value` with the field at dotted `key` replaced by what `text` spells for its type."""
    path = _path(value, key)
    owners: list[Any] = [value]
    for name in path[:-1]:
        owners.append(getattr(owners[-1], name))
    new: Any = _parsed(text, field_types(type(owners[-1]))[path[-1]], key, vocabulary)
    for owner, name in zip(reversed(owners), reversed(path), strict=True):
        new = replace(owner, **{name: new})
    return new


def _parsed(text: str, kind: Any, key: str, vocabulary: Vocabulary) -> Any:
    """`text` read for a field of this type, so that a word needs no quotes."""
    choices = [a for k in (kind, *get_args(kind)) if get_origin(k) is Literal for a in get_args(k)]
    word = text.strip("'\"")
    words = get_origin(kind) is tuple and str in get_args(kind)
    if words and not text.startswith("("):
        return (word,)
    if word in choices or kind is str or (str in get_args(kind) and not words and word != "None"):
        return word
    if choices:
        raise BadInput(f"{key} must be {describe_type(kind)}, not {shorten(text)!r}")
    if kind is bool and word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        return read(text, vocabulary)
    except BadInput as error:
        if str(error).startswith("nothing is called") and not takes_specs(kind):
            raise BadInput(f"{key} must be {describe_type(kind)}, not {shorten(text)!r}") from None
        raise


def _path(value: Spec, key: str) -> list[str]:
    """The names that lead to `key`; a name that is no field is looked for below, if unique."""
    path: list[str] = []
    owner: Any = value
    for name in key.split("."):
        known = list(_paths(owner))
        found = [[name]] if [name] in known else [p for p in known if p[-1] == name]
        if not found:
            inside = f" in {'.'.join(path)}" if path else ""
            near = suggestion(name, {p[-1] for p in known})
            raise BadInput(f"no key {shorten(name)!r}{inside}; {near}")
        if len(found) > 1:
            places = " or ".join(".".join(path + p) for p in found)
            raise BadInput(f"{key!r} could mean {places}; write it out")
        path += found[0]
        for step in found[0]:
            owner = getattr(owner, step)
    return path


def _paths(value: Any) -> Iterator[list[str]]:
    if isinstance(value, Spec):
        for f in fields(value):
            yield [f.name]
            yield from ([f.name, *below] for below in _paths(getattr(value, f.name)))
