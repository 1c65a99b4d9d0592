"""The service: every form of a request, every limit, and clean ends."""

import base64
import io
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.datastructures import URL
from starlette.requests import Request
from starlette.testclient import TestClient

import demur
from demur import Guard, LoadedRun
from demur.guards import GuardResult
from demur.serve import Settings, create_app, server
from demur.serve.decoder import RequestError
from demur.serve.monitoring import DriftMonitor, Metrics
from demur.serve.workers import Batcher, Overloaded
from tests import forked

Client = partial(TestClient, base_url="http://localhost")
Pixels = Any


@pytest.fixture(scope="module")
def pixels(tiny_source: LoadedRun) -> Pixels:
    """Eight test images as uint8, N, H, W, C."""
    images = tiny_source.splits["test"].pixels[:8].permute(0, 2, 3, 1)
    return (images.float() / 16 * 255).round().byte().numpy()


@pytest.fixture(scope="module")
def client(tiny_guard: Guard) -> Iterator[TestClient]:
    with Client(create_app(tiny_guard, Settings(max_images=8, timeout=120.0))) as client:
        yield client


def png(image: Pixels) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image[:, :, 0]).save(file, "PNG")
    return file.getvalue()


def test_files_and_arrays_are_answered_as_the_guard_decides(
    client: TestClient, tiny_guard: Guard, pixels: Pixels
) -> None:
    expected = tiny_guard(pixels)
    files = [("images", (f"{i}.png", png(image), "image/png")) for i, image in enumerate(pixels)]
    by_files = client.post("/predict", files=files)
    as_ints = {"images": pixels.tolist(), "dtype": "uint8"}
    as_floats = {"images": (pixels / 255).tolist(), "dtype": "float32"}
    for answer in (
        by_files,
        client.post("/predict", json=as_ints),
        client.post("/predict", json=as_floats),
    ):
        assert answer.status_code == 200, answer.text
        found = answer.json()["predictions"]
        assert [row["label"] for row in found] == expected.labels.tolist()
        assert [row["accepted"] for row in found] == expected.accepted.tolist()
        scores = [row["scores"]["R-Con"] for row in found]
        assert np.allclose(scores, expected.scores[:, 0], atol=1e-5)
    assert [row["file"] for row in by_files.json()["predictions"]][:2] == ["0.png", "1.png"]
    for kind in ("image/png", "application/octet-stream"):
        one = client.post("/predict", content=png(pixels[0]), headers={"content-type": kind})
        assert one.json()["predictions"][0]["label"] == expected.labels[0]


JSON = {"content-type": "application/json"}
MULTIPART = {"content-type": "multipart/form-data; boundary=x"}
PART = b'--x\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\n'
ONE = [[[0]] * 8] * 8


@pytest.mark.parametrize(
    ("body", "headers", "code", "reason"),
    [
        (b"", {}, 415, "the content type is ''"),
        (b"x", {"content-type": "text/html"}, 415, "send multipart/form-data"),
        (b"{", JSON, 400, "not JSON"),
        (b"[" * 100_000, JSON, 400, "not JSON"),
        (b"\xff", JSON, 400, "not JSON"),
        (b"7", JSON, 422, "must be an object"),
        (b"{}", JSON, 422, '"images" and "dtype"'),
        ({"images": ONE}, JSON, 422, '"dtype" must be one of'),
        ({"images": ONE, "dtype": ["uint8"]}, JSON, 422, '"dtype" must be one of'),
        ({"images": ONE, "dtype": "uint8", "x": 1}, JSON, 422, "nothing else"),
        ({"images": [], "dtype": "uint8"}, JSON, 422, "nested lists"),
        ({"images": "abc", "dtype": "uint8"}, JSON, 422, "nested lists"),
        ({"images": [[[1], [2, 3]]], "dtype": "uint8"}, JSON, 422, "nested lists"),
        ({"images": [[["a"]]], "dtype": "float32"}, JSON, 422, "nested lists"),
        ({"images": [[[None]]], "dtype": "float32"}, JSON, 422, "nested lists"),
        ({"images": [[[10**400]]], "dtype": "float32"}, JSON, 422, "nested lists"),
        ({"images": [[[256]] * 8] * 8, "dtype": "uint8"}, JSON, 422, "0 to 255"),
        ({"images": [[[0.5]] * 8] * 8, "dtype": "uint8"}, JSON, 422, "0 to 255"),
        ({"images": [[[2.0]] * 8] * 8, "dtype": "float32"}, JSON, 422, "floats must lie in"),
        (b'{"images": [[[NaN]]], "dtype": "float32"}', JSON, 422, "floats must lie in"),
        ({"images": [[[0]] * 8] * 9, "dtype": "uint8"}, JSON, 422, "does not resize"),
        ({"images": [[[0, 0]] * 8] * 8, "dtype": "uint8"}, JSON, 422, "takes 1 channels"),
        ({"images": [ONE] * 9, "dtype": "uint8"}, JSON, 413, "at most 8 images"),
        (b"", {"content-type": "image/png"}, 422, "damaged or not an image"),
        (b"x", {"content-type": "multipart/form-data"}, 400, "cannot be read"),
        (b"x", MULTIPART, 400, "cannot be read"),
        (b"--x--\r\n", MULTIPART, 422, "holds no image"),
        (PART + b"x\r\n--x--\r\n", MULTIPART, 422, "a.png: the image is damaged"),
        (PART.replace(b"a.png", b"a\n\0b.png") + b"x\r\n--x--\r\n", MULTIPART, 422,
         "ab.png: the image"),
        ((PART + b"x\r\n") * 9 + b"--x--\r\n", MULTIPART, 413, "at most 8 images"),
        (b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n--x--\r\n", MULTIPART, 400,
         "no other fields"),
    ],
)  # fmt: skip
def test_every_malformed_request_is_a_4xx_with_a_reason(
    client: TestClient, body: Any, headers: dict[str, str], code: int, reason: str
) -> None:
    content = json.dumps(body).encode() if isinstance(body, dict) else body
    for path in ("/predict", "/attack"):
        answer = client.post(path, content=content, headers=headers)
        assert answer.status_code == code, answer.text
        assert reason in answer.json()["detail"]
        assert "\n" not in answer.json()["detail"]


