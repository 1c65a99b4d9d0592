"""Random command lines, given to the real command without its slow work."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import typer.main

from demur.cli.commands import app, main
from demur.errors import BadInput
from demur.recipes import NAMED_ATTACKS, RECIPES
from tests.fuzz.mutation import ODD_TEXT, mutate_text

RUNS = {  # made in the folder of the cases
    "unfinished": ("recipe.txt",),
    "damaged": ("recipe.txt", "checkpoint.json", "model.safetensors"),
    "empty": (),
}
VALUES = (
    *ODD_TEXT, *RECIPES, *NAMED_ATTACKS, *RUNS, "cifar10", "recipes", "runs", "test", "cal", "cpu",
    "epochs=2", "head.weight=0.5", "base=x", "pgd-20:eps=0.2", "@unfinished/recipe.txt", "0.05",
    "-1", "auto", "plain", "paper", "deploy", "out", "out.html", "unfinished/model.safetensors",
)  # fmt: skip
SLOW = {"demo", "paper", "verify"}  # parsed only


@cache
def _command_words() -> list[tuple[list[str], list[str]]]:
    """The words of each command and its options."""

    def walk(group: Any, words: list[str]) -> Iterator[tuple[list[str], list[str]]]:
        options = [name for parameter in group.params for name in parameter.opts if name[0] == "-"]
        options = [name for name in options if "completion" not in name]  # writes ~/.bashrc
        yield words, [*options, "-h", "--help", "--version"]
        for name, inner in getattr(group, "commands", {}).items():
            yield from walk(inner, [*words, name])

    return list(walk(typer.main.get_command(app), []))


def argv(random: Random, folder: Path) -> bool:
    """Run a random command line; exit codes other than 0 and 2 are errors.

    The folder is its home and the folder above its working folder, and no path is absolute, so that
    nothing outside of it is written.
    """
    here = folder / "here"
    _make_runs(here)
    command, options = random.choice(_command_words())
    words = list(command)
    for _ in range(random.choice((0, 1, 1, 2, 3, 5))):
        words.append(random.choice(options if random.random() < 0.4 else VALUES))
    if random.random() < 0.3 and words:
        at = random.randrange(len(words))
        words[at] = mutate_text(random, words[at])
    words = [word.replace("\0", "").replace("=/", "=").lstrip("/") for word in words]
    if words and words[0] in SLOW:
        words.insert(len(command), "--help")
    code, out = 0, io.StringIO()
    with (
        patch.object(sys, "argv", ["demur", *words]), chdir(here), redirect_stdout(out),
        patch.dict(os.environ, HOME=str(folder), XDG_CACHE_HOME=str(folder)),
        patch("typer.completion.install", _stopped),
        redirect_stderr(out), patch("demur.training.train", _stopped),
        patch("demur.data.cifar.download", _stopped),
    ):  # fmt: skip
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    if code not in (0, 2):
        raise RuntimeError(f"{words}: exit code {code}")
    return code == 0


def _stopped(*_: object, **__: object) -> None:
    raise BadInput("this is where the work would begin")


def _make_runs(folder: Path) -> None:
    from demur.spec import lines

    for name, files in RUNS.items():
        if not (folder / name).exists():
            (folder / name).mkdir(parents=True)
            for file in files:
                text = lines(RECIPES["digits-standard"]) if file == "recipe.txt" else "{}"
                (folder / name / file).write_text(text)
