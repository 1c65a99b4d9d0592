"""No output option of any command destroys a run, a guard, an archive, images or another file."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
import typer
from typer.models import OptionInfo

from demur.cli.commands import app
from demur.errors import BadInput
from demur.files import output_paths
from demur.files.output_paths import check_output_file, check_output_folder, protected_kind
from demur.guards import Guard
from demur.paper.commands import paper_app
from demur.recipes import recipe
from demur.runs import Run
from tests.conftest import Command
from tests.own_images import write_folder

# Options that take text and name no output: every other one must refuse what is tried below.
INPUTS = {
    "attack", "checkpoint", "class_names", "data", "device", "engine", "eps", "etas", "fitted",
    "formats", "host", "layer", "log", "missing_from", "norm", "objectives", "only", "protocol",
    "adapter", "against", "allow_host", "attacks", "form", "key", "read_from", "rejector",
    "recipes", "require_signature", "scale", "settings", "sign", "split", "sweep",
    "by", "cluster", "entries", "token", "under", "version", "name", "log_format", "log_level",
}  # fmt: skip
ARGUMENTS = {
    "train": ["digits-pgdat"], "retrofit": ["my_nets:plain", "data=photos"], "demo": [],
    "audit": ["my_nets:plain", "--data", "photos"], "report": ["run"],
    "leaderboard add": ["run", "--rejector", "Con"], "leaderboard build": [],
    "guard recalibrate": ["guard", "--data", "photos"],
    "export": ["run"], "export --archive": ["run"], "predict": ["guard", "im.png"],
    "paper table": ["2", "--scale", "smoke"], "paper figure": ["tau", "--scale", "smoke"],
    "paper study recipes": ["methods-digits"], "paper study theory": ["run"],
}  # fmt: skip


def outputs(group: typer.Typer, words: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Every command with each of its options that takes text and is no input."""
    for one in group.registered_groups:
        inner = one.typer_instance
        assert inner is not None
        yield from outputs(inner, (*words, str(inner.info.name)))
    for command in group.registered_commands:
        assert command.callback is not None
        hints = get_type_hints(command.callback, include_extras=True)
        for name, hint in hints.items():
            kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            takes_text = any(isinstance(extra, OptionInfo) for extra in extras) and (
                {str, Path} & {kind, *get_args(kind)}
            )
            if takes_text and name not in INPUTS:
                spelling = f"--{name.replace('_', '-')}"
                yield " ".join((*words, command.name or command.callback.__name__)), spelling


OUTPUTS = sorted({*outputs(app), *outputs(paper_app, ("paper",))})


def place(folder: Path, files: str) -> None:
    for name in files.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{{contents of {name}}}")


@pytest.fixture
def victims(in_empty_folder: Path) -> Path:
    """A run, an archive, a guard, folders of images and other files."""
    root = in_empty_folder
    place(root / "run", "recipe.txt checkpoint.json model.safetensors records/a.json report.html")
    place(root / "kept", "recipe.txt checkpoint.json records/a.json")
    place(root / "guard", "config.json model.safetensors README.md")
    write_folder(root / "photos", 12)
    write_folder(root / "divided" / "train", 12)
    write_folder(root / "divided" / "test", 6)
    place(root, "notes.py labels.csv thesis.tex page.html.bak data.npz")
    (root / "labels.csv").write_text("path,label\na.png,cat\n")
    (root / "link").symlink_to("guard/model.safetensors")
    (root / "folder").symlink_to("guard")
    os.link(root / "guard" / "model.safetensors", root / "hard.html")
    os.link(root / "run" / "records" / "a.json", root / "hard.json")
    return root


TRIED = [
    "guard/model.safetensors", "guard/config.json", "guard/new", "guard/far/new", "guard/README.md",
    "run/model.safetensors", "run/records/a.json", "run/new", "run/records/new", "run/a/b",
    "kept/recipe.txt", "kept/new", "kept/records/a.json",
    "photos/cat/0.png", "photos/cat/new", "photos/new", "photos/new/far", "photos/./cat/../new",
    "divided/test/cat/new", "divided/new", "divided/test/0/new",
    "notes.py", "labels.csv", "data.npz", "page.html.bak",
    "link", "folder/new", "folder/model.safetensors", "hard.html", "hard.json",
]  # fmt: skip


