"""Trained nets that come with demur, by name.

    zoo_run("cifar10-best").net(torch.device("cpu"))

Each is a run folder with quantised weights and the records of attacks on exactly these weights.
They lie in `zoo/` of a checkout; the environment variable DEMUR_ZOO names another folder.
"""

import os
from pathlib import Path

from demur.errors import BadInput, suggestion
from demur.runs.run import Run, runs_in

VARIABLE = "DEMUR_ZOO"


def zoo_folder() -> Path:
    """The folder of the nets, which need not exist."""
    beside_package = Path(__file__).parents[2] / "zoo"
    return Path(os.environ.get(VARIABLE) or beside_package)


def zoo_names() -> list[str]:
    """The names of the nets, in alphabetical order."""
    return [run.name for run in runs_in(zoo_folder()) if run.has_weights]


def zoo_run(name: str) -> Run:
    """The run of a net; BadInput if there is none of that name."""
    names = zoo_names()
    if name not in names:
        hint = suggestion(name, names) if names else f"set {VARIABLE} to a folder that holds some"
        raise BadInput(f"{zoo_folder()} has no net {name!r}; {hint}")
    return Run(zoo_folder() / name)
