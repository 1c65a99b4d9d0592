"""The server: deadlines of connections, signals, and the listening socket.

serve(guard, Settings(), "127.0.0.1", 8000, on_ready=print)     # until SIGTERM or Ctrl-C
"""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from demur.errors import BadInput
from demur.guards.core import Guard
from demur.serve.requests import Settings
from demur.serve.service import create_app

SHUTDOWN_SECONDS = 30  # for requests in progress
CONNECTIONS = 4  # per request that is handled at the same time; others are closed
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


def server_config(guard: Guard, settings: Settings) -> uvicorn.Config:
    """The application of a guard with the settings of uvicorn that its limits need."""
    return uvicorn.Config(
        create_app(guard, settings), log_level="error", access_log=False, server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS, h11_max_incomplete_event_size=64 * 1024,
        http=partial(Connection, settings),  # type: ignore[arg-type]
        ws="none", proxy_headers=False,
    )  # fmt: skip


def serve(
    guard: Guard, settings: Settings, host: str, port: int, on_ready: Callable[[str], None]
) -> None:
    """Serve a guard; finishes the requests in progress when it is stopped.

    `on_ready` is called with the address as soon as connections are accepted.
    """
    listener = _bound(host, port)
    name, number = listener.getsockname()[:2]
    address = f"http://[{name}]:{number}" if ":" in name else f"http://{name}:{number}"
    config = server_config(guard, replace(settings, hosts=(*settings.hosts, host.lower(), name)))
    config.app.state.service.reader.pool.start()  # type: ignore[union-attr]
    with listener:
        on_ready(address)
        asyncio.run(Server(config).serve(sockets=[listener]))


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio sets TCP_NODELAY only if the protocol is named; else an answer takes 40 ms more
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", None) or error).lower()
        raise BadInput(
            f"{host}:{port} cannot be used: {reason}; choose another --host or --port"
        ) from None
    return listener
