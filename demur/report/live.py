"""The page of runs whose folders may still change, served on this machine only.

The page asks for `state` every two seconds and fetches itself again where the version differs.
"""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from demur.errors import BadInput
from demur.files.web_hosts import refusal
from demur.report.page import page_text
from demur.report.scored_run import ScoredRun
from demur.runs import Run

HOST = "127.0.0.1"
WATCHED = ("recipe.txt", "checkpoint.json", "metrics.jsonl", "records/*.json", "certificates/*")
PIECE = re.compile(r"(\d+)-(\d+)-[0-9a-f]{16}")

ScoreRun = Callable[[Run], ScoredRun]


class LivePage:
    """The page of some runs, made again when a watched file of their folders changes.

    The runs may be in training and without records; `score` scores what a run holds now.
    """

    def __init__(self, runs: Sequence[Run], score: ScoreRun) -> None:
        self.runs, self.score = runs, score
        self.lock, self.made_of, self.text, self.problem = threading.Lock(), "", "", ""

    def version(self) -> str:
        """Digest of the names, sizes and times of the watched files."""
        found = hashlib.sha256()
        for run in self.runs:
            for path in sorted(p for pattern in WATCHED for p in run.path.glob(pattern)):
                status = path.stat()
                found.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
        return found.hexdigest()[:16]

    def state(self) -> dict[str, str]:
        """The version, and one sentence per run about what is in progress."""
        words = " ".join(progress_words(run) for run in self.runs)
        return {"version": self.version(), "text": f"{words} {self.problem}".strip()}

    def page(self) -> str:
        """The page of the current files; the last one that could be made if they are damaged."""
        with self.lock:
            version = self.version()
            if version != self.made_of:
                try:
                    fresh = [self.score(Run(run.path)) for run in self.runs]
                    self.text, self.problem = page_text(fresh, live=True), ""
                except BadInput as error:
                    if not self.text:
                        raise
                    self.problem = f"The page shows an earlier state: {error}."
                self.made_of = version
            return self.text


def progress_words(run: Run) -> str:
    """Say what a run holds and what is unfinished, in one sentence."""
    records = sum(1 for _ in run.records_folder.glob("*-test-*.json"))
    parts = [f"{records} record{'' if records == 1 else 's'} of test images"]
    if not run.trained:
        path = run.path / "metrics.jsonl"
        done = len(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else 0
        parts = [f"in training, {done} of {run.recipe.epochs} epochs done"]
    for folder in sorted(run.records_folder.glob(".making-*")):
        pieces = (PIECE.fullmatch(path.name) for path in folder.glob("parts-*/*"))
        done = sum(int(piece[2]) - int(piece[1]) for piece in pieces if piece)
        parts.append(f"an unfinished attack has {done} images done")
    return f"{run.name}: {'; '.join(parts)}."


@contextmanager
def serving(page: LivePage, port: int = 0) -> Iterator[ThreadingHTTPServer]:
    """Yield a server of the page on this machine; port 0 takes a free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            refused = refusal(self.headers.get("Host"), self.headers.get("Origin"))
            if refused:
                self._send(HTTPStatus(refused[0]), "text/plain", "ask for 127.0.0.1")
            elif self.path == "/":
                self._send(HTTPStatus.OK, "text/html; charset=utf-8", page.page())
            elif self.path == "/state":
                self._send(HTTPStatus.OK, "application/json", json.dumps(page.state()))
            else:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", "there is only the page")

        def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
            content = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            with suppress(ConnectionError):  # a tab that was closed
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: the page asks every two seconds."""

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise BadInput(f"port {port} cannot be served: {reason}; choose another --port") from None
    try:
        yield server
    finally:
        server.server_close()
