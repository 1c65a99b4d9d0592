"""The command: one file a group of verbs; torch is imported only inside them."""

from demur.cli import bench, data, demo, evaluate, show, train
from demur.cli.app import app, main

__all__ = ["app", "bench", "data", "demo", "evaluate", "main", "show", "train"]