def digests(root: Path) -> dict[str, str]:
    """Digest of every file; a folder that was made is an entry too."""
    return {
        str(path): hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()
        for path in sorted(root.rglob("*"))
    }


def test_every_command_with_an_output_is_tried() -> None:
    assert {command for command, _ in OUTPUTS} == set(ARGUMENTS)
    assert ("predict", "--out") in OUTPUTS and ("audit", "--state") in OUTPUTS


@pytest.mark.parametrize(("name", "option"), OUTPUTS)
def test_no_output_destroys_anything(
    name: str, option: str, victims: Path, command: Command
) -> None:
    before = digests(victims)
    for target in TRIED:
        code, out, err = command(*name.split(), *ARGUMENTS[name], option, target)
        assert code == 2, f"{target}: {out}{err}"
        assert (target in err or "name it 0.svg" in err) and err.count("\n") == 1, err
        assert digests(victims) == before, target


def test_a_folder_that_is_no_run_or_guard_is_not_taken_over(victims: Path) -> None:
    made = recipe("digits-pgdat")
    for target in ("guard", "kept", "photos", "divided", "photos/cat", "run/sub"):
        with pytest.raises(BadInput):
            Run.check(Path(target), made)
    for target in ("run", "kept", "photos", "photos/cat", "run/sub", "guard/sub"):
        with pytest.raises(BadInput):
            check_output_folder(target, "guard")


def test_data_are_not_downloaded_into_a_guard(victims: Path, command: Command) -> None:
    before = digests(victims)
    for target in ("guard", "run/data", "photos"):
        assert command("data", "get", "cifar10", "--data", target)[0] == 2
    assert digests(victims) == before


def test_what_may_be_written_may_be_written_again(in_empty_folder: Path) -> None:
    starts = {
        "page": ("a.html", "<!doctype html>\n<html>"), "json": ("a.json", "{\n"),
        "predictions": ("a.csv", "file,class,label,accepted,confidence,Con,reason,error\n"),
        "table": ("a.md", "# Results\n"), "svg": ("a.svg", '<?xml version="1.0"'),
        "txt": ("b.txt", "Figure 2. x"),
    }  # fmt: skip
    for kind, (name, start) in starts.items():
        assert check_output_file(name, kind) == name
        Path(name).touch()
        assert check_output_file(name, kind) == name, "an empty file"
        Path(name).write_text(start)
        assert check_output_file(name, kind) == name
        others = {other: wrong for other, (_, wrong) in starts.items() if other != kind}
        for wrong in others.values():
            Path(name).write_text(wrong)
            with pytest.raises(BadInput, match=f"{name} is there and is not"):
                check_output_file(name, kind)
    for text in ("[]\n", '[\n  {\n    "file": "a.png"'):
        Path("a.json").write_text(text)
        assert check_output_file("a.json", "predictions") == "a.json"


def test_a_page_may_be_appended_to_what_the_shell_redirects_to(
    in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("log.txt").open("ab") as file:
        file.write(b"an earlier line\n")
        monkeypatch.setattr(output_paths, "STANDARD_OUTPUT", file.fileno())
        assert check_output_file("log.txt", "page") == "log.txt"
    monkeypatch.undo()
    with pytest.raises(BadInput, match=r"log.txt is there and is not an HTML page"):
        check_output_file(str(in_empty_folder / "log.txt"), "page")


def test_places_that_are_no_data_are_free(in_empty_folder: Path) -> None:
    place(Path(), "recipe.txt im.png figures/a.png text/b.md pictures/c.jpg")
    write_folder(Path("photos"), 6, names=("one",))
    for name in ("page.html", "figures/page.html", "photos/page.html", "pictures/page.html"):
        assert check_output_file(name, "page") == name
    assert protected_kind(Path()) is None


def test_a_guard_with_files_of_its_user_is_not_replaced(tiny_guard: Guard, tmp_path: Path) -> None:
    tiny_guard.save(tmp_path / "guard")
    tiny_guard.save(tmp_path / "guard")
    place(tmp_path / "guard", ".git/config")
    with pytest.raises(BadInput, match=r"holds other files, such as \.git; name a new folder"):
        tiny_guard.save(tmp_path / "guard")
