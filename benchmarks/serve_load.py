"""Load the service for a bounded time on loopback with good and bad requests.

    python benchmarks/serve_load.py guard --seconds 60 --clients 200

Each client sends the next request as soon as the last is answered, also after a 429, so that many
more requests are offered than the service takes. Prints status codes, latency, throughput beside
the bare model's, and the memory of the service.
"""

import argparse
import asyncio
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import urlopen

import numpy as np
import torch
from PIL import Image

from demur.guards import Guard

WARM_UP = 0.2  # of the time, before the memory is read for the first time
BAD_SHARE = 0.2
RECONNECTED = 1  # counted like a status code; 0 is a new connection that broke
GARBAGE = (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"POST /predict HTTP/1.1\r\nHost: x\r\n\r\n{")


@dataclass
class Tally:
    """What was answered."""

    codes: Counter[tuple[str, int]] = field(default_factory=Counter)  # by kind of request
    seconds: list[float] = field(default_factory=list)  # of answered predictions
    wrong: list[str] = field(default_factory=list)  # answers that should not be


def request(kind: str, body: bytes, path: str = "/predict") -> bytes:
    """The bytes of a POST request."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def good_requests(shape: tuple[int, int, int], images: int) -> list[bytes]:
    """Requests with random images as files and as arrays."""
    random, found = np.random.default_rng(0), []
    channels, height, width = shape
    for _ in range(16):
        pixels = random.integers(0, 256, (images, height, width, channels)).astype(np.uint8)
        document = {"images": pixels.tolist(), "dtype": "uint8"}
        found.append(request("application/json", json.dumps(document).encode()))
        parts = []
        for one in pixels:
            file = io.BytesIO()
            Image.fromarray(one[:, :, 0] if channels == 1 else one).save(file, "PNG")
            head = b'--b\r\nContent-Disposition: form-data; name="i"; filename="a.png"\r\n\r\n'
            parts.append(head + file.getvalue() + b"\r\n")
        found.append(request("multipart/form-data; boundary=b", b"".join(parts) + b"--b--\r\n"))
    return found


def bad_requests() -> list[bytes]:
    """Requests that must be answered with a 4xx."""
    bomb = io.BytesIO()
    Image.new("1", (8000, 8000)).save(bomb, "PNG")
    return [
        request("application/json", b"{"),
        request("application/json", b"[" * 50_000),
        request("application/json", b'{"images": [[["a"]]], "dtype": "uint8"}'),
        request("image/png", b"no image"),
        request("image/png", bomb.getvalue()),
        request("image/png", b"x" * (9 << 20)),
        request("multipart/form-data; boundary=b", b"--b\r\nnothing"),
        request("text/plain", b"hello"),
        request("application/json", b"{}", "/nowhere"),
    ]


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
    """Status code and body of one answer, and whether the connection closes after it."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return int(lines[0].split()[1]), body, headers.get("connection") == "close"


async def client(port: int, end: float, pool: Any, tally: Tally, seed: int) -> None:
    """Send requests until the end, over one connection as long as it lasts."""
    random, streams = Random(seed), None
    good, bad = pool
    while time.monotonic() < end:
        is_bad = random.random() < BAD_SHARE
        content = random.choice(bad if is_bad else good)
        if is_bad and random.random() < 0.1:
            await send_garbage(port, random.choice(GARBAGE))
            continue
        start = time.monotonic()
        try:
            is_new = streams is None
            if streams is None:
                streams = await asyncio.open_connection("127.0.0.1", port)
            streams[1].write(content)
            code, body, closes = await asyncio.wait_for(answer(streams[0]), 30)
        except (OSError, asyncio.IncompleteReadError):  # a TimeoutError is an OSError
            # the service may close a connection that is idle, or whose last body it did not read
            tally.codes["bad" if is_bad else "good", 0 if is_new else RECONNECTED] += 1
            close(streams)
            streams = None
            continue
        tally.codes["bad" if is_bad else "good", code] += 1
        if code == 200 and not is_bad:
            tally.seconds.append(time.monotonic() - start)
        allowed = (200, 429, 503) if not is_bad else (400, 404, 413, 415, 422, 429)
        if code not in allowed or (code != 200 and not json.loads(body).get("detail")):
            tally.wrong.append(f"{code} {body[:200]!r}")
        if closes:
            close(streams)
            streams = None
    close(streams)


