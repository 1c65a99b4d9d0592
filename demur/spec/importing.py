"""Import what a text "module:name" names, by one rule for recipes, nets, guards and audits.

Something is imported only if the user typed its name in this process, or if the environment
variable DEMUR_MODULES names its module. Of a module that the program has imported already, a class
of a given kind may be used.
"""

import os
import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from demur.errors import BadInput, first_line, shorten, suggestion, user_line

ALLOWED = "DEMUR_MODULES"  # environment variable: modules, separated by commas
_TYPED: set[str] = set()  # what the user named in this process


def is_import_path(text: str) -> bool:
    """Whether a text has the form module:name, both with dots or without."""
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in f"{module}.{name}".split("."))


def check_import_path(text: str) -> None:
    """Raise BadInput unless the text has the form module:name."""
    if not is_import_path(text):
        raise BadInput(f"{shorten(text)!r} names no class or function; write module:name")


def allow_import(path: str) -> None:
    """Allow the import of module:name; call this only for what the user typed."""
    check_import_path(path)
    _TYPED.add(path)


def import_object(path: str, kind: type | None = None, instead: str = "") -> Any:
    """Return what module:name names; raise BadInput if the import is not allowed or fails.

    Of modules that are imported already the subclasses of `kind` are allowed. Other names are not:
    any such module has functions, such as os.abort, that no file may call. `instead` is what else
    the user can do, for the message.
    """
    check_import_path(path)
    module, _, name = path.partition(":")
    allowed = path in _TYPED or module in modules_named()
    if allowed or (kind is not None and module in sys.modules):
        found = _find(module, name)
        if allowed or (kind and isinstance(found, type) and issubclass(found, kind)):
            return found
    raise BadInput(
        f"{shorten(path)!r} is code and is not imported for a file; if you trust it, allow it "
        f"with {ALLOWED}={module}{instead}"
    )


def _find(module: str, name: str) -> Any:
    found: Any = None
    try:
        found = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # a user's module may raise anything
        raise BadInput(
            f"{shorten(f'{module}:{name}')!r} cannot be imported ({type(error).__name__}: "
            f"{shorten(first_line(error))}{user_line(error)}); {_advice(module, name, found)}"
        ) from None
    return found


def _advice(module: str, name: str, found: Any) -> str:
    """The right spelling of a class in an imported module, or of a module in this folder."""
    if isinstance(found, ModuleType) and not hasattr(found, name.partition(".")[0]):
        own = (n for n, one in vars(found).items() if getattr(one, "__module__", "") == module)
        return suggestion(name, own)
    near = get_close_matches(module, [path.stem for path in Path().glob("*.py")], n=1)
    if found is None and near and near != [module]:
        return f"did you mean {near[0]}:{name}?"
    return "run the command where Python finds the module"


def modules_named() -> list[str]:
    """The modules of DEMUR_MODULES."""
    return [name for name in os.environ.get(ALLOWED, "").split(",") if name]


def classes_in(module: str, kind: type) -> dict[str, type]:
    """The classes of a kind that a module defines, by module:Name; the user named the module."""
    check_import_path(f"{module}:x")
    names = _find(module, "__dict__")
    return {
        f"{module}:{name}": one
        for name, one in names.items()
        if isinstance(one, type) and issubclass(one, kind) and one.__module__ == module
    }
