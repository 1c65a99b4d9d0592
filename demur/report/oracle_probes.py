"""What there is to gain over confidence, in a sentence for each attack that was probed."""

from demur.evaluate import Row, ScoredRecord
from demur.evaluate.oracle_probes import FEATURES, PROBES
from demur.report.text import signed, terminal


def show_oracle_probes(scored: list[ScoredRecord]) -> None:
    """Print what probes found, where there were any."""
    for each in scored:
        rows = [row for row in each.rows if row.rejector in PROBES]
        if rows:
            terminal().print(sentence(each, rows), soft_wrap=True)


def sentence(scored: ScoredRecord, rows: list[Row]) -> str:
    """What the best probe knows beyond confidence."""
    best = max(rows, key=lambda row: row.ranking.auroc)
    gap = best.ranking.auroc_vs_con
    part = "features know" if best.rejector == FEATURES else "answers know"
    if gap.lo > 0:
        found = f"the {part} more than confidence says"
    elif gap.hi < 0:
        found = "no probe came up to confidence, so this says nothing; more images may"
    else:
        found = "no probe found more than confidence says"
    value, low, high = (signed(end, 1, 3) for end in gap[:3])
    where = f"{scored.summary.attack} (n={scored.summary.n})"
    return f"{where}: {found}: AUROC {value} [{low}, {high}], {best.rejector}"
