"""The thread that runs the model on whatever waits in the queue, and the decoder processes.

While the model works, requests gather; the next forward pass takes them together. An idle model
starts at once, so that no request waits for others. A thread that decodes cannot be stopped; a
process can, and its memory can be limited: it is killed when its request is late. The processes are
started anew instead of forked: a fork of a process with torch's threads may deadlock.
"""

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import demur
from demur.guards import Guard, GuardResult
from demur.progress import ignore
from demur.serve import decoder
from demur.serve.decoder import Decoded, RequestError

MAX_RETRY = 60  # seconds
SMOOTHING = 0.8  # of the speed over batches
MOST_CLASSES = 10  # whose probabilities an answer holds

Rows = list[dict[str, Any]]


def retry(seconds: int) -> dict[str, str]:
    """Header that says when to try again."""
    return {"Retry-After": str(seconds)}


class Overloaded(RequestError):
    """The queue is full for about so many seconds."""

    def __init__(self, seconds: int) -> None:
        text = f"the service is overloaded; try again in {seconds} s"
        super().__init__(429, text, retry(seconds))


class Job(NamedTuple):
    """Images of one request."""

    x: Tensor  # N, C, H, W
    notes: Sequence[str]
    deadline: float  # of time.monotonic()
    future: "Future[Rows]"


class Batcher:
    """A queue of images and the thread that runs the model on them."""

    def __init__(
        self, guard: Guard, max_batch: int, max_queue: int,
        on_result: Callable[[GuardResult], None] = ignore,
    ) -> None:  # fmt: skip
        self.guard, self.max_batch, self.max_queue = guard, max_batch, max_queue
        self.on_result = on_result
        self.jobs: deque[Job] = deque()
        self.waiting = 0  # images
        self.images_per_second = 0.0
        self.changed = threading.Condition()
        self.closed = False
        self.thread = threading.Thread(target=self._work, name="model", daemon=True)
        self.thread.start()

    def submit(self, x: Tensor, notes: Sequence[str], timeout: float) -> "Future[Rows]":
        with self.changed:
            if self.closed or self.waiting + len(x) > self.max_queue:
                raise Overloaded(self.retry_after)
            job = Job(x, notes, time.monotonic() + timeout, Future())
            self.jobs.append(job)
            self.waiting += len(x)
            self.changed.notify()
        return job.future

    @property
    def retry_after(self) -> int:
        """Seconds until the queue will be empty at the present speed."""
        if self.images_per_second == 0:
            return 1
        return min(MAX_RETRY, max(1, math.ceil(self.waiting / self.images_per_second)))

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify()
        self.thread.join()

    def _work(self) -> None:
        while (jobs := self._next_jobs()) is not None:
            alive = [job for job in jobs if job.future.set_running_or_notify_cancel()]
            if alive:
                self._run(alive)

    def _next_jobs(self) -> list[Job] | None:
        """The waiting jobs that fit into one batch; None when the batcher is closed and empty."""
        with self.changed:
            while not self.jobs and not self.closed:
                self.changed.wait()
            jobs: list[Job] = []
            images, now = 0, time.monotonic()
            while self.jobs and (not jobs or images + len(self.jobs[0].x) <= self.max_batch):
                job = self.jobs.popleft()
                self.waiting -= len(job.x)
                if job.deadline < now:  # nobody waits for it any more
                    job.future.cancel()
                    continue
                jobs.append(job)
                images += len(job.x)
            return jobs if jobs or self.jobs or not self.closed else None

    def _run(self, jobs: list[Job]) -> None:
        start = time.monotonic()
        try:
            x = torch.cat([job.x for job in jobs])
            notes = [note for job in jobs for note in job.notes]
            result = self.guard.decide(x, notes, self.max_batch)
            self.on_result(result)
            rows = result_rows(result)
        except Exception as error:  # out of memory, or a bug of a foreign model
            failed = f"the model failed on this request ({type(error).__name__})"
            for job in jobs:
                job.future.set_exception(RequestError(503, failed))
            return
        seconds = max(time.monotonic() - start, 1e-6)
        speed, old = len(x) / seconds, self.images_per_second
        self.images_per_second = SMOOTHING * old + (1 - SMOOTHING) * speed if old else speed
        for job in jobs:
            job.future.set_result(rows[: len(job.x)])
            rows = rows[len(job.x) :]


def result_rows(result: GuardResult) -> Rows:
    """One dictionary per image, with the largest class probabilities."""
    rows = result.rows()
    for row, probabilities in zip(rows, result.probabilities, strict=True):
        largest = probabilities.argsort()[::-1][:MOST_CLASSES]
        row["probabilities"] = {
            result.class_names[label]: float(probabilities[label])
            for label in largest
            if math.isfinite(probabilities[label])
        }
    return rows


TOO_LATE = "the answer took too long; try again, or send fewer or smaller images"


class Worker(NamedTuple):
    """A process that runs `demur.serve.decoder`, and the pipe to it."""

    process: "subprocess.Popen[bytes]"
    pipe: "Connection[Any, Any]"

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()


class DecoderPool:
    """`size` threads that give requests to as many processes with `memory` bytes each."""

    def __init__(self, size: int, memory: int) -> None:
        self.size, self.memory = size, memory
        self.threads = ThreadPoolExecutor(size, thread_name_prefix="decode")
        self.idle: deque[Worker] = deque()  # started when they are needed

    def start(self) -> None:
        """Start all processes, so that no request waits for one."""
        self.idle.extend(self._start() for _ in range(self.size))

    def decode(self, job: dict[str, Any], body: bytes | bytearray, deadline: float) -> Decoded:
        """What the decoder returns before `deadline` of time.monotonic(); else RequestError."""
        if time.monotonic() >= deadline:
            raise RequestError(503, TOO_LATE)
        try:
            worker = self.idle.popleft()
        except IndexError:
            worker = self._start()
        try:
            worker.pipe.send_bytes(json.dumps(job).encode())
            worker.pipe.send_bytes(body)
            if not worker.pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            head = json.loads(worker.pipe.recv_bytes(1000 * (job["max_images"] + 1)))
            numbers = max(len(body), job["max_images"] * math.prod(job["shape"]))
            content = worker.pipe.recv_bytes(8 * numbers)
            if "status" in head:
                status, detail = int(head["status"]), str(head["detail"])
            else:
                array = np.frombuffer(content, np.dtype(head["dtype"])).reshape(head["shape"])
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            worker.stop()
            if isinstance(error, TimeoutError):
                raise RequestError(503, TOO_LATE) from None
            raise RequestError(422, "the decoder of the images crashed; convert them") from None
        self.idle.append(worker)
        if "status" in head:
            raise RequestError(status, detail)
        return array, head["names"], head["notes"]

    def _start(self) -> Worker:
        ours, theirs = Pipe()
        paths = [str(Path(demur.__file__).parents[1]), *sys.path]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", decoder.__file__, str(theirs.fileno()), str(self.memory)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1",
                                  "DEMUR_TOKEN": ""},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C ends the service, which ends them
            )  # fmt: skip
        return Worker(process, ours)

    def close(self) -> None:
        """Finish what is decoded, then end the processes."""
        self.threads.shutdown(cancel_futures=True)
        while self.idle:
            self.idle.pop().stop()
