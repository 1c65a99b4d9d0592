"""Runs from a server with the interface of the Hugging Face hub."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch

from demur import BadInput, Run, load_model
from demur.output import as_output
from demur.runs.run import zoo_folder
from tests.conftest import Command


class Hub(BaseHTTPRequestHandler):
    """Serves the files of one folder as the repository owner/tiny."""

    def __init__(self, *args: object, folder: Path, asked: list[str]) -> None:
        self.folder, self.asked = folder, asked
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        files = {str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p.is_file()}
        path = self.path.partition("?")[0]
        commit = hashlib.sha1(repr(sorted(files)).encode(), usedforsecurity=False).hexdigest()
        name = path.removeprefix("/owner/tiny/resolve/").partition("/")[2]
        if path.startswith("/api/models/owner/tiny/tree"):
            size = {one: (self.folder / one).stat().st_size for one in files}
            tree = [
                {"type": "file", "path": one, "size": size[one], "oid": commit} for one in files
            ]
            return self.answer(json.dumps(tree).encode(), {})
        if path.startswith("/api/models/owner/tiny"):
            listed = [{"rfilename": name} for name in sorted(files)]
            about = {"_id": "1", "id": "owner/tiny", "sha": commit, "siblings": listed}
            return self.answer(json.dumps(about).encode(), {})
        if name not in files:
            return self.answer(b"{}", {"X-Error-Code": "RepoNotFound"}, 404)
        content = (self.folder / name).read_bytes()
        etag = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        return self.answer(content, {"ETag": f'"{etag}"', "X-Repo-Commit": commit})

    do_HEAD = do_GET  # noqa: N815

    def answer(self, content: bytes, headers: dict[str, str], code: int = 200) -> None:
        self.send_response(code)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, list[str]]]:
    """The folder of the repository, beside which runs/ is made, and the paths asked for."""
    constants = pytest.importorskip("huggingface_hub.constants")
    folder, asked = tmp_path / "repository", list[str]()
    shutil.copytree(zoo_folder() / "digits-pgdat-rr-small", folder)
    (folder / "README.md").write_text("not asked for")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, folder=folder, asked=asked))
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.chdir(tmp_path)
    yield folder, asked
    server.shutdown()
    server.server_close()


def test_a_run_of_the_hub_is_downloaded_once_and_is_that_run(
    hub: tuple[Path, list[str]], command: Command
) -> None:
    folder, asked = hub
    net = load_model("hub:owner/tiny")
    x = torch.rand(3, 1, 8, 8)
    same = Run(folder).net(torch.device("cpu"))
    assert torch.equal(as_output(net(x)).logits, same(x).logits)
    assert not any(path.endswith("README.md") for path in asked)
    count = len(asked)
    code, _, err = command("attack", "hub:owner/tiny", "pgd:steps=2", "--n", "4")
    assert code == 0, err
    assert len(asked) == count  # the folder is there
    run = Run.open("owner--tiny")
    assert run.path == Path("runs/owner--tiny")
    assert len(run.records("cal")) == len(Run(folder).records("cal")) > 0
    assert run.records()[0].label == "pgd:steps=2"


@pytest.mark.parametrize(
    ("name", "part"), [("hub:owner/other", "was not downloaded"), ("hub:a:b", "was not downloaded")]
)
def test_a_name_without_repository_is_one_sentence(
    hub: tuple[Path, list[str]], command: Command, name: str, part: str
) -> None:
    code, _, err = command("attack", name, "pgd-3")
    assert (code, err.count("\n")) == (2, 1)
    assert part in err
    with pytest.raises(BadInput, match=part):
        load_model(name)
    assert not list(Path().glob("runs/[!.]*"))


def test_a_damaged_or_unfinished_download_is_no_run(hub: tuple[Path, list[str]]) -> None:
    folder, _ = hub
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(BadInput, match=r"model.safetensors .*damaged|digest"):
        load_model("hub:owner/tiny")
    shutil.rmtree("runs")
    (folder / "recipe.txt").unlink()
    with pytest.raises(BadInput, match=r"recipe.txt is missing"):
        load_model("hub:owner/tiny")
    assert not list(Path("runs").glob("[!.]*"))