def close(streams: Any) -> None:
    """Close a connection, if there is one."""
    if streams is not None:
        streams[1].close()


async def send_garbage(port: int, content: bytes) -> None:
    """Send bytes that are no request and hang up."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(content)
        await writer.drain()
        writer.close()
    except OSError:
        pass


def resident(pid: int) -> float:
    """Resident memory of a process in megabytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


async def load(port: int, pid: int, seconds: float, clients: int, pool: Any) -> dict[str, Any]:
    """Run all clients and return the figures."""
    tally, start = Tally(), time.monotonic()
    end = start + seconds
    tasks = [asyncio.create_task(client(port, end, pool, tally, i)) for i in range(clients)]
    memory = []
    while time.monotonic() < end:
        await asyncio.sleep(min(0.5, max(0.0, end - time.monotonic())))
        if time.monotonic() - start > WARM_UP * seconds:
            memory.append(resident(pid))
    await asyncio.gather(*tasks)
    return {
        "seconds": time.monotonic() - start,
        "codes": {f"{kind} {code}": n for (kind, code), n in sorted(tally.codes.items())},
        "latency": np.quantile(tally.seconds, [0.5, 0.99]).tolist() if tally.seconds else [],
        "answered": len(tally.seconds),
        "memory": memory,
        "wrong": tally.wrong,
    }


def bare_speed(guard: Guard, batch: int, seconds: float) -> float:
    """Images per second of the model alone."""
    x = torch.rand(batch, *guard.shape)
    guard.decide(x)
    start, images = time.monotonic(), 0
    while time.monotonic() - start < seconds:
        guard.decide(x, batch_size=batch)
        images += batch
    return images / (time.monotonic() - start)


def start_service(bundle: str, options: list[str]) -> tuple["subprocess.Popen[str]", int]:
    """The service as a process, and its port."""
    words = [sys.executable, "-m", "demur", "serve", bundle, "--port", "0", "--device", "cpu"]
    process = subprocess.Popen([*words, *options], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    if not line.startswith("serving at"):
        raise SystemExit(line + process.stderr.read())
    return process, int(line.strip().rpartition(":")[2])


def wait_until_ready(port: int, seconds: float = 120.0) -> None:
    """Wait for the first answer; processes of their own import torch first."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/ready", timeout=seconds):
            return
        time.sleep(0.5)
    raise SystemExit("the service is not ready")


def measure(
    bundle: str, seconds: float, clients: int, images: int, workers: int = 1
) -> dict[str, Any]:
    """Load a service of a bundle and return the figures."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    guard = Guard.load(bundle)
    brief = seconds / 20
    speeds = {f"bare images/s, batch {n}": bare_speed(guard, n, brief) for n in (1, 64)}
    options = ["--log-level", "error", "--workers", str(workers)]  # nobody reads the log
    process, port = start_service(bundle, options)
    try:
        wait_until_ready(port)
        pool = good_requests(guard.shape, images), bad_requests()
        alone = asyncio.run(load(port, process.pid, 2 * brief, 1, (pool[0], pool[0])))
        figures = asyncio.run(load(port, process.pid, seconds, clients, pool))
        is_alive = process.poll() is None
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    return {
        **speeds,
        "images per request": images,
        "one client, images/s": alone["answered"] * images / alone["seconds"],
        "one client, latency": alone["latency"],
        "clients": clients,
        "workers": workers,
        "images/s": figures["answered"] * images / figures["seconds"],
        "requests/s offered": sum(figures["codes"].values()) / figures["seconds"],
        **figures,
        "alive": is_alive,
        "exit code": code,
    }


def main() -> int:
    """Print the figures; return 1 if something went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("bundle", help="a folder that demur export wrote")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--images", type=int, default=4, help="images of one request")
    parser.add_argument("--workers", type=int, default=1)
    asked = parser.parse_args()
    found = measure(
        asked.bundle, min(asked.seconds, 120.0), min(asked.clients, 500), asked.images,
        asked.workers,
    )  # fmt: skip
    memory = found.pop("memory") or [0.0]
    found["memory, MB: first, last, largest"] = [memory[0], memory[-1], max(memory)]
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    return int(bool(found["wrong"]) or not found["alive"] or found["exit code"] != 0)


if __name__ == "__main__":
    sys.exit(main())
