"""Draw the pictures of the documentation from a finished demo: docs/overview.png, guarantees.svg.

The run needs the three certificates that docs/guides/thresholds.md names.

.venv/bin/python tools/draw_docs.py runs/demo
"""

import sys
from pathlib import Path

from demur.cli.evaluate import load_run, score_run
from demur.evaluate.certificates import retests
from demur.report.certificates import guarantees_svg
from demur.report.figures import overview_figure

DOCS = Path(__file__).parents[1] / "docs"


def main(run: str) -> None:
    """Draw the pictures of one run with records and a certificate."""
    loaded = load_run(run, "cpu", None)
    evaluation, scored = score_run(loaded)
    (DOCS / "overview.png").write_bytes(overview_figure(scored, evaluation))
    records = [one.record for one in scored]
    tested = [pair for pair in retests(loaded, evaluation.scores, records) if pair[1]]
    (DOCS / "guarantees.svg").write_bytes(guarantees_svg(tested))


if __name__ == "__main__":
    main(*sys.argv[1:])
