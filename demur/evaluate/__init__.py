"""From a run and an attack to a record, and from records to rows."""

from demur.evaluate.attack import Order, Source, attacked
from demur.evaluate.bind import Bound, bind
from demur.evaluate.score import PROTOCOLS, Protocol, Row, Scored, Scoring, Summary

__all__ = [
    "PROTOCOLS", "Bound", "Order", "Protocol", "Row", "Scored", "Scoring", "Source", "Summary",
    "attacked", "bind",
]  # fmt: skip
