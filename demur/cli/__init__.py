"""The command: one file a group of verbs; torch is imported only inside them."""

from demur.cli import (
    adaptive,
    bench,
    calibrate,
    data,
    demo,
    distortion,
    evaluate,
    listing,
    refusals,
    show,
    table,
    theory,
    train,
)
from demur.cli.app import app, main

__all__ = [
    "adaptive", "app", "bench", "calibrate", "data", "demo", "distortion", "evaluate", "listing",
    "main", "refusals", "show", "table", "theory", "train",
]  # fmt: skip
