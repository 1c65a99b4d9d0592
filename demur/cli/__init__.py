"""The command line: one module per group of commands.

The modules import torch inside their functions, so that --help stays fast.
"""

from demur.cli import (
    adaptive,
    bench,
    calibrate,
    data,
    demo,
    distortion,
    evaluate,
    listing,
    show,
    table,
    theory,
    train,
)
from demur.cli.app import app, main

__all__ = [
    "adaptive",
    "app",
    "bench",
    "calibrate",
    "data",
    "demo",
    "distortion",
    "evaluate",
    "listing",
    "main",
    "show",
    "table",
    "theory",
    "train",
]  # fmt: skip
