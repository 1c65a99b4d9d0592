"""Queries of a model that is a function or a service: budget, rate, log, and the service's JSON.

    Queries(budget=10_000, per_second=50, log="state/queries.db")
    HttpService("http://127.0.0.1:8000")(x)         # logits of a service of `demur serve`

The log holds every answer in the order in which an image was asked for. The same command repeats
its queries from the log and goes on where it was interrupted, without asking anything twice.
"""

import hashlib
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray

from demur.errors import BadInput, first_line, shorten
from demur.spec import Spec
from demur.spec.field_types import Positive, PositiveInt

Array = NDArray[Any]
MOST_IMAGES, MOST_BYTES, PIXEL_BYTES = 64, 4_000_000, 22  # of a request; of a pixel as JSON
TRIES, TIMEOUT = 6, 60.0  # of a request, and seconds for each
BUSY = (429, 502, 503, 504)  # answers of a service after which a later request may succeed
TOKEN = "DEMUR_TOKEN"  # environment variable: bearer token of the service


@dataclass(frozen=True)
class Queries(Spec):
    """Limits of the queries of a model without gradients.

    Attributes:
        budget: Images that may be asked for in all runs with the same log; None sets no limit.
        per_second: Images per second; None sets no limit.
        log: A file for the answers, from which the same command resumes; None keeps none.
    """

    budget: PositiveInt | None = None
    per_second: Positive | None = None
    log: str | None = None


class MeteredFunction:
    """A function of images, N, C, H, W, with a budget, a rate and a log of its answers."""

    def __init__(self, function: Callable[[Array], Any], name: str, queries: Queries) -> None:
        self.function, self.queries = function, queries
        self.asked, self.next_time = 0, 0.0
        self.seen = Counter[bytes]()  # how often each image was asked for in this run
        self.log = None if queries.log is None else self._open(Path(queries.log), name)

    def _open(self, path: Path, name: str) -> sqlite3.Connection:
        """Return the log; BadInput if it is damaged or of another model."""
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            log = sqlite3.connect(path)
            log.execute("CREATE TABLE IF NOT EXISTS model (name TEXT PRIMARY KEY)")
            log.execute("CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, logits BLOB)")
            (self.asked,) = log.execute("SELECT COUNT(*) FROM answers").fetchone()
            known = log.execute("SELECT name FROM model").fetchall() or [(name,)]
            log.execute("INSERT OR IGNORE INTO model VALUES (?)", (name,))
            log.commit()
        except sqlite3.Error as error:
            raise BadInput(
                f"{path} is no log of queries ({error}); name another folder or remove it"
            ) from None
        if known != [(name,)]:
            raise BadInput(
                f"{path} holds answers of {shorten(known[0][0])}; name another folder or remove it"
            )
        return log

    def __call__(self, x: Array) -> Array:
        if self.log is None:
            return np.concatenate([self._ask(part) for part in _requests(x)])
        keys = [self._key(image) for image in x]
        answers = [self._stored(key) for key in keys]
        missing = np.array([i for i, answer in enumerate(answers) if answer is None], np.int64)
        for rows in _requests(missing, x[0].size):
            new = self._ask(x[rows])
            for i, answer in zip(rows.tolist(), new, strict=True):
                answers[i] = answer
                self.log.execute("INSERT INTO answers VALUES (?, ?)", (keys[i], answer.tobytes()))
            self.log.commit()
        return np.stack([answer for answer in answers if answer is not None])

    def _key(self, image: Array) -> bytes:
        """Return a key of the image and of how often it was asked for: answers may be random."""
        digest = hashlib.sha256(np.ascontiguousarray(image).tobytes()).digest()
        self.seen[digest] += 1
        return digest + self.seen[digest].to_bytes(4, "big")

    def _stored(self, key: bytes) -> Array | None:
        assert self.log is not None
        found = self.log.execute("SELECT logits FROM answers WHERE key = ?", (key,)).fetchone()
        return None if found is None else np.frombuffer(found[0], np.float64)

    def _ask(self, x: Array) -> Array:
        """Return the answers to new queries, within the budget and not faster than the rate."""
        budget, rate = self.queries.budget, self.queries.per_second
        if budget is not None and self.asked + len(x) > budget:
            saved = "its answers are lost; give a state folder, too"
            if self.queries.log is not None:
                saved = f"the same command with a larger budget resumes from {self.queries.log}"
            raise BadInput(f"the budget of {budget} queries is spent; {saved}")
        if rate is not None:
            sleep(max(0.0, self.next_time - monotonic()))
            self.next_time = monotonic() + len(x) / rate
        answer = np.asarray(self.function(x), np.float64)
        if answer.ndim != 2 or len(answer) != len(x):
            raise BadInput(
                f"the model answers {len(x)} images with shape {answer.shape}; return logits N, K"
            )
        self.asked += len(x)
        return answer


