"""Run the service with uvicorn until SIGTERM or Ctrl-C."""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from demur.errors import BadInput
from demur.guards.core import Guard
from demur.serve.requests import Settings
from demur.serve.service import create_app

SHUTDOWN_SECONDS = 30  # for requests in progress


class Server(uvicorn.Server):
    """uvicorn's server, which ends on SIGTERM and SIGINT without raising them again."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.should_exit = True


def serve(
    guard: Guard, settings: Settings, host: str, port: int, on_ready: Callable[[str], None]
) -> None:
    """Serve a guard; finishes the requests in progress when it is stopped.

    `on_ready` is called with the address as soon as connections are accepted.
    """
    listener = _bound(host, port)
    name, number = listener.getsockname()[:2]
    address = f"http://[{name}]:{number}" if ":" in name else f"http://{name}:{number}"
    config = uvicorn.Config(
        create_app(guard, settings), log_level="warning", access_log=False, server_header=False,
        timeout_keep_alive=5, timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        h11_max_incomplete_event_size=64 * 1024,
    )  # fmt: skip
    with listener:
        on_ready(address)
        asyncio.run(Server(config).serve(sockets=[listener]))


def _bound(host: str, port: int) -> socket.socket:
    """A listening socket; BadInput if the address cannot be used."""
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