def test_limits_of_body_and_pixels(tiny_guard: Guard) -> None:
    limits = Settings(max_body=4000, max_pixels=100, timeout=120.0)
    with Client(create_app(tiny_guard, limits)) as client:
        large = client.post("/predict", content=b"x" * 5000, headers={"content-type": "image/png"})
        assert large.status_code == 413
        assert "at most 4,000 bytes" in large.json()["detail"]

        def chunks() -> Iterator[bytes]:  # without a content-length
            for _ in range(10):
                yield b"x" * 1000

        chunked = client.post("/predict", content=chunks(), headers={"content-type": "image/png"})
        assert chunked.status_code == 413
        bomb = png(np.zeros((40, 40, 1), np.uint8))
        answer = client.post("/predict", content=bomb, headers={"content-type": "image/png"})
        assert answer.status_code == 422
        assert "40 x 40 pixels and may have at most 100" in answer.json()["detail"]


@pytest.mark.parametrize("host", ["x/health?", "x/page.css#", "["])
def test_the_host_header_opens_no_path(
    tiny_guard: Guard, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    # Starlette up to 0.49 builds the URL of a request, and so its path, from the Host header
    def from_host(request: Request) -> URL:
        return URL(f"http://{request.headers['host']}{request.scope['path']}")

    monkeypatch.setattr(Request, "url", property(from_host))
    with Client(create_app(tiny_guard, Settings(token="a-long-word"))) as client:
        answer = client.post("/predict", content=b"", headers={"Host": host})
        assert answer.status_code == 401


def test_a_token_is_needed_where_one_is_set(tiny_guard: Guard, pixels: Pixels) -> None:
    body = {"images": pixels[:1].tolist(), "dtype": "uint8"}
    with Client(create_app(tiny_guard, Settings(token="a-long-word", timeout=120.0))) as client:
        for given in ("", "Bearer", "Bearer x", "Basic a-long-word", "Bearer a-long-word2", "é"):
            headers = [("authorization", given.encode("latin-1"))]
            answer = client.post("/predict", json=body, headers=headers)  # type: ignore[arg-type]
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
        assert client.get("/metrics").status_code == 401
        assert client.get("/health").json()["token"] is True
        assert client.get("/").status_code == 200
        right = {"authorization": "Bearer a-long-word"}
        assert client.post("/predict", json=body, headers=right).status_code == 200
        assert client.get("/metrics", headers=right).status_code == 200


def test_health_metrics_and_drift(tiny_guard: Guard, pixels: Pixels) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    with Client(create_app(tiny_guard, Settings(mean_run_length=50, timeout=120.0))) as client:
        before = client.get("/health").json()
        assert re.match(r"[\d.]+% of \d+ \w+ images are right, ", before["summary"])
        assert before["status"] == "ok"
        assert before["rejection_rate"] is None
        blank = {"images": np.zeros((30, 8, 8, 1)).tolist(), "dtype": "float32"}
        for _ in range(3):
            rows = client.post("/predict", json=blank).json()["predictions"]
        after = client.get("/health").json()
        assert after["status"] == "drift"
        assert after["images"] == 90
        assert after["rejection_rate"] == 1 - rows[0]["accepted"]
        assert "at least 50 images" in after["drift"]["false_alarms"]
        client.get("/nowhere")
        text = client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    values = {
        (sample.name, sample.labels.get("path"), sample.labels.get("code")): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert values["demur_images_total", None, None] == 90
    assert values["demur_drift_alarm", None, None] == 1
    assert values["demur_requests_total", "/predict", "200"] == 3
    assert values["demur_requests_total", "other", "404"] == 1
    assert values["demur_calibration_rejection_rate", None, None] == pytest.approx(
        1 - tiny_guard.calibration["coverage"]["value"]
    )
    assert values["demur_request_seconds_count", None, None] == 6


def test_an_attack_shows_the_decisions_before_and_after(
    client: TestClient, tiny_guard: Guard, pixels: Pixels
) -> None:
    body = {"images": pixels[:1].tolist(), "dtype": "uint8"}
    report = client.post("/attack", json=body).json()
    assert report["before"]["label"] == tiny_guard(pixels[:1]).labels[0]
    assert report["after"]["probabilities"] != report["before"]["probabilities"]
    encoded = report["images"]["after"].partition(",")[2]
    attacked = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))))
    size = np.abs(attacked.astype(float) - pixels[0, :, :, 0]).max() / 255
    assert 0 < size <= tiny_guard.eps + 0.5 / 255 + 1e-9
    assert tiny_guard(attacked[:, :, None]).labels[0] == report["after"]["label"]
    two = {"images": pixels[:2].tolist(), "dtype": "uint8"}
    assert "takes one image" in client.post("/attack", json=two).json()["detail"]
    with Client(create_app(tiny_guard, Settings(attack=False))) as closed:
        answer = closed.post("/attack", json=body)
        assert answer.status_code == 404
        assert "switched off" in answer.json()["detail"]
        assert closed.get("/health").json()["attack"] is False


