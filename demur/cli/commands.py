"""Every command but those of the paper: importing this module registers them."""

from demur.cli import (  # noqa: F401
    audit,
    board,
    compare,
    data,
    demo,
    evaluate,
    export,
    guard,
    listing,
    report,
    serve,
    train,
    verify,
)
from demur.cli.app import app, main

__all__ = ["app", "main"]
