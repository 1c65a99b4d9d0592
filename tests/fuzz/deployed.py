"""Fuzzed bundles and requests: untrusted input of the loader and the service."""

import asyncio
import io
import json
import shutil
import struct
import sys
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import torch
from PIL import Image

import demur
from demur import KD, RR, Coupled, Digits, Guard, RCon, ResNet8
from demur.files.checked_files import content_digest
from demur.guards.export import model_card
from tests.fuzz.mutation import ODD_TEXT, ODD_VALUES, mutate_bytes, mutate_json, mutate_text
from tests.fuzz.outcomes import expect

TRAP = "module_of_a_bundle"  # a module beside the bundle that must never be imported
FACTORIES = (
    None, f"{TRAP}:make", "os:abort", "sys:exit", "torch.nn:Identity", "torch.nn:Linear",
    "subprocess:Popen", "demur.guards.core:Guard", "demur.nets:RejectingNet", "a.b:c", ":", "x",
)  # fmt: skip
NETS = (
    "ResNet8(width=2)", "ResNet8(width=1000000)", "ResNet8(width=3)", "ResNet18(width=2)",
    "WideResNet(depth=100, widen=100)", "Digits()", f'Custom("{TRAP}:Net")', "RR()", "", "ResNet8",
)  # fmt: skip


# ---------------------------------------------------------------------------------- bundles


def _guard(rejector: Any) -> Guard:
    random = torch.Generator().manual_seed(0)
    x, y = torch.rand(120, 1, 8, 8, generator=random), torch.arange(120) % 10
    built_from = (ResNet8(width=2), RR())
    net = built_from[0].build(Digits().domain, built_from[1])
    return demur.guard(
        net, x, y, rejector=rejector, coverage=0.7, x_fit=x, y_fit=y, built_from=built_from,
        accept_chance=True,
    )  # fmt: skip


@cache
def _bundles(folder: Path) -> tuple[dict[str, bytes], ...]:
    """The files of three bundles: one score, a fitted score, and two scores."""
    found = []
    for rejector in (RCon(), KD(0.01, 5), Coupled(KD(0.01, 5), -100.0, RCon())):
        path = _guard(rejector).save(folder / "made")
        found.append({file.name: file.read_bytes() for file in path.iterdir()})
        shutil.rmtree(path)
    return tuple(found)


def _mutate_config(random: Random, config: dict[str, Any]) -> dict[str, Any]:
    if random.random() < 0.25:
        config["model"] |= random.choice((
            {"net": random.choice(NETS)}, {"head": random.choice(NETS)},
            {"net": None, "head": None, "factory": random.choice(FACTORIES)},
            {"net": mutate_text(random, config["model"]["net"])},
            {"head": mutate_text(random, config["model"]["head"])},
        ))  # fmt: skip
        return config
    if random.random() < 0.25:
        part = random.choice(config["scores"])
        part |= random.choice((
            {"rejector": mutate_text(random, part["rejector"])},
            {"threshold": random.choice(ODD_VALUES)},
            {"arrays": mutate_json(random, part["arrays"] or {"bank": ["float32", 2]})},
        ))  # fmt: skip
        return config
    part = random.choice(("image", "calibration", "model", "files", ""))
    if not part:
        return mutate_json(random, config)
    return config | {part: mutate_json(random, config[part])}


def _mutate_tensors(random: Random, content: bytes) -> bytes:
    size = struct.unpack("<Q", content[:8])[0]
    header, data = content[8 : 8 + size], content[8 + size :]
    if random.random() < 0.5:
        header = mutate_bytes(random, header)
    else:
        data = mutate_bytes(random, data)
    return struct.pack("<Q", len(header)) + header + data


