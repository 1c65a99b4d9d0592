"""The server: deadlines of connections, signals, and the listening socket."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import uvicorn
from fastapi import FastAPI
from h11 import LocalProtocolError
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.supervisors import multiprocess

from demur.errors import BadInput
from demur.guards.core import Guard
from demur.serve.monitoring import PROCESSES, LogHandler
from demur.serve.requests import Settings
from demur.serve.service import create_app

SHUTDOWN_SECONDS = 30  # for requests in progress
START_SECONDS = 120  # until a process that says nothing, as while it imports torch, is replaced
CONNECTIONS = 4  # per request that is handled at the same time; others are closed
LAST_SECONDS = 0.2  # for the requests of connections that are there when the service is stopped
GRACE = 0.5  # seconds beyond the time limit of a request, for its answer to be read


class Connection(H11Protocol):
    """uvicorn's connection, which always has a deadline.

    uvicorn closes a connection that is idle after an answer, but not one whose headers never end
    and not one that does not read its answer.
    """

    deadline: asyncio.TimerHandle | None = None

    def __init__(self, settings: Settings, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = settings

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline()
        if len(self.connections) > CONNECTIONS * self.settings.max_requests:
            transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request; the application may not answer the one before it any more."""
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        with suppress(LocalProtocolError):  # its answer has begun
            super().send_400_response(msg)
        self.transport.close()

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._set_deadline()

    def on_response_complete(self) -> None:
        self._set_deadline()
        super().on_response_complete()  # may begin the next request

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.deadline is not None:
            self.deadline.cancel()

    def _set_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        cycle: Any = self.cycle  # None before the first request
        in_request = cycle is not None and not cycle.response_complete
        limits = self.settings
        seconds = limits.timeout + GRACE if in_request else limits.header_timeout
        self.deadline = self.loop.call_later(seconds, self.transport.abort)


class Server(uvicorn.Server):
    """uvicorn's server, which ends on SIGTERM and SIGINT without raising them again."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, setattr, self, "should_exit", True)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take the connections that wait before the listener is closed, which would reset them."""
        waiting = []
        for listener in sockets or ():
            with suppress(OSError):  # none waits any more
                while True:
                    waiting.append(listener.accept()[0])
        for server in self.servers:
            server.close()
        protocol: Any = self.config.http_protocol_class
        made = partial(protocol, config=self.config, server_state=self.server_state,
                       app_state=self.lifespan.state)  # fmt: skip
        for one in waiting:
            await asyncio.get_running_loop().connect_accepted_socket(made, one)
        await asyncio.sleep(LAST_SECONDS)
        await super().shutdown(sockets)


multiprocess.Server = Server  # type: ignore[attr-defined]  # in the processes, too, which import this


class Supervisor(multiprocess.Multiprocess):
    """uvicorn's supervisor, which lets new connections be refused while the processes end.

    Otherwise they would wait for it and be reset at its end.
    """

    def terminate_all(self) -> None:
        for listener in self.sockets:
            listener.close()
        super().terminate_all()


def server_config(app: Callable[[], FastAPI], settings: Settings, **more: Any) -> uvicorn.Config:
    """The application that `app()` makes, with the settings of uvicorn that its limits need."""
    return uvicorn.Config(
        app, factory=True, log_config=None, log_level="error", access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS, h11_max_incomplete_event_size=64 * 1024,
        http=partial(Connection, settings),  # type: ignore[arg-type]
        ws="none", proxy_headers=False, **more,
    )  # fmt: skip


def serve(
    guard: Guard, settings: Settings, host: str, port: int, on_ready: Callable[[str], None]
) -> None:
    """Serve a guard; finishes the requests in progress when it is stopped.

    `on_ready` is called with the address as soon as connections are accepted.
    """
    listener, address, settings = _listen(host, port, settings)
    with listener:
        app = _loaded_app(lambda: guard, settings)
        on_ready(address)
        asyncio.run(Server(server_config(lambda: app, settings)).serve(sockets=[listener]))


def serve_many(
    load: Callable[[], Guard], settings: Settings, host: str, port: int,
    on_ready: Callable[[str], None], workers: int,
) -> None:  # fmt: skip
    """Serve a guard in several processes, which share the port and add up their metrics.

    `load` makes the guard in each of them, so it must be a function that can be pickled. uvicorn
    starts a process anew that ended, and passes SIGTERM on.
    """
    listener, address, settings = _listen(host, port, settings)
    with listener, TemporaryDirectory() as folder:
        os.environ.setdefault(PROCESSES, folder)
        on_ready(address)
        config = server_config(
            partial(_loaded_app, load, settings), settings, workers=workers,
            timeout_worker_healthcheck=START_SECONDS,
        )  # fmt: skip
        Supervisor(config, [listener]).run()


def _loaded_app(load: Callable[[], Guard], settings: Settings) -> FastAPI:
    app = create_app(load(), settings)
    app.state.service.reader.pool.start()
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).handlers = [LogHandler(app.state.service.log)]
        logging.getLogger(name).propagate = False
    return app


def _listen(host: str, port: int, settings: Settings) -> tuple[socket.socket, str, Settings]:
    """A listening socket, its address, and the settings with the names of the host."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio sets TCP_NODELAY only if the protocol is named; else an answer takes 40 ms more
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(128)
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", None) or error).lower()
        raise BadInput(
            f"{host}:{port} cannot be used: {reason}; choose another --host or --port"
        ) from None
    name, number = listener.getsockname()[:2]
    address = f"http://[{name}]:{number}" if ":" in name else f"http://{name}:{number}"
    return listener, address, replace(settings, hosts=(*settings.hosts, host.lower(), name))
