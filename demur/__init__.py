"""Adversarially robust image classifiers that may reject an input.

    from demur import PGD, Linf, RCon, Run

`__init__.pyi` lists the public names. Each is imported from its module on first use, so
`import demur` loads no library.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.2.0"

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_IMPORTS = [node for node in _STUB.body if isinstance(node, ast.ImportFrom)]
_MODULE_OF = {alias.name: str(node.module) for node in _IMPORTS for alias in node.names}
_PLOT = f"{_MODULE_OF.pop('plot')}.plot"  # a module
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name == "plot":
        return import_module(_PLOT)
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'demur' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
