"""The command line: one module per group of commands.

The modules import torch inside their functions, so that --help stays fast.
"""

from demur.cli import (
    bench,
    calibrate,
    data,
    demo,
    evaluate,
    listing,
    report,
    studies,
    table,
    train,
)
from demur.cli.app import app, main

__all__ = [
    "app",
    "bench",
    "calibrate",
    "data",
    "demo",
    "evaluate",
    "listing",
    "main",
    "report",
    "studies",
    "table",
    "train",
]  # fmt: skip
