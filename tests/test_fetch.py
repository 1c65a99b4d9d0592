"""Downloading a data set: complete and checked, or not at all, whatever fails."""

import errno
import hashlib
import io
import os
import shutil
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from demur.data import cifar
from demur.data.cifar import CIFAR10_FILES, DataFiles, Published, check_files
from demur.errors import BadInput
from demur.progress import ignore
from tests import forked
from tests.cifar_files import as_binary, contents, small

Tree = dict[str, bytes]
UNREACHABLE = "http://127.0.0.1:9/cifar.tar.gz"  # nothing listens on the discard port


def published_tree(published: Published) -> Tree:
    """The members of the authors' archive."""
    layout = published.layouts[0]
    files = {
        f"{layout.folder}/{part.name}": as_binary(content, layout)
        for part, content in zip(layout.parts, contents(published), strict=True)
    }
    return {f"{layout.folder}/readme.html": b"hello", **files}


def pack(tree: Tree) -> bytes:
    """The tree as a .tar.gz."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, content in tree.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return archive.getvalue()


class Server:
    """Serves one file, counts requests, and may announce more bytes than it sends."""

    def __init__(self) -> None:
        self.content, self.extra_length, self.requests = b"", 0, 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests += 1
                self.send_response(200 if outer.content else 404)
                self.send_header("Content-Length", str(len(outer.content) + outer.extra_length))
                self.end_headers()
                self.wfile.write(outer.content)

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/cifar.tar.gz"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def serve(self, published: Published, content: bytes) -> Published:
        """Serve `content` as the archive; return the data set with that address."""
        self.content = content
        md5 = hashlib.md5(content).hexdigest()
        return replace(published, archive=self.url, md5=md5)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def ten(monkeypatch: pytest.MonkeyPatch) -> Published:
    """A small CIFAR-10, with no proxy."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    published = small(CIFAR10_FILES)
    return replace(published, archive=UNREACHABLE)


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


def get_error(published: Published, data_folder: Path) -> str:
    """The error of a `get` that fails; checks that it leaves no files."""
    with pytest.raises(BadInput) as error:
        cifar.download(published, data_folder, ignore)
    assert list(data_folder.iterdir()) == [], "files were left behind"
    assert "nothing was installed" in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_get_installs_the_published_files_once(
    ten: Published, data_folder: Path, server: Server
) -> None:
    published, progress = server.serve(ten, pack(published_tree(ten))), []
    got = cifar.download(published, data_folder, lambda done, total: progress.append((done, total)))
    assert got == data_folder / "cifar-10-batches-bin"
    assert [path.name for path in data_folder.iterdir()] == ["cifar-10-batches-bin"]
    names = {path.name for path in got.iterdir()}
    assert names == {part.name for part in ten.layouts[0].parts}, "and nothing else"
    assert not check_files(DataFiles(ten.layouts[0], got))
    assert progress[-1] == (len(server.content), len(server.content))
    assert cifar.find_complete(published, data_folder) == got
    assert server.requests == 1


def test_a_file_url_works(
    ten: Published, data_folder: Path, tmp_path: Path, server: Server
) -> None:
    published = server.serve(ten, pack(published_tree(ten)))
    (tmp_path / "cifar.tar.gz").write_bytes(server.content)
    url = (tmp_path / "cifar.tar.gz").as_uri()
    published = replace(published, archive=url)
    assert cifar.find_complete(published, cifar.download(published, data_folder, ignore))


def test_get_repairs_a_damaged_data_set_and_leaves_other_files(
    ten: Published, data_folder: Path, server: Server
) -> None:
    published = server.serve(ten, pack(published_tree(ten)))
    folder = cifar.download(published, data_folder, ignore)
    (folder / "data_batch_2.bin").write_bytes(b"damaged")
    (folder / "test_batch.bin").unlink()
    (folder / "notes.txt").write_text("mine")
    assert cifar.find_complete(published, data_folder) is None
    assert cifar.download(published, data_folder, ignore) == folder
    assert cifar.find_complete(published, data_folder) == folder
    assert (folder / "notes.txt").read_text() == "mine"


