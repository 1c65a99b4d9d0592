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
    values,
)

__all__ = [
    "BASELINE", "ORACLE", "PROTOCOLS", "Bound", "Order", "Protocol", "Ranking", "Row", "Scored",
    "Scoring", "Source", "Summary", "attacked", "bind", "values",
]  # fmt: skip
