"""The command line: one module per group of commands.

The modules import torch inside their functions, so that --help stays fast.
"""

from demur.cli import (
    audit,
    bench,
    data,
    demo,
    evaluate,
    export,
    listing,
    paper,
    report,
    studies,
    table,
    train,
)
from demur.cli.app import app, main

__all__ = [
    "app",
    "audit",
    "bench",
    "data",
    "demo",
    "evaluate",
    "export",
    "listing",
    "main",
    "paper",
    "report",
    "studies",
    "table",
    "train",
]  # fmt: skip
