"""The command: one file a group of verbs; torch is imported only inside them."""

from demur.cli import bench, calibrate, data, demo, evaluate, show, theory, train
from demur.cli.app import app, main

__all__ = [
    "app", "bench", "calibrate", "data", "demo", "evaluate", "main", "show", "theory", "train",
]  # fmt: skip
