"""Every command but those of the paper: importing this module registers them."""

from demur.cli import audit, evaluate, guard, listing, report, train  # noqa: F401
from demur.cli.app import app, main

__all__ = ["app", "main"]
