"""The command: one file a group of verbs; torch is imported only inside them."""

from demur.cli import (
    adaptive,
    bench,
    bench_rejection,
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
    "bench_rejection",
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