def bundle(random: Random, folder: Path) -> bool:
    """Load a bundle whose configuration or tensors were changed, with digests that follow."""
    files = dict(random.choice(_bundles(folder)))
    config = json.loads(files["config.json"])
    config.pop("metadata_digest")
    tensors = [name for name in files if name.endswith(".safetensors")]
    follows = random.random() < 0.8
    if random.random() < 0.3:
        name = random.choice(tensors)
        files[name] = _mutate_tensors(random, files[name])
        if follows:
            config["files"][name] = content_digest(files[name])
    else:
        config = _mutate_config(random, config)
    here = folder / "bundle"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    for name, content in files.items():
        (here / name).write_bytes(content)
    (here / "config.json").write_bytes(_document(random, config))
    (here / f"{TRAP}.py").write_text("raise SystemExit('code of a bundle was run')")
    sys.path.insert(0, str(here))
    try:
        loaded = Guard.load(here)
        result = loaded(torch.rand(2, *loaded.shape))
    finally:
        sys.path.remove(str(here))
        expect(TRAP not in sys.modules, "a module of the bundle was imported")
    classes = len(loaded.class_names)
    expect(bool(((result.labels >= 0) & (result.labels < classes)).all()), "other labels")
    expect(result.scores.shape == (2, len(loaded.scores)), "other scores")
    expect(len(json.dumps(result.rows(), allow_nan=False)) > 0, "rows that are no JSON")
    expect(list(loaded.class_names) == config["class_names"], "other classes")
    expect(len(model_card(loaded, None)) > 0, "no card")
    accepted = loaded.calibration["coverage"]
    expect(accepted is None or 0 <= accepted["value"] <= 1, "another coverage")
    return True


def _document(random: Random, config: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(config, sort_keys=True)
    except RecursionError:
        return b'{"a":' * 3000
    document = json.dumps(config | {"metadata_digest": content_digest(text.encode())}).encode()
    return mutate_bytes(random, document) if random.random() < 0.1 else document


# ---------------------------------------------------------------------------------- requests


class Answer(NamedTuple):
    """What the service answered."""

    status_code: int
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class _Service:
    """The application on an event loop of its own; a client with threads is three times slower."""

    def __init__(self) -> None:
        from demur.serve import Settings, create_app

        self.app = create_app(
            _guard(RCon()),
            Settings(max_body=20_000, max_pixels=10_000, max_images=4, timeout=600.0),
        )
        self.loop = asyncio.new_event_loop()

    def request(self, method: str, url: str, body: bytes, headers: list[tuple[str, str]]) -> Answer:
        path, _, query = url.partition("?")
        raw = [(name.encode(), value.encode()) for name, value in headers]
        if not any(name == "host" for name, _ in headers):
            raw.append((b"host", b"localhost"))
        if not any(name == "content-length" for name, _ in headers):
            raw.append((b"content-length", str(len(body)).encode()))
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
            "scheme": "http", "path": unquote(path), "raw_path": path.encode(),
            "query_string": query.encode(), "root_path": "", "headers": raw,
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
        }  # fmt: skip
        return self.loop.run_until_complete(self._call(scope, body))

    async def _call(self, scope: dict[str, Any], body: bytes) -> Answer:
        half = len(body) // 2
        messages = [
            {"type": "http.request", "body": body[:half], "more_body": True},
            {"type": "http.request", "body": body[half:], "more_body": False},
        ]
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return messages.pop(0) if messages else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        return Answer(sent[0]["status"], b"".join(one.get("body", b"") for one in sent[1:]))


@cache
def _service() -> _Service:
    return _Service()


@cache
def _pictures() -> tuple[bytes, ...]:
    random = np.random.default_rng(0)
    found = []
    for size, kind in (
        ((8, 8), "PNG"),
        ((8, 8), "GIF"),
        ((8, 8), "BMP"),
        ((8, 8), "WEBP"),
        ((8, 8), "TIFF"),
        ((8, 8), "JPEG"),
        ((9, 7), "PNG"),
        ((200, 200), "PNG"),
    ):
        file = io.BytesIO()
        Image.fromarray(random.integers(0, 256, size).astype(np.uint8)).save(file, kind)
        found.append(file.getvalue())  # fmt: skip
    return tuple(found)