def _requests(rows: Array, pixels: int | None = None) -> list[Array]:
    """Return images, or row numbers of images of so many pixels, in parts for one request."""
    pixels = pixels or rows[0].size
    most = min(MOST_IMAGES, max(1, MOST_BYTES // (PIXEL_BYTES * pixels)))
    return [rows[i : i + most] for i in range(0, len(rows), most)]


class HttpService:
    """A service that classifies images, as a function of images, N, C, H, W, to logits, N, K.

    Args:
        address: The address of a service of `demur serve`, or what the adapter's documents are
            posted to.
        adapter: A function (images, send) that returns logits, N, K. Images are N, C, H, W in
            float32; send(document) posts JSON and returns the answer's JSON. None is for a service
            of `demur serve`, which tells the label and its probability: the other classes share
            the rest.
    """

    def __init__(
        self, address: str, adapter: Callable[[Array, Callable[[Any], Any]], Any] | None = None
    ) -> None:
        self.address, self.adapter, self.classes = address.rstrip("/"), adapter, 0

    def __call__(self, x: Array) -> Array:
        adapter = self._predict if self.adapter is None else self.adapter
        parts = [np.asarray(adapter(part, self.send)) for part in _requests(x)]
        return np.concatenate(parts)

    def _predict(self, x: Array, send: Callable[[Any], Any]) -> Array:
        """Return log probabilities from the decisions of a service of `demur serve`."""
        try:
            self.classes = self.classes or int(_answer(f"{self.address}/health")["classes"])
            document = {"images": x.transpose(0, 2, 3, 1).tolist(), "dtype": "float32"}
            rows = _answer(f"{self.address}/predict", document)["predictions"]
            labels = np.array([row["label"] for row in rows])
            share = np.array([row["confidence"] for row in rows], np.float64)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, BadInput):
                raise
            raise BadInput(
                f"{self.address} does not answer as demur serve does; give --adapter MODULE:NAME"
            ) from None
        rest = np.maximum((1 - share) / max(1, self.classes - 1), 1e-12)
        logits = np.repeat(np.log(rest)[:, None], self.classes, 1)
        # The label has the largest probability, also where rounding says otherwise.
        logits[np.arange(len(x)), labels] = np.maximum(np.log(share), np.log(rest) + 1e-6)
        return logits

    def send(self, document: Any) -> Any:
        """Return the service's answer to a document."""
        return _answer(self.address, document)


def _answer(address: str, document: Any = None) -> Any:
    """Return the JSON answer of a service; retry while it is busy or cannot be reached."""
    data = None if document is None else json.dumps(document).encode()
    headers = {"Content-Type": "application/json"}
    if os.environ.get(TOKEN):
        headers["Authorization"] = f"Bearer {os.environ[TOKEN]}"
    reason = ""
    for attempt in range(TRIES):
        try:
            with urlopen(Request(address, data, headers), timeout=TIMEOUT) as answer:
                return json.loads(answer.read())
        except HTTPError as error:
            reason = f"{error.code}: {shorten(error.read(1000).decode(errors='replace').strip())}"
            if error.code not in BUSY:
                break
        except (URLError, OSError, HTTPException) as error:
            reason = first_line(error)
        except ValueError:
            raise BadInput(f"{address} does not answer with JSON; name another address") from None
        if attempt + 1 < TRIES:
            sleep(0.25 * 2**attempt)
    raise BadInput(f"{address} answers {reason}; check the address, the service and {TOKEN}")