def test_answers_have_security_headers_and_no_page_of_others(client: TestClient) -> None:
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "http://" not in page.text + client.get("/page.js").text + client.get("/page.css").text
    assert client.get("/docs").status_code == 404
    paths = client.get("/openapi.json").json()["paths"]
    assert set(paths) == {"/predict", "/attack", "/health", "/metrics", "/drift/reset", "/ready"}


# ---------------------------------------------------------------------------------- batching


class Slow:
    """A guard whose model waits until it is released."""

    def __init__(self, guard: Guard) -> None:
        self.go, self.sizes = threading.Event(), list[int]()
        self.guard = replace(guard, model=self._wait)
        self.net = guard.model

    def _wait(self, x: torch.Tensor) -> Any:
        self.sizes.append(len(x))
        self.go.wait(60)
        return self.net(x)


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_requests_that_wait_are_one_batch_and_a_full_queue_is_overload(tiny_guard: Guard) -> None:
    slow = Slow(tiny_guard)
    batcher = Batcher(slow.guard, max_batch=4, max_queue=6)
    x = torch.rand(7, *tiny_guard.shape)
    first = batcher.submit(x[:1], [""], 10)
    wait_until(lambda: slow.sizes == [1])
    rest = [batcher.submit(x[i : i + 1], [""], 10) for i in range(1, 7)]
    with pytest.raises(Overloaded) as caught:
        batcher.submit(x[:1], [""], 10)
    assert caught.value.headers == {"Retry-After": "1"}
    slow.go.set()
    labels = [future.result(10)[0]["label"] for future in (first, *rest)]
    assert labels == tiny_guard(x).labels.tolist()
    assert slow.sizes == [1, 4, 2]
    batcher.close()
    with pytest.raises(Overloaded):
        batcher.submit(x[:1], [""], 10)


def test_a_request_nobody_waits_for_is_dropped_and_a_failure_is_told(tiny_guard: Guard) -> None:
    slow = Slow(tiny_guard)
    batcher = Batcher(slow.guard, max_batch=4, max_queue=6)
    x = torch.rand(1, *tiny_guard.shape)
    first = batcher.submit(x, [""], 10)
    wait_until(lambda: slow.sizes == [1])
    late, cancelled = batcher.submit(x, [""], 0), batcher.submit(x, [""], 10)
    cancelled.cancel()
    slow.go.set()
    first.result(10)
    broken = batcher.submit(torch.rand(1, 3, 5, 5), [""], 10)
    with pytest.raises(RequestError, match="the model failed on this request"):
        broken.result(10)
    assert late.cancelled()
    batcher.close()
    assert slow.sizes == [1, 1]


