"""Digests of a user's code, so that no result of other code is taken for this one's.

The digest of a class or function covers the module that defines it, without comments and layout. It
does not cover the modules that this one imports.
"""

import ast
import hashlib
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from demur.spec import Spec, show, specs_in
from demur.spec.importing import import_object, is_import_path

LIBRARIES = {"demur", "torch", *sys.stdlib_module_names} - {"__main__"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
OF_EVERY_MODULE = set(vars(nn.Module())) - set(HOOKS)
_parsed_digest = cache(lambda text: _hash(ast.dump(ast.parse(text))))  # parsing takes milliseconds


def code_of(*values: Any) -> dict[str, str]:
    """Digests of the user's classes and functions that some specs name, by module:Name."""
    specs = [spec for value in values for spec in specs_in(value)]
    paths = [str(getattr(spec, "function", "")) for spec in specs]  # of a FactoryNet
    things = [import_object(path) for path in paths if is_import_path(path)]
    things += [base for spec in specs for base in type(spec).__mro__]
    own = {f"{one.__module__}:{one.__qualname__}": one for one in things if is_foreign(one)}
    return {path: source_digest(own[path]) for path in sorted(own)}


def score_key(rejector: Spec, made_with: Mapping[str, str] = {}) -> str:
    """The name of a score in records: the full spec and the digest of its code, if `made_with`."""
    digests = "".join(made_with.get(path, now) for path, now in code_of(rejector).items())
    return show(rejector, full=True) + (f" #{_hash(digests)[:12]}" if digests else "")


def is_foreign(thing: Any) -> bool:
    """Whether a class or function is neither of demur nor of torch or the standard library."""
    return str(getattr(thing, "__module__", "")).partition(".")[0] not in LIBRARIES


def source_digest(thing: Any) -> str:
    """Digest of the module that defines a class or function; of its bytecode without a file."""
    module = sys.modules.get(thing.__module__)
    with suppress(OSError, TypeError, SyntaxError, ValueError):
        return str(_parsed_digest(Path(str(getattr(module, "__file__", None))).read_text()))
    methods = [thing, *vars(thing).values()] if isinstance(thing, type) else [thing]
    return _hash([_code(m.__code__) for m in methods if isinstance(m, FunctionType)])


def fingerprint(model: Any) -> str:
    """Digest of what a model computes: classes, settings, wrapped objects, hooks and tensors."""
    return _hash(_described(model, {}))


def _described(value: Any, seen: dict[int, Any]) -> Any:
    """A value as text that is equal in every process: no addresses, each object once."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype):
        return repr(value)
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return [str(value.dtype), list(value.shape), hashlib.sha256(content.data).hexdigest()]
    if id(value) in seen:
        return "seen"
    seen[id(value)] = value  # kept alive: the id of a freed object is used again
    if isinstance(value, Mapping):
        value = [part for pair in value.items() for part in pair]
    elif isinstance(value, MethodType):
        value = [value.__func__, value.__self__]
    if isinstance(value, list | tuple):
        return [_described(part, seen) for part in value]
    if isinstance(value, set | frozenset):  # in another order in every process
        return sorted(repr(_described(part, seen)) for part in value)
    named = value if isinstance(value, FunctionType | type) else type(value)
    code = source_digest(named) if is_foreign(named) else ""
    parts: list[Any] = [named.__module__, named.__qualname__, code]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        parts.append(_described([cells, value.__defaults__, value.__kwdefaults__], seen))
        if value.__name__ == "<lambda>":  # another one in the same file has the same name
            parts.append(_code(value.__code__))
    elif not isinstance(value, type):
        parts.append(_described(_settings(value), seen))
    return parts


def _settings(value: Any) -> dict[str, Any]:
    """The attributes of an object that decide what it computes; not the caches of our layers."""
    own = dict(getattr(value, "__dict__", {}))
    if not own:  # slots, a partial function, a NumPy array, a function written in C
        with suppress(Exception):  # what cannot be pickled has no more to say
            state = value.__reduce_ex__(4)
            own = {"state": state if isinstance(state, str) else state[1:3]}
    if not is_foreign(type(value)):
        own = {k: part for k, part in own.items() if not k.startswith("_") or k in HOOKS}
    if not isinstance(value, nn.Module):
        return own
    own = {k: part for k, part in own.items() if k not in OF_EVERY_MODULE}
    parts = (value.named_parameters(recurse=False), value.named_buffers(recurse=False))
    return own | dict(parts[0]) | dict(parts[1]) | dict(value.named_children())


def _code(code: CodeType) -> list[Any]:
    inner = [_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return [code.co_code.hex(), code.co_names, inner]


def _hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
