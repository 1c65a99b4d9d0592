"""What oracle probes gain over confidence, in one sentence per attack."""

from demur.evaluate import Row, ScoredRecord
from demur.evaluate.oracle_probes import FEATURES, PROBES
from demur.report.text import signed, terminal


def show_oracle_probes(scored: list[ScoredRecord]) -> None:
    """Print the result of the best probe of each record that has probes."""
    for record in scored:
        rows = [row for row in record.rows if row.rejector in PROBES]
        if rows:
            terminal().print(sentence(record, rows), soft_wrap=True)


def sentence(scored: ScoredRecord, rows: list[Row]) -> str:
    """Compare the AUROC of the best probe with that of confidence."""
    best = max(rows, key=lambda row: row.ranking.auroc)
    gap = best.ranking.auroc_vs_con
    source = "features" if best.rejector == FEATURES else "outputs"
    if gap.lo > 0:
        found = f"the {source} hold more information than confidence"
    elif gap.hi < 0:
        found = "no probe reaches confidence, so this is inconclusive; use more images"
    else:
        found = "no probe finds more information than confidence"
    value, low, high = (signed(end, 1, 3) for end in gap[:3])
    where = f"{scored.summary.attack} (n={scored.summary.n})"
    return f"{where}: {found}: AUROC {value} [{low}, {high}], {best.rejector}"
