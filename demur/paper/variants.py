"""Other ways to measure a cell, shown beside the paper's: where its code and its text differ.

for label, other in variants(row, column):
    ...     # `other` is the column with another attack, rejector or metric
"""

from collections.abc import Iterator

from demur.paper.published import Column, PaperRow
from demur.rejectors import REFERENCE_RIDGE_NAME

STRONG = {  # first success of several restarts instead of the last iterate
    "multi-target": "multi-target:keep=success",
    "gama-pgd:restarts=1,keep=max_objective": "gama-pgd",
    "gama-fw:restarts=1,keep=max_objective": "gama-fw",
}


def variants(row: PaperRow, column: Column) -> Iterator[tuple[str, Column]]:
    """The name of each variant, and the column that measures it."""
    first = next(iter(column.attacks), "")
    if first in STRONG:
        yield "strong attack, first success", column._replace(attacks=(STRONG[first],))
    if first.startswith("corruption:"):
        yield "a threshold for each severity", column._replace(metric="tpr95_by_severity")
    if column.metric == "distance":
        yield "mean of the broken", column._replace(metric="distance_of_broken")
        yield "broken by a change, %", column._replace(metric="broken")
    if row.entry == "pgdat-carl" and column.metric == "auroc":
        yield "score of the paper's code, one minus ours", column._replace(metric="auroc_reversed")
    if row.rejector in ("GDA", "GDA*", "GMM"):
        name = REFERENCE_RIDGE_NAME.format(row.rejector)
        yield "ridge of the paper's code, 1e-10", column._replace(rejector=name)
