"""The command: one file a group of verbs; torch is imported only inside them."""

from demur.cli import demo, evaluate, show, train
from demur.cli.app import app, main

__all__ = ["app", "demo", "evaluate", "main", "show", "train"]
