"""A guard as an HTTP service: predictions, health, metrics and a page to try it.

create_app(guard, Settings(token="secret"))      # an ASGI application
server.serve(guard, Settings(), "127.0.0.1", 8000, on_ready=print)     # until SIGTERM
"""

from demur.serve.requests import Settings
from demur.serve.service import create_app

__all__ = ["Settings", "create_app"]
