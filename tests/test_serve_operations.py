"""What the person on call sees: logs, readiness, several workers, and Triton's repository."""

import asyncio
import fcntl
import io
import json
import logging
import os
import re
import shutil
import signal
import socket
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient
from structlog import PrintLogger

from demur import Guard
from demur.guards import export
from demur.guards.export import export_triton
from demur.serve import Settings, create_app, monitoring, server
from tests import forked

Client = partial(TestClient, base_url="http://localhost")
GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
BLANK = {"images": np.zeros((2, 8, 8, 1)).tolist(), "dtype": "float32"}


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_line_per_prediction_and_per_wrong_request(
    tiny_guard: Guard, capsys: pytest.CaptureFixture[str]
) -> None:
    app = create_app(tiny_guard, Settings(log_level="info", log_format="json"))
    with Client(app) as client:
        answer = client.post("/predict", json=BLANK, headers={"X-Request-ID": "abc-1"})
        assert answer.headers["x-request-id"] == "abc-1"
        bad = client.post("/predict", content=b"no json", headers={"X-Request-ID": "\x1b[2J"})
        client.get("/health")
    served, wrong = lines_of(capsys.readouterr().err)
    assert served["request"] == "abc-1"
    assert served["guard"] == wrong["guard"] == tiny_guard.identity
    rows = answer.json()["predictions"]
    assert served["accepted"] == [row["accepted"] for row in rows]
    assert served["scores"] == [row["scores"] for row in rows]
    assert served["ms"] > 0
    assert (wrong["level"], wrong["code"]) == ("warning", bad.status_code)
    assert wrong["reason"] == bad.json()["detail"]
    assert re.fullmatch(r"[0-9a-f]{32}", wrong["request"])


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        (Settings(), 0), (Settings(log_level="info"), 1),
        (Settings(log_level="info", access_log=True), 2), (Settings(log_level="error"), 0),
    ],
)  # fmt: skip
def test_the_level_and_the_access_log(
    settings: Settings, count: int, tiny_guard: Guard, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client(create_app(tiny_guard, settings)) as client:
        client.post("/predict", json=BLANK)
        client.get("/health")
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == count
    assert all(line.startswith("timestamp=") for line in shown)


def test_a_text_log_has_a_value_for_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    writer: Any = PrintLogger()
    monitoring.make_logger(writer, "text", "info", "cats").error("drift alarm", alarm=True)
    assert " alarm=true" in capsys.readouterr().out


def test_drift_is_an_error_in_the_log(
    tiny_guard: Guard, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(log_format="json", log_level="error", mean_run_length=50)
    with Client(create_app(tiny_guard, settings)) as client:
        for _ in range(20):
            client.post("/predict", json=BLANK)
    alarms = lines_of(capsys.readouterr().err)
    assert alarms[0]["event"] == "drift alarm"
    assert alarms[0]["level"] == "error"
    assert alarms[0]["images"] <= 50


def test_ready_until_the_queue_is_full_or_the_service_ends(tiny_guard: Guard) -> None:
    app = create_app(tiny_guard, Settings(token="secret"))
    with Client(app) as client:
        assert client.get("/ready").json() == {"ready": True}
        app.state.service.batcher.waiting += 256
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
        app.state.service.batcher.waiting -= 256
    app.state.service.batcher.close()
    assert not app.state.service.ready


def test_a_log_that_nobody_reads_stops_no_answer(
    tiny_guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    full = os.fdopen(write, "w")
    monkeypatch.setattr("sys.stderr", full)
    monkeypatch.setattr(monitoring, "MAX_LINES", 5)
    with Client(create_app(tiny_guard, Settings(log_level="info", access_log=True))) as client:
        for _ in range(60):  # 200 bytes each
            assert client.get("/health").status_code == 200
    os.close(read)  # else closing the other end would wait
    with suppress(BrokenPipeError):
        full.close()


def test_a_log_that_nobody_reads_stops_no_exit(tiny_guard: Guard, tmp_path: Path) -> None:
    words = ["serve", str(tiny_guard.save(tmp_path / "guard")), "--port", "0", "--device", "cpu"]
    served = forked.popen(["-m", "demur", *words, "--access-log"])
    try:
        address = served.stderr.readline().split()[-1]
        assert served.stderr.readline().startswith("guard: ")
        assert urlopen(f"{address}/health", timeout=60).status == 200
        full = os.open(f"/proc/{served.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
        for size in (4096, 1):
            with suppress(BlockingIOError):
                while True:
                    os.write(full, b"x" * size)
        assert urlopen(f"{address}/health", timeout=60).status == 200
        served.send_signal(signal.SIGTERM)
        assert served.wait(timeout=30) == 0
    finally:
        served.kill()


def listening(guard: Guard, settings: Settings) -> tuple[socket.socket, server.Server]:
    """A server that has not started yet, and its listener."""
    listener, _, settings = server._listen("127.0.0.1", 0, settings)
    app = server._loaded_app(lambda: guard, settings)
    return listener, server.Server(server.server_config(lambda: app, settings))


def connected(listener: socket.socket, *sent: bytes) -> socket.socket:
    one = socket.create_connection(listener.getsockname()[:2], timeout=20)
    for content in sent:
        one.sendall(content)
    return one


def test_connections_that_wait_at_the_end_are_answered(tiny_guard: Guard) -> None:
    listener, service = listening(tiny_guard, Settings())
    clients: list[socket.socket] = []

    async def connect() -> None:  # the server does not run meanwhile, and then ends
        clients.extend(connected(listener, GET_HEALTH) for _ in range(8))

    service.main_loop = connect  # type: ignore[method-assign]
    asyncio.run(service.serve(sockets=[listener]))
    for client in clients:
        with client:
            assert client.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_body_that_breaks_off_in_garbage_is_a_400_and_no_error_of_the_service(
    tiny_guard: Guard, capsys: pytest.CaptureFixture[str]
) -> None:
    listener, service = listening(tiny_guard, Settings(log_level="error"))
    answers: list[bytes] = []

    def ask() -> None:
        head = b"POST /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        with connected(listener, head + b"garbage\r\n") as client:  # in the midst of an answer
            answers.append(client.recv(1000))

    async def served() -> None:
        await asyncio.to_thread(ask)

    service.main_loop = served  # type: ignore[method-assign]
    asyncio.run(service.serve(sockets=[listener]))
    assert answers[0].startswith(b"HTTP/1.1 400")
    assert capsys.readouterr().err == ""


def test_what_a_library_logs_is_written_as_the_other_lines(
    tiny_guard: Guard, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not from the event loop, which a pipe that nobody reads would stop."""
    app = server._loaded_app(lambda: tiny_guard, Settings(log_format="json"))
    error = ValueError("a\nb")
    logging.getLogger("uvicorn.error").error("Exception\n", exc_info=error)
    app.state.service.close()
    (line,) = lines_of(capsys.readouterr().err)
    assert (line["event"], line["level"]) == ("server error", "error")
    assert (line["reason"], line["error"]) == ("Exception", repr(error))


@pytest.mark.exhaustive
def test_two_workers_share_a_port_and_add_up(tiny_guard: Guard, tmp_path: Path) -> None:
    bundle = str(tiny_guard.save(tmp_path / "guard"))
    words = ["-m", "demur", "serve", bundle, "--port", "0", "--device", "cpu", "--workers", "2"]
    served = forked.popen([*words, "--log-format", "json"])
    try:
        address = served.stderr.readline().split()[-1]
        body = json.dumps(BLANK).encode()
        seen: Counter[int] = Counter()
        for _ in range(12):
            request = Request(f"{address}/predict", body, {"Content-Type": "application/json"})
            with urlopen(request, timeout=120) as answer:
                seen[answer.status] += 1
        text = urlopen(f"{address}/metrics", timeout=60).read().decode()
        assert 'demur_requests_total{code="200",path="/predict"} 12.0' in text
        assert "demur_images_total 24.0" in text
        with pytest.raises(HTTPError):
            urlopen(f"{address}/predict", timeout=60)
    finally:
        served.send_signal(signal.SIGTERM)
        start = time.monotonic()
        rest = served.stderr.read()
        code = served.wait(timeout=60)
    assert seen == {200: 12}
    assert code == 0
    assert time.monotonic() - start < 40
    assert rest.rstrip().endswith("stopped")
    assert sum('"event": "answered"' in line for line in rest.splitlines()) == 12


def test_tritons_repository_has_the_decisions_of_the_guard(
    tiny_guard: Guard, onnx_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    # the export takes seconds, and another test has its file
    monkeypatch.setattr(export, "export_onnx", lambda guard, path: shutil.copy(onnx_file, path))
    model = export_triton(tiny_guard, tmp_path / "models")
    text = (model / "config.pbtxt").read_text()
    assert (model / "labels.txt").read_text().split("\n")[:-1] == list(tiny_guard.class_names)
    session = onnxruntime.InferenceSession(str(model / "1" / "model.onnx"))
    x = torch.rand(400, *tiny_guard.shape)
    expected = tiny_guard(x)
    labels, accepted = session.run(["labels", "accepted"], {"images": x.numpy()})
    assert (labels == expected.labels).all()
    assert (accepted == expected.accepted).all()
    # the file names the inputs and outputs of the session, with their sizes
    for one in session.get_outputs():
        assert f'name: "{one.name}"' in text
    assert [one.name for one in session.get_inputs()] == ["images"]
    assert 'name: "images" data_type: TYPE_FP32 dims: [ 1, 8, 8 ]' in text
    service = pytest.importorskip("tritonclient.grpc.model_config_pb2", exc_type=ImportError)
    text_format = pytest.importorskip("google.protobuf.text_format")
    config = text_format.Parse(text, service.ModelConfig())
    assert config.max_batch_size == 64
    assert [list(one.dims) for one in config.output] == [[1], [1], [1], [10]]


def test_a_logged_value_holds_no_control_character(
    tiny_guard: Guard, capsys: pytest.CaptureFixture[str]
) -> None:
    file = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(file, "PNG")
    with Client(create_app(tiny_guard, Settings(log_level="debug", access_log=True))) as client:
        client.post("/x%1b[2J", content=b"")
        client.post("/predict", files={"images": ("a\x1b[2Jb.png", file.getvalue())})
    shown = capsys.readouterr().err
    assert shown.count("\n") == 2
    assert "\x1b" not in shown
