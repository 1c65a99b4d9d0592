"""Places to write to are looked at before any work, and work that cannot be kept is still shown."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from demur.cli.output_paths import check_output_file, check_output_folder, check_archive_folder
from demur.errors import BadInput
from demur.evaluate import Evaluator
from demur.recipes import recipe
from demur.runs import files
from demur.spec import lines
from tests.conftest import Command

FILES = [
    "report RUN -o", "table methods-digits -o", "theory RUN -o", "bench -o", "bench --check -o",
    "bench attacks RUN -o", "bench rejection RUN -o", "bench rejection RUN --figure",
]  # fmt: skip
FOLDERS = [
    "train digits-pgdat --out",
    "demo --out",
    "archive RUN -o",
    "table study-digits --archive",
]


@pytest.mark.parametrize("words", FILES)
@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("", "the name of the file to write is empty; name one"),
        (".", ". is a folder; name a file"),
        ("/", "/ is a folder; name a file"),
        ("folder", "folder is a folder; name a file"),
        ("new/", "new/ is a folder; name a file"),
        ("file/page", "file/page cannot be written, for HERE/file is a file; name another place"),
        ("file/far/page", "cannot be written, for HERE/file is a file"),
    ],
)
def test_a_place_for_no_file_is_refused_before_all_else(
    words: str, place: str, sentence: str, command: Command, in_empty_folder: Path
) -> None:
    Path("folder").mkdir()
    Path("file").touch()
    code, out, err = command(*words.split(), place)
    assert (code, out) == (2, "")
    assert sentence.replace("HERE", str(in_empty_folder)) in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in in_empty_folder.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("words", FOLDERS)
@pytest.mark.parametrize(
    ("place", "sentence"),
    [("", "the name of the folder to write is empty"), ("file/far/run", "/file is a file")],
)
def test_a_place_for_no_folder_is_refused_before_all_else(
    words: str, place: str, sentence: str, command: Command
) -> None:
    Path("file").touch()
    code, out, err = command(*words.split(), place)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_what_may_not_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(BadInput, match="leads in a circle"):
        check_output_file(str(tmp_path / "circle"))
    os.mkfifo(tmp_path / "pipe")
    for place in ("page", "new/folder/page", "pipe"):
        assert check_output_file(str(tmp_path / place)) == str(tmp_path / place)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for place in ("page", "new/folder/page"):
        with pytest.raises(BadInput, match=f"you may not write {tmp_path}; name another place"):
            check_output_file(str(tmp_path / place))
    with pytest.raises(BadInput, match=f"you may not write {tmp_path}/pipe"):
        check_output_file(str(tmp_path / "pipe"))
    with pytest.raises(BadInput, match=f"you may not write {tmp_path};"):
        check_output_folder(str(tmp_path / "new"))
    assert check_output_folder(str(tmp_path)) == str(tmp_path), "it may only have to be read"
    assert check_output_file(None) is None


def test_a_page_goes_through_a_link_or_a_pipe_and_nothing_after_it(
    command: Command, scored_source: Evaluator
) -> None:
    run = str(scored_source.run.path)
    Path("link").symlink_to("pages/far.html")
    code, out, err = command("report", run, "-o", "link")
    assert code == 0, err
    assert out == f"page: {Path('pages/far.html').resolve()}\n"
    assert Path("link").is_symlink()
    os.mkfifo("pipe")
    with ThreadPoolExecutor() as reader:
        came = reader.submit(Path("pipe").read_bytes)
        code, out, err = command("report", run, "-o", "pipe")
    assert (code, out) == (0, "")
    assert "the page" not in err
    assert came.result() == Path("pages/far.html").read_bytes()
    assert Path("pipe").is_fifo()


def full(*words: Any) -> str:
    """A disk with no room."""
    raise OSError(28, "No space left on device")


def test_a_bench_that_cannot_be_written_is_still_shown(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("brief.txt").write_text(
        lines(recipe("digits-pgdat-rr", ["width=4", "attack.steps=1"])), encoding="utf-8"
    )
    monkeypatch.setattr(files, "write_text", full)
    code, out, err = command("bench", "@brief.txt", "--only", "plain", "--steps", "3", "-o", "page")
    assert code == 2
    assert "plain step" in out
    assert "the disk is full" in err


def test_a_report_goes_on_growing_where_a_part_of_it_could_not_be_written(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from demur.cli.bench import open_reports

    kept = open_reports("page", "pairs")
    kept.keep({"pairs": []})
    assert Path("page").read_text() == '{\n  "pairs": []\n}\n'
    monkeypatch.setattr(files, "write_text", full)
    kept.keep({"pairs": [1]})
    assert capsys.readouterr().err == (
        "demur: page could not be written: No space left on device; going on\n"
    )
    os.mkfifo("pipe")
    open_reports("pipe", "pairs").keep({"pairs": []})  # which would wait for a reader


def test_a_shelf_that_takes_no_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shelf").mkdir()
    for place in ("shelf", "new/shelf"):
        assert check_archive_folder(str(tmp_path / place)) == str(tmp_path / place)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "shelf")
    assert check_archive_folder(str(tmp_path / "new" / "shelf")), "which is made first"
    with pytest.raises(BadInput, match=r"you may not write .*/shelf; name another place"):
        check_archive_folder(str(tmp_path / "shelf"))


def test_a_lock_that_cannot_be_made_is_said_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    with pytest.raises(OSError, match=r"run'$"), files.exclusive_lock(tmp_path / "run"):
        pass
