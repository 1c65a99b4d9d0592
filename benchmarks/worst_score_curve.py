"""Accepted errors by worst-score beside RejectAutoAttack aimed at single thresholds, on one run.

    python benchmarks/worst_score_curve.py runs/digits-pgdat-rr --n 100

Prints both counts at TPR-95, 80, 60 and 40. It exits with code 1 where worst-score finds less by
more than half a percent of the images. Records of the run are read where they exist.
"""

import argparse
import sys
import time
from pathlib import Path

from demur import TPR, AcceptedError, Linf, Run, WorstScore, run_attack
from demur.attacks import RejectAutoAttackEnsemble
from demur.evaluate import LoadedRun, RecordOptions, values
from demur.evaluate.accepted_errors import worst_case_of
from demur.recipes import rejectors_named
from demur.rejectors.rule import Score

LEVELS = (0.95, 0.8, 0.6, 0.4)
SLACK = 0.005


def main() -> int:
    """Compare both attacks on the command line's run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--n", type=int, default=100)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--split", default="cal", help="whose clean images choose thresholds")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--rejector", help="a name of demur score; by default that of the head")
    asked = parser.parse_args()
    loaded = LoadedRun(Run.open(asked.run), asked.device, asked.data)
    recipe = loaded.run.recipe
    ball, rejector = Linf(recipe.data.threat.linf), recipe.head_rejector[1]
    if asked.rejector:
        (rejector,) = rejectors_named([asked.rejector], recipe).values()
    rejector = loaded.fitted(rejector)
    assert isinstance(rejector, Score)
    options, begin = RecordOptions(n=asked.n, keep_images=0), time.perf_counter()
    record = run_attack(loaded, "worst-score", WorstScore(ball, rejector), options)
    sys.stdout.write(f"worst-score: {time.perf_counter() - begin:.0f} s\n")
    case = worst_case_of(rejector, record, loaded.clean("test"))
    cal, missed = loaded.clean(asked.split), False
    for level in LEVELS:
        point = TPR(level, asked.split)
        at, begin = point.threshold(values(rejector, cal), cal.correct), time.perf_counter()
        attack = RejectAutoAttackEnsemble(ball, AcceptedError(rejector, point))
        aimed = run_attack(loaded, f"reject-autoattack-{level:g}", attack, options)
        seconds = time.perf_counter() - begin
        found = int((~aimed.correct & (values(rejector, aimed) >= at)).sum())
        own = case.count(at)
        sys.stdout.write(
            f"TPR-{100 * level:g}: worst-score {own}, aimed {found} of {asked.n}; {seconds:.0f} s\n"
        )
        missed |= own < found - SLACK * asked.n
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
