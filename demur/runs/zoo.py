"""Trained nets that come with demur: run folders with quantised weights.

Their records are of attacks on exactly these weights. They lie in `zoo/` of a checkout; the
environment variable DEMUR_ZOO names another folder.
"""

import os
from pathlib import Path

VARIABLE = "DEMUR_ZOO"


def zoo_folder() -> Path:
    """The folder of the nets, which need not exist."""
    beside_package = Path(__file__).parents[2] / "zoo"
    return Path(os.environ.get(VARIABLE) or beside_package)


def zoo_names() -> list[str]:
    """The names of the nets, in alphabetical order."""
    return sorted(path.parent.name for path in zoo_folder().glob("[!.]*/model.safetensors"))
