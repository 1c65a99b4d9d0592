"""Every command but those of the paper: importing this module registers them."""

from demur.cli import audit, board, data, demo, evaluate, export, listing, report, train, verify
from demur.cli.app import app, main

__all__ = [
    "app", "audit", "board", "data", "demo", "evaluate", "export", "listing", "main", "report",
    "train", "verify",
]  # fmt: skip