def test_wrong_checksums_install_nothing(ten: Published, data_folder: Path, server: Server) -> None:
    published = server.serve(ten, pack(published_tree(ten)))
    wrong = replace(published, md5="0" * 32)
    assert f"its md5 is {published.md5}, not 000" in get_error(wrong, data_folder)
    tree = published_tree(ten)
    tree["cifar-10-batches-bin/data_batch_3.bin"] = b"other"
    assert "its data_batch_3.bin has the md5" in get_error(
        server.serve(ten, pack(tree)), data_folder
    )
    del tree["cifar-10-batches-bin/data_batch_3.bin"]
    assert "its data_batch_3.bin is missing" in get_error(
        server.serve(ten, pack(tree)), data_folder
    )


def test_archive_members_outside_the_folder_are_ignored(
    ten: Published, data_folder: Path, server: Server, tmp_path: Path
) -> None:
    tree, evil = published_tree(ten), b"evil"
    for name in ("../evil", "../../evil", f"{tmp_path}/evil", "cifar-10-batches-bin/../../evil"):
        tree[name] = evil
    tree["elsewhere/data_batch_1.bin"] = evil
    cifar.download(server.serve(ten, pack(tree)), data_folder, ignore)
    assert [
        path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == evil
    ] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_a_symbolic_link_in_the_archive_is_ignored(
    ten: Published, data_folder: Path, server: Server, tmp_path: Path
) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        link = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(link)
    assert "its data_batch_1.bin is missing" in get_error(
        server.serve(ten, archive.getvalue()), data_folder
    )


def test_errors_for_no_network_a_broken_download_and_a_missing_page(
    ten: Published, data_folder: Path, server: Server
) -> None:
    error = get_error(ten, data_folder)
    assert f"{UNREACHABLE}: Connection refused)" in error
    assert f"or unpack that archive in {data_folder} yourself" in error
    published = server.serve(ten, pack(published_tree(ten)))
    server.extra_length = 1000
    assert "the download stopped after" in get_error(published, data_folder)
    server.content, server.extra_length = b"", 0
    assert "Not Found" in get_error(published, data_folder)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_get_leaves_no_files(
    stop: type[BaseException], ten: Published, data_folder: Path, server: Server
) -> None:
    def interrupt(done: int, total: int) -> None:
        raise stop

    published = server.serve(ten, pack(published_tree(ten)))
    with pytest.raises(stop):
        cifar.download(published, data_folder, interrupt)
    assert list(data_folder.iterdir()) == []


def test_a_full_disk_raises_oserror_and_leaves_no_files(
    ten: Published, data_folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", disk_full)
    with pytest.raises(OSError, match="No space left"):
        cifar.download(server.serve(ten, pack(published_tree(ten))), data_folder, ignore)
    assert list(data_folder.iterdir()) == []


KILLED_GET = """
import sys, time
from dataclasses import replace
from pathlib import Path
from demur.data import cifar
from demur.data.cifar import CIFAR10_FILES
from tests.cifar_files import small

def on_progress(done, total):
    print("started", flush=True)
    time.sleep(60)

ten = small(CIFAR10_FILES)
ten = replace(ten, archive=sys.argv[2])
cifar.download(ten, Path(sys.argv[1]), on_progress)
"""


def test_files_of_a_killed_get_are_hidden_and_removed_by_the_next(
    ten: Published, data_folder: Path, server: Server
) -> None:
    published = server.serve(ten, pack(published_tree(ten)))
    child = forked.popen(
        ["-c", KILLED_GET, str(data_folder), server.url], Path(__file__).parents[1]
    )
    assert child.stdout.readline() == "started\n"
    child.kill()
    child.wait()
    (left_over,) = data_folder.iterdir()
    assert left_over.name.startswith(".")
    cifar.download(published, data_folder, ignore)
    assert [path.name for path in data_folder.iterdir()] == ["cifar-10-batches-bin"]


def test_a_file_with_the_name_of_the_folder_is_an_error(ten: Published, data_folder: Path) -> None:
    data_folder.mkdir()
    (data_folder / "cifar-10-batches-bin").write_text("mine")
    with pytest.raises(BadInput, match="is in the way; move it"):
        cifar.download(ten, data_folder, ignore)
