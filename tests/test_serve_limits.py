"""Hostile clients: images that are bombs, slow connections, other people's pages, odd names."""

import argparse
import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import uvicorn
from PIL import Image
from starlette.testclient import TestClient

from demur import BadInput, Guard
from demur.files.image_files import count_pixels, decode_image
from demur.serve import Settings, create_app
from demur.serve.decoder import RequestError
from demur.serve.requests import refusal
from demur.serve.server import server_config
from demur.serve.workers import DecoderPool
from tests.fuzz import live_service
from tests.fuzz.live_service import bomb, image_request, tree_memory
from tests.test_serve import wait_until
from tests.test_serve_load import start_service

PNG = {"content-type": "image/png"}
EXHAUSTIVE = pytest.mark.skipif(
    not os.environ.get("DEMUR_EXHAUSTIVE"), reason="long: make exhaustive"
)
Client = partial(TestClient, base_url="http://localhost")


@contextmanager
def connected(guard: Guard, settings: Settings) -> Iterator[Any]:
    """Function that connects to a service in a thread; its attribute `server` is the server."""
    server = uvicorn.Server(server_config(lambda: create_app(guard, settings), settings))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            while not server.started:
                time.sleep(0.005)
            connect: Any = partial(socket.create_connection, listener.getsockname(), timeout=20)
            connect.server = server
            yield connect
        finally:
            server.should_exit = True
            thread.join()


# ---------------------------------------------------------------------------------- images


def test_64_large_images_of_a_small_request_are_refused_before_they_are_decoded(
    tiny_guard: Guard,
) -> None:
    content = bomb("palette")
    assert len(content) < 2100
    assert count_pixels(content) == 16_000_000
    files = [("images", (f"{i}.png", content, "image/png")) for i in range(64)]
    with Client(create_app(replace(tiny_guard, resize=True))) as client:
        start = time.monotonic()
        answer = client.post("/predict", files=files)
        assert time.monotonic() - start < Settings().timeout  # all of it, if they were decoded
    assert answer.status_code == 413
    assert "1,024,000,000 pixels together and may have 32,000,000" in answer.json()["detail"]


