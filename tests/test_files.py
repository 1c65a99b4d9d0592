"""Writing files: symbolic links stay, pipes are written to, errors name the target."""

import os
from pathlib import Path

import pytest

from demur.files.checked_files import content_digest, write_bytes
from tests import forked


def test_a_symbolic_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "page").write_bytes(b"old")
    (tmp_path / "link").symlink_to("far/page")
    (tmp_path / "new").symlink_to("far/other")
    assert write_bytes(tmp_path / "link", b"now") == content_digest(b"now")
    write_bytes(tmp_path / "new", b"other")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "new").is_symlink()
    files = {path.name: path.read_bytes() for path in (tmp_path / "far").iterdir()}
    assert files == {"page": b"now", "other": b"other"}


def test_a_link_to_itself_raises_oserror(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(OSError, match=r"link"):
        write_bytes(tmp_path / "link", b"now")
    assert (tmp_path / "link").is_symlink()


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_bytes(pipe, b"through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_writing_to_standard_output_appends(tmp_path: Path) -> None:
    """As with /dev/stdout as the path, redirected to a file by the shell."""
    script = (
        "import os, sys; from pathlib import Path\n"
        "from demur.files.checked_files import write_bytes\n"
        "os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)\n"
        "sys.stdout.write('before '); write_bytes(Path(sys.argv[1]), b'written ')\n"
        "sys.stdout.write('after')"
    )
    done = forked.run(["-c", script, str(tmp_path / "out")])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out").read_bytes() == b"before written after"


def test_an_error_names_the_file_and_not_its_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: Path, *words: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(PermissionError) as caught:
        write_bytes(tmp_path / "page", b"new")
    assert caught.value.filename == str(tmp_path / "page")


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    path = tmp_path / (250 * "x")
    write_bytes(path, b"new")
    assert path.read_bytes() == b"new"
