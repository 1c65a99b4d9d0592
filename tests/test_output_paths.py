"""Output paths are checked before any work; results that cannot be written are still printed."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from demur.errors import BadInput
from demur.evaluate import LoadedRun
from demur.files import checked_files as files
from demur.files.output_paths import check_output_file, check_output_folder
from demur.paper import check_archive_folder
from tests.conftest import Command

FILES = [
    "report RUN -o", "paper study recipes methods-digits -o", "paper study theory RUN -o",
]  # fmt: skip
FOLDERS = [
    "train digits-pgdat --out", "demo --out", "export RUN --archive -o",
    "paper study recipes methods-digits --archive",
]  # fmt: skip


@pytest.mark.parametrize("words", FILES)
@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("", "the output file has an empty name; name a file"),
        (".", ". is a folder; name a file"),
        ("/", "/ is a folder; name a file"),
        ("folder", "folder is a folder; name a file"),
        ("new/", "new/ is a folder; name a file"),
        ("file/page", "file/page cannot be written: HERE/file is a file; name another path"),
        ("file/far/page", "cannot be written: HERE/file is a file"),
    ],
)
def test_a_bad_output_file_fails_before_any_work(
    words: str, path: str, sentence: str, command: Command, in_empty_folder: Path
) -> None:
    Path("folder").mkdir()
    Path("file").touch()
    code, out, err = command(*words.split(), path)
    assert (code, out) == (2, "")
    assert sentence.replace("HERE", str(in_empty_folder)) in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in in_empty_folder.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("words", FOLDERS)
@pytest.mark.parametrize(
    ("path", "sentence"),
    [("", "the output folder has an empty name"), ("file/far/run", "/file is a file")],
)
def test_a_bad_output_folder_fails_before_any_work(
    words: str, path: str, sentence: str, command: Command
) -> None:
    Path("file").touch()
    code, out, err = command(*words.split(), path)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_an_image_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "cat.JPG").touch()
    with pytest.raises(BadInput, match="is an image; name another file"):
        check_output_file(str(tmp_path / "cat.JPG"))


def test_paths_without_permission_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(BadInput, match="symbolic link to itself"):
        check_output_file(str(tmp_path / "circle"))
    os.mkfifo(tmp_path / "pipe")
    for path in ("page", "new/folder/page", "pipe"):
        assert check_output_file(str(tmp_path / path)) == str(tmp_path / path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for path in ("page", "new/folder/page"):
        with pytest.raises(BadInput, match=f"you may not write to {tmp_path}; name another path"):
            check_output_file(str(tmp_path / path))
    with pytest.raises(BadInput, match=f"you may not write to {tmp_path}/pipe"):
        check_output_file(str(tmp_path / "pipe"))
    with pytest.raises(BadInput, match=f"you may not write to {tmp_path};"):
        check_output_folder(str(tmp_path / "new"))
    assert check_output_folder(str(tmp_path)) == str(tmp_path), (
        "an existing folder may only be read"
    )
    assert check_output_file(None) is None


def test_a_page_is_written_through_a_link_or_a_pipe(
    command: Command, scored_source: LoadedRun
) -> None:
    run = str(scored_source.run.path)
    Path("link").symlink_to("pages/far.html")
    code, out, err = command("report", run, "-o", "link")
    assert code == 0, err
    assert out == f"page: {Path('pages/far.html').resolve()}\n"
    assert Path("link").is_symlink()
    os.mkfifo("pipe")
    with ThreadPoolExecutor() as reader:
        content = reader.submit(Path("pipe").read_bytes)
        code, out, err = command("report", run, "-o", "pipe")
    assert (code, out) == (0, "")
    assert "the page" not in err
    assert content.result() == Path("pages/far.html").read_bytes()
    assert Path("pipe").is_fifo()


def test_an_archive_folder_without_permission_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "archives").mkdir()
    for path in ("archives", "new/archives"):
        assert check_archive_folder(str(tmp_path / path)) == str(tmp_path / path)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "archives")
    assert check_archive_folder(str(tmp_path / "new" / "archives")), "its parent is made first"
    with pytest.raises(BadInput, match=r"you may not write to .*/archives; name another path"):
        check_archive_folder(str(tmp_path / "archives"))


def test_a_lock_that_cannot_be_made_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    with pytest.raises(OSError, match=r"run'$"), files.exclusive_lock(tmp_path / "run"):
        pass
