"""Names with square brackets and colons, which rich treats as markup, are printed literally."""

from io import StringIO
from pathlib import Path
from shutil import copytree

import pytest
from rich.console import Console

from demur.cli import progress
from demur.cli.progress import CountBar
from demur.runs import Run
from tests.conftest import Command

NAME = "a[/b]c[red]:x:"


def test_names_with_markup_are_printed_literally(command: Command, tiny_run: Run) -> None:
    folder = Path("runs", "odd[", "b][red]:x:")
    copytree(tiny_run.path, folder)
    Path("[bold]/x[").mkdir(parents=True)
    Path("[bold]/x[/b].txt").write_text("PGD(Linf(0.05), steps=2)", encoding="utf-8")
    code, _, err = command("attack", str(folder), "clean", "@[bold]/x[/b].txt", "--n", "20")
    assert code == 0, err
    assert "@[bold]/x[/b].txt: " in err
    code, out, err = command("score", str(folder))
    assert code == 0, err
    assert "@[bold]/x[/b].txt, n=20" in out
    code, _, err = command("export", "--archive", str(folder), "-o", "[bold]archive[/b]:x:")
    assert code == 0, err
    assert "demur score '[bold]archive[/b]:x:' reads it" in err
    code, out, err = command("paper", "study", "theory", "[bold]archive[/b]:x:")
    assert code == 0, err
    assert "@[bold]/x[/b].txt" in out


def test_names_with_markup_beside_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Console(file=StringIO(), width=200, force_terminal=True, markup=False)
    monkeypatch.setattr(progress, "console", shown)
    with CountBar(f"attack {NAME}", "images") as bar:
        bar.on_progress(1, 2)
    assert isinstance(shown.file, StringIO)
    assert f"attack {NAME}" in shown.file.getvalue()
