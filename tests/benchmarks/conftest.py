"""Calls of the scripts in benchmarks/."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from demur.cli.app import main
from tests.conftest import Answer

Script = Callable[..., Answer]


@pytest.fixture
def script(
    in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Script:
    """Call a script as the shell would; exit code, stdout, stderr."""

    def call(program: typer.Typer, *words: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["script", *words])
        monkeypatch.setenv("COLUMNS", "200")
        code = 0
        try:
            main(program)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        said = capsys.readouterr()
        return code, said.out, said.err

    return call