def test_a_decoder_is_killed_at_the_deadline_and_another_one_takes_over(
    tiny_guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = live_service._many_scans(2000)  # seconds of work
    app = create_app(replace(tiny_guard, resize=True), Settings(timeout=1.0))
    pool: DecoderPool = app.state.service.reader.pool
    pool.start()
    processes = [worker.process for worker in pool.idle]
    with Client(app) as client:
        start = time.monotonic()
        answer = client.post("/predict", content=work, headers=PNG)
        assert time.monotonic() - start < 2
        assert answer.status_code == 503
        assert "took too long" in answer.json()["detail"]
        end = time.monotonic() + 10
        while all(process.poll() is None for process in processes):
            assert time.monotonic() < end
            time.sleep(0.01)
        small = live_service._encoded(Image.new("L", (8, 8)), "PNG")
        # on a busy machine it may start too late for the first requests
        wait_until(lambda: client.post("/predict", content=small, headers=PNG).status_code == 200)


def test_a_decoder_that_dies_is_a_422_and_its_memory_is_limited(tiny_guard: Guard) -> None:
    small, job = live_service._encoded(Image.new("L", (8, 8)), "PNG"), dict[str, Any]()
    app = create_app(replace(tiny_guard, resize=True), Settings(timeout=60.0))
    pool: DecoderPool = app.state.service.reader.pool
    with Client(app) as client:
        pool.start()
        pool.idle[0].process.kill()
        pool.idle[0].process.wait()
        answer = client.post("/predict", content=small, headers=PNG)
        assert answer.status_code == 422
        assert "crashed" in answer.json()["detail"]
        assert client.post("/predict", content=small, headers=PNG).status_code == 200
    little = DecoderPool(1, memory=80 << 20)
    job = {"content_type": "image/png", "shape": (1, 8, 8), "resize": True, "max_images": 1,
           "max_pixels": 10**8, "request_pixels": 10**8}  # fmt: skip
    large = live_service._encoded(Image.new("P", (8000, 8000)), "PNG")  # 128 MB when decoded
    with pytest.raises(RequestError, match="the images need too much memory"):
        little.decode(job, large, time.monotonic() + 60)
    little.close()


def test_bodies_together_are_bounded(tiny_guard: Guard) -> None:
    app = create_app(tiny_guard, Settings(max_body=1000))
    with Client(app) as client:
        app.state.service.reader.in_memory = 7500  # of other requests
        large = client.post("/predict", content=b"x" * 900, headers=PNG)
        assert large.status_code == 429
        assert client.post("/predict", content=b"x" * 100, headers=PNG).status_code == 422
        assert app.state.service.reader.in_memory == 7500


@pytest.mark.parametrize("channels", [1, 3])
def test_the_service_decides_as_the_guard_on_files_of_every_kind(
    tiny_guard: Guard, channels: int
) -> None:
    """Bit-identical scores: the service and the guard load images by the same function."""
    guard = replace(tiny_guard, resize=True)
    if channels == 3:
        guard = replace(guard, shape=(3, 8, 8), model=lambda x: tiny_guard.model(x[:, :1]))
    random = np.random.default_rng(0)
    rgba = Image.fromarray(random.integers(0, 256, (90, 70, 4)).astype(np.uint8))
    rotated = Image.Exif()
    rotated[274] = 6
    contents = [
        live_service._encoded(image, kind, **options)
        for image, kind, options in (
            (rgba, "PNG", {}), (rgba.convert("P"), "PNG", {"transparency": 3}),
            (rgba.convert("LA"), "PNG", {}), (rgba.convert("RGB"), "JPEG", {"exif": rotated}),
            (rgba.convert("CMYK"), "JPEG", {}), (rgba, "WEBP", {}), (rgba.convert("P"), "GIF", {}),
            (rgba.convert("RGB"), "TIFF", {}), (rgba.convert("1"), "BMP", {}),
        )
    ]  # fmt: skip
    files = [("images", (f"{i}", content)) for i, content in enumerate(contents)]
    with Client(create_app(guard, Settings(timeout=60.0))) as client:
        found = client.post("/predict", files=files).json()["predictions"]
    expected = guard(contents).rows()
    for row, wanted in zip(found, expected, strict=True):
        assert {key: row[key] for key in wanted} == wanted


def test_bands_are_the_whole_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image is converted in bands; their height does not change a pixel."""
    random = np.random.default_rng(0)
    rgba = Image.fromarray(random.integers(0, 256, (61, 47, 4)).astype(np.uint8))
    for image in (rgba, rgba.convert("P"), rgba.convert("LA"), rgba.convert("1")):
        whole = decode_image(image, 3)
        with monkeypatch.context() as patched:
            patched.setattr("demur.files.image_files.BAND", 100)
            assert np.array_equal(decode_image(image, 3), whole)


# ---------------------------------------------------------------------------------- connections


def closes_after(connection: socket.socket) -> float:
    start = time.monotonic()
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return time.monotonic() - start


def test_slow_headers_and_idle_connections_are_closed(tiny_guard: Guard) -> None:
    with (
        connected(tiny_guard, Settings(header_timeout=0.4)) as connect,
        connect() as idle,
        connect() as slow,
        connect() as used,
    ):
        slow.sendall(b"GET /health HTTP/1.1\r\n")
        used.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert used.recv(1 << 16).startswith(b"HTTP/1.1 200")
        used.sendall(b"GET")  # ends uvicorn's own limit on idle connections
        start = time.monotonic()
        for _ in range(3):
            time.sleep(0.1)
            slow.sendall(b"X: y\r\n")  # a byte now and then does not help
        for connection in (idle, slow, used):
            closes_after(connection)
        assert time.monotonic() - start < 3


def test_a_slow_body_is_a_408_and_an_answer_that_is_not_read_is_dropped(tiny_guard: Guard) -> None:
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
    with connected(tiny_guard, Settings(timeout=0.5, header_timeout=0.4)) as connect:
        with connect() as slow:
            slow.sendall(head + b"Content-Length: 100\r\n\r\nx")
            start = time.monotonic()
            assert slow.recv(1 << 16).startswith(b"HTTP/1.1 408")
            closes_after(slow)
            assert time.monotonic() - start < 3
        with connect() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
            wait_until(lambda: connect.server.server_state.connections)
            wait_until(lambda: not connect.server.server_state.connections)  # 5 MB were not read


def test_connections_above_the_limit_are_closed(tiny_guard: Guard) -> None:
    with connected(tiny_guard, Settings(max_requests=1, header_timeout=20.0)) as connect:
        first = [connect() for _ in range(4)]
        with connect() as fifth:
            assert closes_after(fifth) < 5
        first[0].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert first[0].recv(1 << 16).startswith(b"HTTP/1.1 200")
        for connection in first:
            connection.close()


# ---------------------------------------------------------------------------------- other pages


@pytest.mark.parametrize(
    ("host", "origin", "names", "status"),
    [
        ("localhost:8000", None, (), None),
        ("127.0.0.1", "http://127.0.0.1", (), None),
        ("[::1]:8000", "http://[::1]:8000", (), None),
        ("LOCALHOST", None, (), None),
        ("localhost:8000", "http://localhost:3000", (), 403),  # another program's page
        ("localhost:8000", "null", (), 403),
        ("localhost:8000", "http://evil.example", (), 403),
        ("localhost", "ftp://localhost", (), 403),
        ("evil.example", None, (), 421),
        ("evil.example:8000", "http://evil.example:8000", (), 421),  # a name that was rebound
        ("10.0.0.7:8000", None, (), 421),
        ("10.0.0.7:8000", None, ("0.0.0.0",), None),
        ("evil.example", None, ("0.0.0.0",), 421),
        ("my.site", "https://my.site", ("my.site",), None),
        ("127.0.0.1:8000", "https://my.site", ("my.site",), None),  # a proxy that changes Host
        ("localhost.evil.example", None, (), 421),
        *((odd, None, (), 400) for odd in (None, "", "[", "]", "[::1", "a b", "x/health?", "a:b",
                                           "a,b", "u@localhost", "é", "a" * 300, "a\n")),
    ],
)  # fmt: skip
def test_hosts_and_origins(
    host: str | None, origin: str | None, names: tuple[str, ...], status: int | None
) -> None:
    found = refusal(host, origin, names)
    assert (found[0] if found else None) == status


def test_no_page_of_others_can_predict_or_reset_the_drift_test(tiny_guard: Guard) -> None:
    blank = {"images": np.zeros((30, 8, 8, 1)).tolist(), "dtype": "float32"}
    app = create_app(tiny_guard, Settings(mean_run_length=50, timeout=60.0))
    with TestClient(app, base_url="http://localhost", client=("127.0.0.1", 1)) as client:
        for path in ("/predict", "/drift/reset"):
            for headers in ({"origin": "http://evil.example"}, {"origin": "null"}):
                assert client.post(path, json=blank, headers=headers).status_code == 403
            for host, code in (("[", 400), ("evil.example", 421)):
                assert client.post(path, json=blank, headers={"host": host}).status_code == code
        assert client.get("/health").json()["images"] == 0
        for _ in range(3):
            assert client.post("/predict", json=blank).status_code == 200
        assert client.get("/health").json()["status"] == "drift"
        assert client.get("/drift/reset").status_code == 405
        forwarded = client.post("/drift/reset", headers={"x-forwarded-for": "1.2.3.4"})
        assert forwarded.status_code == 403
        assert client.post("/drift/reset").json()["alarm"] is False
        health = client.get("/health").json()
        assert (health["status"], health["drift"]["images"]) == ("ok", 0)
        assert health["images"] == 90
    with TestClient(app, base_url="http://localhost", client=("10.0.0.7", 1)) as client:
        answer = client.post("/drift/reset")
        assert answer.status_code == 403
        assert "--token" in answer.json()["detail"]
    guarded = create_app(tiny_guard, Settings(token="a-long-word"))
    with TestClient(guarded, base_url="http://localhost", client=("10.0.0.7", 1)) as client:
        assert client.post("/drift/reset").status_code == 401
        right = {"authorization": "Bearer a-long-word"}
        assert client.post("/drift/reset", headers=right).status_code == 200


def test_names_have_no_terminal_escapes(tiny_guard: Guard, tmp_path: Path) -> None:
    small = live_service._encoded(Image.new("L", (8, 8)), "PNG")
    names = ["\x1b[31mred.png", "\x9b31m.png", "\u202egnp.exe", "a\nb.png", "<b>.png"]
    with Client(create_app(tiny_guard, Settings(timeout=60.0))) as client:
        files = [("images", (name, small, "image/png")) for name in names]
        answer = client.post("/predict", files=files)
        found = [row["file"] for row in answer.json()["predictions"]]
        assert all(name.isprintable() for name in found)
        assert found[4] == "<b>.png"
        assert answer.headers["content-type"] == "application/json"
        damaged = client.post("/predict", files=[("images", (names[0], b"x", "image/png"))])
        assert damaged.json()["detail"].startswith("[31mred.png: the image is damaged")
        kind: Any = [("content-type", b"a\x9b31m")]
        assert client.post("/predict", content=b"", headers=kind).json()["detail"].isprintable()
    classes = ["\x1b[31m", *"123456789"]
    with pytest.raises(BadInput, match="cannot be printed"):
        folder = replace(tiny_guard, class_names=tuple(classes)).save(tmp_path / "odd")
        Guard.load(folder)


# ---------------------------------------------------------------------------------- fuzzing


def attacked(guard: Guard, folder: Path, requests: int, images: int, share: float) -> None:
    """Send fuzzed requests and hostile images to a service in a process of its own."""
    options = ["--timeout", str(live_service.TIMEOUT)]
    process, port = start_service(str(guard.save(folder / "guard")), options)
    try:
        start = tree_memory(process.pid)
        random = Random(3)
        palette = live_service._post("image/png", bomb("palette"))
        made = [
            [live_service.any_request(random) for _ in range(requests)],
            [palette] * 6 + [image_request(random, share) for _ in range(images)],
        ]
        for contents, beside in zip(made, (32, 0), strict=True):
            sent = live_service.attack(port, process.pid, contents, 24, start, beside=beside)
            tally = asyncio.run(sent)
            assert tally.wrong == []
            assert tally.memory < live_service.CEILING
            assert len(tally.codes) > 1
        assert live_service.decides_as(guard, port)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_few_hostile_requests_and_images(tiny_guard: Guard, tmp_path: Path) -> None:
    attacked(replace(tiny_guard, resize=True), tmp_path, requests=120, images=20, share=0.0)


def test_a_fuzz_of_the_service_that_is_stopped_leaves_its_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "counts.json"
    save = live_service._reporter("requests", argparse.Namespace(save=saved), {"seed": 5})

    async def answer(port: int, content: bytes, tally: live_service.Tally, *_: float) -> None:
        tally.codes[200] += 1
        await asyncio.sleep(0.001)

    def report(tally: live_service.Tally) -> None:
        save(tally)
        if tally.codes.total() > 10:
            raise InterruptedError

    monkeypatch.setattr(live_service, "_send", answer)
    monkeypatch.setattr(live_service, "REPORT_SECONDS", 0.0)
    contents = repeat(b"", 100_000)
    with pytest.raises(InterruptedError):
        asyncio.run(live_service.attack(0, os.getpid(), contents, 2, 0.0, report=report))
    found = json.loads(saved.read_text())
    assert found["seed"] == 5
    assert 10 < found["requests"]["sent"] == found["requests"]["codes"]["200"] < 100_000
    assert found["requests"]["memory"] > 0


def test_requests_that_wait_do_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = 0, 0

    async def wait(port: int, content: bytes, tally: live_service.Tally, *_: float) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.1)
        running -= 1
        tally.codes[200] += 1
        if content == b"broken":
            raise RuntimeError("of a request that was left")

    monkeypatch.setattr(live_service, "_send", wait)
    monkeypatch.setattr(live_service, "PATIENCE", 0.001)
    attack = partial(live_service.attack, 0, os.getpid(), clients=2, start=0.0)
    assert asyncio.run(attack([b""] * 12, beside=3)).codes == {200: 12}
    assert most == 5
    most = 0
    assert asyncio.run(attack([b""] * 4)).codes == {200: 4}
    assert most == 2
    with pytest.raises(RuntimeError, match="was left"):
        asyncio.run(attack([b"broken"] + [b""] * 9, beside=3))


@EXHAUSTIVE
def test_many_hostile_requests_and_images(tiny_guard: Guard, tmp_path: Path) -> None:
    attacked(replace(tiny_guard, resize=True), tmp_path, 100_000, 10_000, share=0.1)
