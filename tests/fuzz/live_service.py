"""Hostile requests and images to a service in a process of its own, over sockets.

    PYTHONPATH=benchmarks python -m tests.fuzz.live_service BUNDLE --requests 100000 --images 10000

Checks that no answer comes later than the time limit and one second, that no answer is a 500, that
the memory of the service and its decoders stays within a gigabyte of its start, and that it still
decides as the guard does afterwards. The counts so far are printed every ten seconds; --save writes
them to a file, which a run that is stopped leaves behind, and --first continues it. On a busy
machine, --late inf checks everything but the time of the answers.
"""

import argparse
import asyncio
import io
import json
import signal
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image

import serve_load
from demur.guards import Guard
from tests.fuzz.deployed import KINDS, PATHS, _body
from tests.fuzz.mutation import mutate_bytes

TIMEOUT = 3.0  # seconds of the service
HEADER_TIMEOUT = 5.0  # its default, after which a connection whose headers never end is closed
LATE = 1.0  # seconds after them, in which an answer may still come
CEILING = 1024.0  # megabytes above the start
REPORT_SECONDS = 10.0
PATIENCE = 0.5  # seconds after which a client leaves a request that waits and sends the next
LARGE = (4000, 4000)  # pixels, as many as one image may have
HOSTS = ("localhost", "127.0.0.1:1", "[::1]", "evil.example", "[", "]", "x/health?", "a b", "é", "",
         "localhost, evil.example", "[::1", "localhost:99999999", "x" * 300, "\x7f")  # fmt: skip
ORIGINS = ("http://localhost", "null", "http://evil.example", "[", "file://", "http://[", "é")


@dataclass
class Tally:
    """What was answered."""

    codes: Counter[int] = field(default_factory=Counter)  # 0: closed without an answer
    slowest: float = 0.0
    wrong: list[str] = field(default_factory=list)
    memory: float = 0.0  # megabytes above the start, at most

    def __str__(self) -> str:
        codes = ", ".join(f"{n:,} x {code}" for code, n in sorted(self.codes.items()))
        return (
            f"{self.codes.total():,} sent: {codes}; slowest {self.slowest:.2f} s, "
            f"{self.memory:.0f} MB above the start, {len(self.wrong)} wrong"
        )


# ---------------------------------------------------------------------------------- images


