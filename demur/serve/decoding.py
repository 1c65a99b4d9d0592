"""Decoder processes, which are killed when their request is late.

A thread that decodes cannot be stopped; a process can, and its memory can be limited. The processes
are started anew instead of forked: a fork of a process with torch's threads may deadlock.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import demur
from demur.serve import decoder
from demur.serve.decoder import Decoded, RequestError

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
