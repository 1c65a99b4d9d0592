"""From a run and an attack to a record, and from records to rows."""

from demur.evaluate.attack import Order, Source, attacked
from demur.evaluate.binding import Bound, bind
from demur.evaluate.score import (
    BASELINE,
    ORACLE,
    PROTOCOLS,
    Protocol,
    Ranking,
    Row,
    Scored,
    Scoring,
    Summary,
)
from demur.evaluate.slim import KeepsLess, slim
from demur.evaluate.values import Kept, accepted, true_confidence, values

__all__ = [
    "BASELINE", "ORACLE", "PROTOCOLS", "Bound", "KeepsLess", "Kept", "Order", "Protocol", "Ranking",
    "Row", "Scored", "Scoring", "Source", "Summary", "accepted", "attacked", "bind", "slim",
    "true_confidence", "values",
]  # fmt: skip