PATHS = ("/predict", "/predict", "/predict", "/attack", "/health", "/metrics", "/", "/openapi.json",
         "/page.js", "/nowhere", "/predict/", "//", "/page.py", "/../etc")  # fmt: skip
KINDS = ("image/png", "application/json", "multipart/form-data; boundary=b", "text/plain", "",
         "application/octet-stream", "multipart/form-data", "image/", "multipart/form-data; "
         "boundary=b; charset=nothing")  # fmt: skip


def _json_body(random: Random) -> bytes:
    shape = random.choice(((8, 8, 1), (2, 8, 8, 1), (5, 8, 8, 1), (8, 8), (8, 8, 3), (1, 1, 1)))
    dtype = random.choice(("uint8", "float32"))
    values = np.random.default_rng(random.getrandbits(32)).integers(0, 256, shape)
    images = values.tolist() if dtype == "uint8" else (values / 255).tolist()
    document: dict[str, Any] = {"images": images, "dtype": dtype}
    if random.random() < 0.7:
        document = mutate_json(random, document)
    try:
        body = json.dumps(document).encode()
    except RecursionError:
        body = b"[" * 9000
    return mutate_bytes(random, body) if random.random() < 0.2 else body


def _multipart_body(random: Random) -> bytes:
    parts = []
    for _ in range(random.choice((0, 1, 1, 2, 4, 5))):
        name = random.choice(("images", "file", mutate_text(random, "images")))
        disposition = f'form-data; name="{name}"'
        if random.random() < 0.8:
            disposition += f'; filename="{random.choice(("a.png", *ODD_TEXT))}"'
        head = f"--b\r\nContent-Disposition: {disposition}\r\n\r\n"
        parts.append(head.encode("utf-8", "surrogatepass") + random.choice(_pictures()) + b"\r\n")
    body = b"".join(parts) + b"--b--\r\n"
    return mutate_bytes(random, body) if random.random() < 0.5 else body


def _body(random: Random) -> tuple[str, bytes]:
    """A body and its content type."""
    match random.randrange(5):
        case 0:
            return KINDS[0], random.choice(_pictures())
        case 1:
            return KINDS[0], mutate_bytes(random, random.choice(_pictures()))
        case 2:
            return KINDS[1], _json_body(random)
        case 3:
            return KINDS[2], _multipart_body(random)
        case _:
            return KINDS[0], random.randbytes(random.choice((0, 1, 100, 21_000)))


def api(random: Random, folder: Path) -> bool:
    """Send a request to the service: a 4xx has a reason, a 200 of /predict has decisions."""
    path = random.choice(PATHS)
    right, body = _body(random)
    kind = right if random.random() < 0.8 else random.choice(KINDS)
    headers = [("content-type", kind)]
    if random.random() < 0.1:
        odd = random.choice(("authorization", "content-length", "transfer-encoding", "range",
                             "content-type", "host", "accept", "content-encoding"))  # fmt: skip
        value = random.choice(("", "-1", "x", "chunked", "9" * 30, "bytes=0-1", "Bearer x"))
        headers.append((odd, value))
    method = random.choice(("POST", "POST", "POST", "GET", "PUT", "DELETE", "HEAD", "OPTIONS"))
    if random.random() < 0.05:
        path += random.choice(("?a=1", "?" + "x" * 999, "%00", "%ff", "?%"))
    answer = _service().request(method, path, body, headers)
    expect(answer.status_code < 500, f"{method} {path}: {answer.status_code} {answer.body[:200]!r}")
    if answer.status_code >= 400 and method != "HEAD":
        detail = answer.json()["detail"]
        expect(isinstance(detail, str) and 0 < len(detail) < 1000 and "\n" not in detail, "reason")
    if answer.status_code == 200 and path.startswith("/predict"):
        rows = answer.json()["predictions"]
        expect(1 <= len(rows) <= 4 and all(0 <= row["label"] < 10 for row in rows), "decisions")
    return bool(answer.status_code < 400)