def _encoded(image: Any, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _many_scans(side: int) -> bytes:
    """A progressive JPEG whose last scan comes 2,000 times: work that its size does not show."""
    content = _encoded(Image.new("RGB", (side, side), "red"), "JPEG", progressive=True)
    scan = content[content.rindex(b"\xff\xda") : -2]
    return content[:-2] + scan * min(2000, (7 << 20) // len(scan)) + content[-2:]


ROTATED = Image.Exif()
ROTATED[274] = 6
BOMBS: dict[str, Callable[[], bytes]] = {  # small files with many pixels or much work
    "palette": lambda: _encoded(Image.new("P", LARGE), "PNG", transparency=0),
    "alpha": lambda: _encoded(Image.new("RGBA", LARGE), "PNG", exif=ROTATED),
    "webp": lambda: _encoded(Image.new("RGBA", LARGE), "WEBP", lossless=True, exif=ROTATED),
    "gif": lambda: _encoded(Image.new("P", LARGE), "GIF", transparency=0),
    "tiff": lambda: _encoded(Image.new("RGBA", LARGE), "TIFF", compression="tiff_deflate"),
    "jpeg": lambda: _encoded(Image.new("CMYK", LARGE), "JPEG", progressive=True, exif=ROTATED),
    "scans": lambda: _many_scans(2000),
    "large": lambda: _encoded(Image.new("1", (8000, 8000)), "PNG"),
    "wide": lambda: _encoded(Image.new("L", (16_000_000, 1)), "PNG"),
}


@cache
def bomb(name: str) -> bytes:
    """One of BOMBS."""
    return BOMBS[name]()


@cache
def _small() -> tuple[bytes, ...]:
    random = np.random.default_rng(0)
    found = []
    for side in (1, 8, 60):
        image = Image.fromarray(random.integers(0, 256, (side, side, 4)).astype(np.uint8))
        for kind in ("PNG", "WEBP", "TIFF"):
            found.append(_encoded(image, kind))
        for kind in ("JPEG", "BMP", "PPM"):
            found.append(_encoded(image.convert("RGB"), kind))
        found.append(_encoded(image.convert("P"), "GIF"))
        found.append(_encoded(image.convert("RGB"), "TIFF", compression="tiff_lzw"))
    return tuple(found)


def _other_size(random: Random) -> bytes:
    """A PNG whose header states another size or depth, with a checksum that follows."""
    content = bytearray(random.choice([one for one in _small() if one[:4] == b"\x89PNG"]))
    sizes = [random.choice((0, 1, 9, 3999, 65_535, 2**31 - 1)) for _ in range(2)]
    depth, colour = random.choice((1, 8, 8, 16)), random.choice((0, 2, 3, 4, 6))
    content[16:29] = struct.pack(">IIBBBBB", *sizes, depth, colour, 0, 0, random.randrange(2))
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    return bytes(content)


def hostile_image(random: Random, share: float = 0.1) -> bytes:
    """An image that is large, damaged or lies about its size; `share` of them are bombs."""
    if random.random() < share:
        content = bomb(random.choice(list(BOMBS)))
        return content if random.random() < 0.7 else mutate_bytes(random, content)
    if random.random() < 0.3:
        return _other_size(random)
    return mutate_bytes(random, random.choice(_small()))


# ---------------------------------------------------------------------------------- requests


def _post(kind: str, body: bytes, extra: str = "", path: str = "/predict") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{extra}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def image_request(random: Random, share: float = 0.1) -> bytes:
    """A request with one to three hostile images, or 64 times the same."""
    if random.random() < 0.8:
        return _post("image/png", hostile_image(random, share))
    if random.random() < 0.1:
        files = [hostile_image(random, share)[:100_000]] * 64
    else:
        files = [hostile_image(random, share) for _ in range(random.randint(1, 3))]
    head = b'--b\r\nContent-Disposition: form-data; name="i"; filename="\x1b[31m<b>.png"\r\n\r\n'
    body = b"".join(head + content + b"\r\n" for content in files) + b"--b--\r\n"
    return _post("multipart/form-data; boundary=b", body)


def any_request(random: Random) -> bytes:
    """A request with an odd path, method, header or body, or bytes that are none."""
    right, body = _body(random)
    kind = right if random.random() < 0.8 else random.choice(KINDS)
    host = random.choice(HOSTS) if random.random() < 0.3 else "localhost"
    lines = [f"{random.choice(('POST', 'POST', 'POST', 'GET', 'PUT', 'HEAD', 'X'))} "
             f"{random.choice(PATHS)} HTTP/1.{random.choice('1110')}", f"Host: {host}",
             f"Content-Type: {kind}"]  # fmt: skip
    if random.random() < 0.2:
        lines.append(f"Origin: {random.choice(ORIGINS)}")
    if random.random() < 0.1:
        lines.append(random.choice((
            "Transfer-Encoding: chunked", "Expect: 100-continue", "Upgrade: websocket", "Host: b",
            "Connection: upgrade", "Content-Length: 5", "X: " + "y" * 70_000, "Content-Length: -1",
            "Forwarded: for=1", "Authorization: Bearer \xe9",
        )))  # fmt: skip
    lines.append(f"Content-Length: {len(body) + random.choice((0, 0, 0, 0, 0, 0, 0, 0, 5, -1))}")
    content = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body
    return mutate_bytes(random, content) if random.random() < 0.05 else content


async def _send(port: int, content: bytes, tally: Tally, limit: float, late: float) -> None:
    """Send a request on a connection of its own and read its answer."""
    start, code, answer = time.monotonic(), 0, b""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(content)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), limit + 30)
            code = int(head.split()[1])
            length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
            is_short = code >= 400 and length and not content.startswith(b"HEAD")
            answer = await reader.readexactly(int(length)) if is_short else b""
        finally:
            writer.close()
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass  # closed without an answer, as slow headers are
    seconds = time.monotonic() - start
    tally.codes[code] += 1
    tally.slowest = max(tally.slowest, seconds)
    latest = late + (limit if code else max(limit, HEADER_TIMEOUT))
    if code == 500 or seconds > latest or b"\x1b" in answer or b"Traceback" in answer:
        tally.wrong.append(f"{code} after {seconds:.1f} s: {content[:300]!r} {answer[:200]!r}")


def tree_memory(pid: int) -> float:
    """Resident memory of a process and its children in megabytes."""
    found = serve_load.resident(pid)
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        for other in child.read_text().split():
            with suppress(OSError):  # has ended
                found += serve_load.resident(int(other))
    return found


