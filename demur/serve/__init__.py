"""A guard as an HTTP service: predictions, health, metrics and a page to try it."""

from demur.serve.requests import Settings
from demur.serve.service import create_app

__all__ = ["Settings", "create_app"]