def test_overload_and_slowness_are_answered(tiny_guard: Guard, pixels: Pixels) -> None:
    slow = Slow(tiny_guard)
    settings = Settings(max_queue=2, max_images=2, max_batch=1, timeout=0.5)
    body = {"images": pixels[:2].tolist(), "dtype": "uint8"}
    app = create_app(slow.guard, settings)
    reader = app.state.service.reader
    reader.pool.start()
    for _ in range(2):  # until both decoders have started
        reader._decode("application/json", json.dumps(body).encode(), time.monotonic() + 60)
    with Client(app) as client:
        answers: list[Any] = []

        def ask() -> None:
            answers.append(client.post("/predict", json=body))

        def start(condition: Any) -> threading.Thread:
            thread = threading.Thread(target=ask)
            thread.start()
            wait_until(condition)
            return thread

        batcher = app.state.service.batcher
        threads = [start(lambda: slow.sizes), start(lambda: batcher.waiting == 2)]
        threads += [start(lambda n=n: len(answers) >= n) for n in (1, 2)]
        for thread in threads:
            thread.join()
        slow.go.set()
    codes = sorted(answer.status_code for answer in answers)
    assert codes == [429, 429, 503, 503]
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)


def test_too_many_requests_at_the_same_time(tiny_guard: Guard, pixels: Pixels) -> None:
    app = create_app(tiny_guard, Settings(max_requests=1))
    with Client(app) as client:
        app.state.service.requests = 1  # one is in progress
        answer = client.post("/predict", json={"images": pixels.tolist(), "dtype": "uint8"})
        assert answer.status_code == 429
        assert client.get("/health").status_code == 200


def test_a_model_that_fails_is_a_503(tiny_guard: Guard, pixels: Pixels) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with Client(create_app(replace(tiny_guard, model=fail))) as client:
        for path in ("/predict", "/attack"):
            body = {"images": pixels[:1].tolist(), "dtype": "uint8"}
            answer = client.post(path, json=body)
            assert answer.status_code == 503
            assert "the model failed" in answer.json()["detail"]


# ---------------------------------------------------------------------------------- process


def test_an_answer_does_not_wait_for_the_clients_acknowledgement() -> None:
    """asyncio sets TCP_NODELAY on connections of a listener that names its protocol."""
    with server._listen("127.0.0.1", 0, Settings())[0] as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_sigterm_finishes_what_is_in_progress(tiny_guard: Guard, tmp_path: Path) -> None:
    """The command as a process: it says where it listens and ends with code 0."""
    tiny_guard.save(tmp_path / "guard")
    words = ["-m", "demur", "serve", "guard", "--port", "0", "--device", "cpu"]
    process = forked.popen(words, tmp_path, environment())
    try:
        address = process.stderr.readline().split()[-1]
        assert address.startswith("http://127.0.0.1:")
        body = json.dumps({"images": np.zeros((64, 8, 8, 1)).tolist(), "dtype": "float32"}).encode()
        connection = HTTPConnection(address.removeprefix("http://"), timeout=20)
        connection.putrequest("POST", "/predict")
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", str(len(body)))
        connection.endheaders(body[:1000])
        later = HTTPConnection(address.removeprefix("http://"), timeout=20)
        later.request("GET", "/health")  # connections are accepted in their order
        assert later.getresponse().read()
        later.close()
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        connection.send(body[1000:])
        answer = connection.getresponse()
        assert answer.status == 200
        assert len(json.loads(answer.read())["predictions"]) == 64
        connection.close()
        assert process.wait(20) == 0
        assert process.stderr.read().strip().splitlines()[-1] == "stopped"
    finally:
        process.kill()


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(demur.__file__).parents[1])}


def test_counters_of_several_processes_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under several workers of uvicorn: each process counts, and any of them shows the sums."""
    from prometheus_client import values

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    accepted = np.array([True, False, True])
    result = GuardResult(accepted * 1, accepted, np.ones((3, 1)), (), np.ones((3, 2)), (), ())
    for process in (1, 2):
        monkeypatch.setattr(values, "ValueClass", values.MultiProcessValue(lambda p=process: p))
        metrics = Metrics(DriftMonitor([0.5], [5, 5]), 0.1)
        for _ in range(process):
            metrics.count_result(result)
            metrics.count_request("/predict", 200, 0.01)
    shown = metrics.text(waiting=0).decode().splitlines()
    assert {"demur_images_total 9.0", "demur_rejected_total 3.0"} <= set(shown)
    assert 'demur_requests_total{code="200",path="/predict"} 3.0' in shown
    assert "demur_request_seconds_count 3.0" in shown
    assert len(list(tmp_path.glob("counter_*.db"))) == 2
