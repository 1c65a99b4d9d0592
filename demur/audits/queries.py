"""Queries of a model that is a function or a service: budget, rate, log, and the service's JSON.

The log holds every answer in the order in which an image was asked for. The same command repeats
its queries from the log and goes on where it was interrupted.
"""

import hashlib
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.error import HTTPError
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
SURE = 1e-3  # the least distance of an answer of a service from the rejection
TOKEN = "DEMUR_TOKEN"  # environment variable: bearer token of the service
TABLES = (
    "CREATE TABLE IF NOT EXISTS model (name TEXT PRIMARY KEY)",
    "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, logits BLOB)",
)


@dataclass(frozen=True)
class Queries(Spec):
    """Limits of the queries of a model without gradients; None sets none."""

    budget: PositiveInt | None = None  # images that may be asked for, in all runs with the same log
    per_second: Positive | None = None  # images
    log: str | None = None  # a file for the answers, from which the same command resumes


class MeteredFunction:
    """A function of images, N, C, H, W, with a budget, a rate and a log of its answers."""

    def __init__(self, function: Callable[[Array], Any], name: str, queries: Queries) -> None:
        self.function, self.queries = function, queries
        self.asked, self.next_time = 0, 0.0
        self.seen = Counter[bytes]()  # how often each image was asked for in this run
        self.log = sqlite3.connect(":memory:") if queries.log is None else self._open(name)

    def _open(self, name: str) -> sqlite3.Connection:
        """Return the log; raise BadInput if it is damaged or of another model."""
        path = Path(self.queries.log or "")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            log = sqlite3.connect(path)
            for table in TABLES:
                log.execute(table)
            (self.asked,) = log.execute("SELECT COUNT(*) FROM answers").fetchone()
            (known,) = log.execute("SELECT name FROM model").fetchone() or (name,)
            log.execute("INSERT OR IGNORE INTO model VALUES (?)", (known,))
            log.commit()
        except sqlite3.Error as error:
            raise BadInput(f"{path} is no log of queries ({error}); remove it") from None
        if known != name:
            raise BadInput(f"{path} holds answers of {shorten(known)}; name another folder")
        return log

    def __call__(self, x: Array) -> Array:
        if self.queries.log is None:
            return np.concatenate([self._ask(x[rows]) for rows in _requests(x)])
        keys, read = [self._key(image) for image in x], "SELECT logits FROM answers WHERE key = ?"
        found = [self.log.execute(read, (key,)).fetchone() for key in keys]
        answers = [None if row is None else np.frombuffer(row[0], np.float64) for row in found]
        missing = np.array([i for i, row in enumerate(found) if row is None], np.int64)
        for part in _requests(x[missing]):
            for i, answer in zip(missing[part], self._ask(x[missing[part]]), strict=True):
                answers[i] = answer
                self.log.execute("INSERT INTO answers VALUES (?, ?)", (keys[i], answer.tobytes()))
            self.log.commit()
        return np.stack(answers)  # type: ignore[arg-type]

    def _key(self, image: Array) -> bytes:
        """Return a key of the image and of how often it was asked for: answers may be random."""
        digest = hashlib.sha256(np.ascontiguousarray(image).tobytes()).digest()
        self.seen[digest] += 1
        return digest + self.seen[digest].to_bytes(4, "big")

    def _ask(self, x: Array) -> Array:
        """Return the answers to new queries, within the budget and not faster than the rate."""
        budget, rate = self.queries.budget, self.queries.per_second
        if budget is not None and self.asked + len(x) > budget:
            advice = "give a larger one, and a state folder, from which the same command resumes"
            if self.queries.log is not None:
                advice = f"the same command with a larger one resumes from {self.queries.log}"
            raise BadInput(f"the budget of {budget} queries is spent; {advice}")
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


