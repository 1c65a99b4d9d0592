"""The command: one file a group of verbs; torch is imported only inside them."""

from demur.cli import evaluate, show, train
from demur.cli.app import app, main

__all__ = ["app", "evaluate", "main", "show", "train"]
