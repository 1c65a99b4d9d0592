"""The command line: one module per group of commands.

The modules import torch inside their functions, so that --help stays fast.
"""

from demur.cli import (
    audit,
    bench,
    calibrate,
    data,
    demo,
    evaluate,
    export,
    listing,
    paper,
    report,
    retrofit,
    studies,
    table,
    train,
)
from demur.cli.app import app, main

__all__ = [
    "app",
    "audit",
    "bench",
    "calibrate",
    "data",
    "demo",
    "evaluate",
    "export",
    "listing",
    "main",
    "paper",
    "report",
    "retrofit",
    "studies",
    "table",
    "train",
]  # fmt: skip