def _requests(x: Array) -> Iterator[slice]:
    most = min(MOST_IMAGES, max(1, MOST_BYTES // (PIXEL_BYTES * max(1, x[:1].size))))
    return (slice(first, first + most) for first in range(0, len(x), most))


class TooLargeError(BadInput):
    """A service takes only smaller requests."""


class HttpService:
    """A service that classifies images, as a function of images, N, C, H, W, to logits, N, K.

    An adapter is a function (images, send) that returns logits, N, K; send(document) posts JSON to
    the address and returns the answer's. None is for `demur serve`, which tells the label and its
    probability: the others share the rest; a last column is the largest if it rejects.
    """

    def __init__(self, address: str, adapter: Callable[..., Any] | None = None) -> None:
        self.address, self.adapter = address.rstrip("/"), adapter
        self.state, self.most = dict[str, Any](), MOST_IMAGES

    def __call__(self, x: Array) -> Array:
        ask, size = self.adapter or self._predict, self.most
        parts = np.split(x, range(size, len(x), size))
        try:
            return np.concatenate([np.asarray(ask(part, self.send)) for part in parts])
        except TooLargeError:
            if size == 1:
                raise
        self.most = size // 2
        return self(x)

    def send(self, document: Any, path: str = "") -> Any:
        """Return the service's answer to a document; None asks without one."""
        return _answer(self.address + path, document)

    def _predict(self, x: Array, send: Callable[..., Any]) -> Array:
        """Return log probabilities and the rejection from decisions of `demur serve`, N, K + 1."""
        document = {"images": x.transpose(0, 2, 3, 1).tolist(), "dtype": "float32"}
        try:
            self.state = self.state or send(None, "/health")
            classes, rule = int(self.state["classes"]), self.state["rule"]
            rows = send(document, "/predict")["predictions"]
            labels = np.array([row["label"] for row in rows])
            share = np.array([float(row["confidence"]) for row in rows])
            gaps = np.array([_distance(row, rule) for row in rows])
        except (KeyError, TypeError):
            raise BadInput(
                f"{self.address} does not answer as demur serve does; give --adapter MODULE:NAME"
            ) from None
        rest = np.log(np.maximum((1 - share) / max(1, classes - 1), 1e-12))
        logits = np.repeat(rest[:, None], classes, 1)
        # The label has the largest probability, also where rounding says otherwise.
        logits[np.arange(len(x)), labels] = np.maximum(np.log(share), rest + 1e-6)
        return np.column_stack((logits, logits.max(1) - gaps))


def _distance(row: Mapping[str, Any], rule: Sequence[Mapping[str, Any]]) -> float:
    """Return how far the scores of an answer are above their thresholds; negative: rejected."""
    pairs = [(row["scores"][part["score"]], part["threshold"]) for part in rule]
    least = min([score - t for score, t in pairs if None not in (score, t)], default=0.0)
    return max(least, SURE) if row["accepted"] else min(least, -SURE)


def _answer(address: str, document: Any) -> Any:
    """Return the JSON answer of a service; retry while it is busy or cannot be reached."""
    data = None if document is None else json.dumps(document).encode()
    headers, reason = {"Content-Type": "application/json"}, ""
    if os.environ.get(TOKEN):
        headers["Authorization"] = f"Bearer {os.environ[TOKEN]}"
    for attempt in range(TRIES):
        sleep(0.25 * 2**attempt if attempt else 0)
        try:
            with urlopen(Request(address, data, headers), timeout=TIMEOUT) as answer:
                return json.loads(answer.read())
        except HTTPError as error:
            reason = f"{error.code}: {shorten(error.read(1000).decode(errors='replace').strip())}"
            if error.code == 413:  # too many images or bytes
                raise TooLargeError(f"{address} answers {reason}; send smaller images") from None
            if error.code not in BUSY:
                break
        except (OSError, HTTPException) as error:
            reason = first_line(error)
        except ValueError:
            reason = "something that is no JSON"
            break
    raise BadInput(f"{address} answers {reason}; check the address, the service and {TOKEN}")