async def attack(
    port: int, pid: int, contents: Any, clients: int, start: float, limit: float = TIMEOUT,
    late: float = LATE, report: Callable[[Tally], None] | None = None, beside: int = 0,
) -> Tally:  # fmt: skip
    """Send requests by some clients at the same time; `start` is the memory of the service.

    `report` is called with what was answered so far, every REPORT_SECONDS and at the end. Up to
    `beside` requests that are not answered after PATIENCE wait beside those of the clients: bodies
    that do not end take no work, but the whole time limit.
    """
    tally, waiting, reported = Tally(), iter(contents), time.monotonic()
    left: set[asyncio.Task[None]] = set()

    async def client() -> None:
        for content in waiting:
            sent = asyncio.create_task(_send(port, content, tally, limit, late))
            await asyncio.wait({sent}, timeout=PATIENCE)
            for other in [other for other in left if other.done()]:
                left.remove(other)
                other.result()  # raises what it raised
            if not sent.done() and len(left) < beside:
                left.add(sent)
            else:
                await sent

    tasks = [asyncio.create_task(client()) for _ in range(clients)]
    while not all(task.done() for task in (*tasks, *left)):
        tally.memory = max(tally.memory, tree_memory(pid) - start)
        if report and time.monotonic() - reported > REPORT_SECONDS:
            reported = time.monotonic()
            report(tally)
        await asyncio.sleep(0.02)
    await asyncio.gather(*tasks, *left)
    if report:
        report(tally)
    return tally


def _reporter(name: str, asked: argparse.Namespace, found: dict[str, Any]) -> Any:
    """A function that prints a tally and saves all that is known of a run."""
    begun = time.monotonic()

    def report(tally: Tally) -> None:
        seconds = round(time.monotonic() - begun, 1)
        found[name] = vars(tally) | {"sent": tally.codes.total(), "seconds": seconds}
        print(f"{name}, {seconds:.0f} s, {tally}", flush=True)
        if asked.save:
            asked.save.write_text(json.dumps(found, indent=1))

    return report


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.live_service")
    parser.add_argument("bundle")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument(
        "--beside", type=int, default=32, help="requests that wait beside those of the clients"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first request and image"
    )
    parser.add_argument("--late", type=float, default=LATE, help="seconds after the time limit")
    parser.add_argument("--save", type=Path, help="JSON file for the counts, written as they come")
    return parser.parse_args()


def main() -> int:
    """Print what was answered; return 1 if something was wrong."""
    asked = _parsed()
    guard = Guard.load(asked.bundle)
    for name in BOMBS:
        bomb(name)  # takes seconds, which no answer should seem to take
    # nobody reads its log, and a process that ends waits until its last line was written
    options = ["--timeout", str(TIMEOUT), "--log-level", "error"]
    process, port = serve_load.start_service(asked.bundle, options)
    failed, found = False, {key: vars(asked)[key] for key in ("seed", "first", "clients")}
    try:
        start = tree_memory(process.pid)
        for name, n, make, beside in (
            ("requests", asked.requests, any_request, asked.beside),
            ("images", asked.images, image_request, 0),  # these take work
        ):
            numbers = range(asked.first, asked.first + n)
            made = (make(Random(f"{asked.seed}/{name}/{i}")) for i in numbers)
            sent = attack(port, process.pid, made, asked.clients, start, TIMEOUT, asked.late,
                          _reporter(name, asked, found), beside)  # fmt: skip
            tally = asyncio.run(sent)
            failed |= bool(tally.wrong) or tally.memory > CEILING or process.poll() is not None
            print("\n".join(tally.wrong[:10]), flush=True)
        failed |= not decides_as(guard, port)
    finally:
        process.send_signal(signal.SIGTERM)
        failed |= process.wait(60) != 0
    if asked.save:
        asked.save.write_text(json.dumps(found | {"failed": failed}, indent=1))
    print("failed" if failed else "passed")
    return int(failed)


def decides_as(guard: Guard, port: int) -> bool:
    """Whether the service still decides on a good image as the guard does."""
    from http.client import HTTPConnection

    pixels = np.random.default_rng(0).integers(0, 256, guard.shape[1:]).astype(np.uint8)
    content = _encoded(Image.fromarray(pixels), "PNG")
    connection = HTTPConnection("localhost", port, timeout=20)
    connection.request("POST", "/predict", content, {"Content-Type": "image/png"})
    rows = json.loads(connection.getresponse().read())["predictions"]
    expected = guard(content).rows()[0]
    found, wanted = (list(row["scores"].values()) for row in (rows[0], expected))
    # not equal: the numbers of threads of the two processes may differ
    return rows[0]["label"] == expected["label"] and np.allclose(found, wanted, rtol=0, atol=1e-5)


if __name__ == "__main__":
    sys.exit(main())
