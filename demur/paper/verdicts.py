"""Does R-Con beat the confidence of its own net? One verdict per net, attack and measure.

    found = measure_verdicts(StoredRuns(Path("results"), open_run, print))
    found[0].word                   # "better", "equal", "worse" or "not measured"

Each is R-Con minus confidence on the same images with a paired 95% interval, which decides: R-Con
is equal where the interval contains zero.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from demur import metrics
from demur.attacks import (
    CW,
    Attack,
    Clean,
    Corruption,
    ForceRejectionEnsemble,
    RejectAutoAttackEnsemble,
)
from demur.calibrate import TPR
from demur.evaluate import values
from demur.evaluate.record_scores import can_score
from demur.evaluate.score import summary
from demur.files.tables import grid
from demur.metrics import BoolArray, Difference, FloatArray, Resamples
from demur.paper.cells import STORED_SCALES, record_file
from demur.paper.paper_runs import StoredRuns
from demur.paper.published import PAPER_TABLES
from demur.paper.scales import SCALES
from demur.recipes import VOCABULARY
from demur.rejectors import Con
from demur.rejectors.rule import Score
from demur.runs import Record, Run
from demur.spec import digest, read, show

LEVEL = 0.95  # TPR of every threshold
STRONGEST_IMAGES = 1000
Measure = Literal["paper", "deployed", "errors", "auroc", "strongest"]
DEPLOYED: tuple[Measure, Measure] = ("deployed", "errors")  # at thresholds from clean images
Word = Literal["better", "equal", "worse", "not measured"]
VERDICTS_INTRODUCTION = """\
## Does R-Con beat the confidence of its own net?

R-Con minus confidence on the same images of the same net, with paired 95% intervals (bootstrap over
images; DeLong for AUROC). The interval decides: *better*, *worse*, or *equal* where it contains
zero; about one in twenty differs by chance. A star marks attacks that stop at the first success,
whose rankings are artefacts; they are not counted. Of each attack the record of most images counts.
The totals pool attacks on the same nets and images, which are correlated.

- **Paper's threshold**: accuracy in percent of the accepted images, each score accepting 95% of the
  correct predictions of the attacked images.
- **Deployed threshold**: the same accuracy, each score accepting 95% of the correct predictions on
  clean images; those of the test set for nets that were trained on all other images.
- **Accepted errors** at the deployed threshold, in percent of all images: confidence, R-Con and
  their difference. Fewer are better.
"""
STRONGEST = """\
**Strongest attack**: accepted errors in percent of the images under RejectAutoAttack, aimed at each
score at its threshold from clean images. Less is better.
"""
MISSING = """\
Not measured; `RUN` is a run with weights (`demur train @{folder}/NET/recipe.txt --out RUN`):
"""
COLUMNS: tuple[tuple[Measure, str], ...] = (
    ("paper", "paper's threshold"),
    ("deployed", "deployed threshold"),
    ("errors", "accepted errors"),
    ("auroc", "AUROC"),
)
# Attacks whose images are no sample to rank: they end at the first success, or go as far as needed.
UNRANKED = (CW, RejectAutoAttackEnsemble, ForceRejectionEnsemble)


@dataclass(frozen=True)
class Verdict:
    """R-Con against the confidence of the same net under one attack, by one measure.

    Attributes:
        net: The run, relative to the folder of runs; a row of Table 2 if no run is stored.
        attack: Its label; the strongest attack has one record aimed at each score.
        measure: `paper` is the accuracy of accepted images with a threshold chosen on the attacked
            images, `deployed` the same with thresholds chosen on clean images, `errors` the share
            of accepted errors at these, `strongest` that share under attacks aimed at each score.
        con: The measure of confidence, in percent except for AUROC; `rcon` is that of R-Con.
        difference: `rcon` minus `con`, with the paired 95% interval `lo` to `hi`.
        word: Decided by the interval; fewer accepted errors are better.
        note: A warning, or the command that makes a missing record.
        records: Files that it is computed from.
    """

    net: str
    attack: str
    measure: Measure
    n: int | None = None
    con: float | None = None
    rcon: float | None = None
    difference: float | None = None
    lo: float | None = None
    hi: float | None = None
    word: Word = "not measured"
    note: str = ""
    records: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The verdict as JSON values."""
        return asdict(self)


class Pair(NamedTuple):
    """A record with the scores that are compared on it."""

    record: Record
    con: FloatArray
    rcon: FloatArray
    resamples: Resamples


def measure_verdicts(stored: StoredRuns, scales: Sequence[str] = STORED_SCALES) -> list[Verdict]:
    """The verdicts on every stored net with an RR head and records of test images.

    Rows of the paper's Table 2 with RR that have no run at these scales are there too, as not
    measured.
    """
    runs = sorted((run for group in stored.runs.values() for run in group), key=lambda r: r.path)
    found = []
    for run in runs:
        if run.recipe.head_rejector[0] == "R-Con" and (records := run.records("test")):
            net = run.path.relative_to(stored.folder).as_posix()
            found += [*_of_run(stored, run, net, records)]
    return [*found, *_missing_nets(stored, scales)]


def _missing_nets(stored: StoredRuns, scales: Sequence[str]) -> Iterator[Verdict]:
    """Rows of Table 2 with RR whose net is not stored at any of the scales."""
    for row in PAPER_TABLES[2].rows:
        recipes = [SCALES[scale].recipe(row.entry, row.changes) for scale in scales]
        known = [recipe for recipe in recipes if recipe is not None]
        if any(recipe.head_rejector[0] != "R-Con" or stored.find(recipe) for recipe in known):
            continue
        command = f"demur paper table 2 --scale {scales[-1]} --data DATA"
        for measure in get_args(Measure):
            yield Verdict(row.label, "all", measure, note=command)


def _of_run(stored: StoredRuns, run: Run, net: str, records: Sequence[Record]) -> Iterator[Verdict]:
    _, rejector = run.recipe.head_rejector
    assert isinstance(rejector, Score)
    clean = _clean_record(run, records)
    for record, parts in _ranked(stored, run, records):
        if not (can_score(Con(), record) and can_score(rejector, record)):
            continue
        pair = Pair(record, values(Con(), record), values(rejector, record), _resamples(record))
        note, files = summary(record).artefact, _files(run, parts)
        label = record.label.partition(",severity=")[0]  # of pooled records
        base = Verdict(net, label, "paper", len(record.y), note=note, records=files)
        yield _decided(base, *_at_paper_threshold(pair))
        deployed, errors = (replace(base, measure=one) for one in DEPLOYED)
        if clean is None:
            yield from (replace(v, note="demur attack RUN clean") for v in (deployed, errors))
        elif clean.digest != record.digest:  # on these images the threshold was chosen
            accepts = _accepted_when_deployed(pair, rejector, clean)
            yield _decided(deployed, *_accuracies(pair, accepts))
            wrong = [accept & ~record.correct for accept in accepts]
            yield _decided(errors, *_error_shares(wrong, pair.resamples), fewer=True)
        if "severity" not in record.arrays:  # DeLong's interval needs every image once
            con, rcon = (metrics.auroc(one, record.correct) for one in (pair.con, pair.rcon))
            gap = metrics.auroc_difference(pair.rcon, pair.con, record.correct)
            yield _decided(replace(base, measure="auroc"), con, rcon, gap, scale=1)
    yield _strongest(run, net, rejector, records)


def _clean_record(run: Run, records: Sequence[Record]) -> Record | None:
    """Clean images that thresholds are chosen on: of cal, or of test for nets without cal."""
    candidates = run.records("cal") if "cal" in run.recipe.data.splits else records
    found = [one for one in candidates if one.metadata["attack"] == digest(Clean())]
    return max(found, key=lambda record: len(record.y), default=None)


def _ranked(
    stored: StoredRuns, run: Run, records: Sequence[Record]
) -> Iterator[tuple[Record, list[Record]]]:
    """Records that scores are compared on, and those they consist of.

    The five severities of a corruption become one record.
    """
    parts = dict[Corruption, list[Record]]()  # by corruption of any severity
    largest = {str(one.metadata["attack"]): one for one in sorted(records, key=lambda r: len(r.y))}
    for record in largest.values():
        spec = _spec(record)
        if isinstance(spec, Corruption) and spec.severity is not None:
            parts.setdefault(replace(spec, severity=None), []).append(record)
        elif not isinstance(spec, UNRANKED):
            yield record, [record]
    for corruption, group in parts.items():
        whole = stored.record(run, corruption)
        if whole is not None and "severity" in whole.arrays:
            yield whole, group
        else:
            yield from ((record, [record]) for record in group)


def _spec(record: Record) -> Attack:
    spec = read(str(record.metadata["spec"]), VOCABULARY)
    assert isinstance(spec, Attack)
    return spec


def _files(run: Run, records: Sequence[Record]) -> tuple[str, ...]:
    return tuple(str(record_file(run, record)) for record in records)


def _resamples(record: Record) -> Resamples:
    """Resamples of images; the severities of an image are drawn together."""
    images = len(record.arrays["index"].unique())
    copies = len(record.y) // images
    drawn = Resamples.of(images)
    return replace(drawn, copies=copies)


def _at_paper_threshold(pair: Pair) -> tuple[float, float, Difference]:
    """Accuracy at TPR 95%, the threshold chosen on these images, as in the paper."""
    correct = pair.record.correct
    con, rcon = (metrics.paper_stats(one, correct, LEVEL).accuracy for one in pair[1:3])
    drawn = [metrics.paper_accuracy(one, correct, LEVEL)(pair.resamples) for one in pair[1:3]]
    return con, rcon, metrics.resampled_difference(rcon - con, drawn[1] - drawn[0])


def _accepted_when_deployed(pair: Pair, rejector: Score, clean: Record) -> list[BoolArray]:
    """Images that confidence and R-Con accept at thresholds chosen on clean images."""
    return [
        score >= TPR(LEVEL).threshold(values(one, clean), clean.correct)
        for one, score in ((Con(), pair.con), (rejector, pair.rcon))
    ]


def _error_shares(
    errors: Sequence[BoolArray], resamples: Resamples
) -> tuple[float, float, Difference]:
    """Share of all images that are accepted errors of confidence and of R-Con."""
    everyone = np.ones(len(errors[0]), dtype=np.bool_)
    con, rcon = (float(one.mean()) for one in errors)
    drawn = [resamples.shares(one, everyone) for one in errors]
    return con, rcon, metrics.resampled_difference(rcon - con, drawn[1] - drawn[0])


def _accuracies(pair: Pair, accepts: Sequence[BoolArray]) -> tuple[float, float, Difference]:
    """Accuracy of the accepted images."""
    correct = pair.record.correct
    con, rcon = (metrics.stats_of_verdicts(accept, correct).accuracy for accept in accepts)
    drawn = [pair.resamples.shares(correct, accept) for accept in accepts]
    return con, rcon, metrics.resampled_difference(rcon - con, drawn[1] - drawn[0])


def _strongest(run: Run, net: str, rejector: Score, records: Sequence[Record]) -> Verdict:
    """Accepted errors of each score under RejectAutoAttack aimed at it, on the same images."""
    aimed = {"con": _aimed_at(Con(), records), "rcon": _aimed_at(rejector, records)}
    empty = Verdict(net, "reject-autoattack", "strongest")
    con, rcon = aimed["con"], aimed["rcon"]
    if con is None or rcon is None or con.arrays["index"].tolist() != rcon.arrays["index"].tolist():
        return replace(empty, note=_strongest_command(run, rejector))
    errors = [_accepted_errors(con, Con()), _accepted_errors(rcon, rejector)]
    found = replace(empty, n=len(con.y), records=_files(run, (con, rcon)))
    return _decided(found, *_error_shares(errors, Resamples.of(len(con.y))), fewer=True)


def _strongest_command(run: Run, rejector: Score) -> str:
    at = "TPR(0.95)" if "cal" in run.recipe.data.splits else 'TPR(0.95, split="test")'
    texts = (
        f"'reject-autoattack:criterion=AcceptedError({show(score)}, {at})'"
        for score in (Con(), rejector)
    )
    return f"demur attack RUN {' '.join(texts)} --n {STRONGEST_IMAGES}"


def _aimed_at(score: Score, records: Sequence[Record]) -> Record | None:
    """The record of RejectAutoAttack on accepted errors of a score with the most images."""
    found = [
        record
        for record in records
        if isinstance(spec := _spec(record), RejectAutoAttackEnsemble)
        and spec.criterion.rejector == score
        and can_score(score, record)
    ]
    return max(found, key=lambda record: len(record.y), default=None)


def _accepted_errors(record: Record, score: Score) -> BoolArray:
    """Images that are wrong and accepted at the threshold that the attack was aimed at; N."""
    spec = _spec(record)
    assert isinstance(spec, RejectAutoAttackEnsemble)
    threshold = spec.criterion.threshold
    if not isinstance(threshold, float):
        threshold = float(record.metadata["thresholds"][show(spec.criterion)])
    errors: BoolArray = (values(score, record) >= threshold) & ~record.correct
    return errors


def _decided(
    verdict: Verdict,
    con: float,
    rcon: float,
    gap: Difference,
    scale: int = 100,
    fewer: bool = False,
) -> Verdict:
    """The verdict with its numbers and the word that the interval decides."""
    word: Word = "equal"
    if gap.lo > 0 or gap.hi < 0:
        word = "better" if (gap.lo > 0) != fewer else "worse"
    return replace(
        verdict, con=scale * con, rcon=scale * rcon, difference=scale * gap.value,
        lo=scale * gap.lo, hi=scale * gap.hi, word=word,
    )  # fmt: skip


def verdict_section(verdicts: Sequence[Verdict], folder: str) -> str:
    """The section: counts, a row for each net and attack, the strongest attack, what is missing."""
    ranked = [one for one in verdicts if one.measure != "strongest"]
    strongest = [one for one in verdicts if one.measure == "strongest"]
    measured = [one for one in strongest if one.word != "not measured"]
    headings = ["net", "attack", "n", *(name for _, name in COLUMNS)]
    lines = [VERDICTS_INTRODUCTION, *_counts(verdicts), ""]
    lines += [grid(headings, _rows(ranked), "llr" + "l" * len(COLUMNS)), "", STRONGEST]
    rows = [
        [one.net, f"{one.n:,}", f"{one.con:.1f}", f"{one.rcon:.1f}", _cell(one)] for one in measured
    ]
    strongest_headings = ["net", "n", "Con", "R-Con", "difference"]
    lines += [grid(strongest_headings, rows, "lrrrl") if rows else "No net has both records."]
    return "\n".join([*lines, "", *_missing(verdicts, folder)]).rstrip() + "\n"


def _counts(verdicts: Iterable[Verdict]) -> list[str]:
    """A sentence for each measure: how often R-Con is better, equal and worse."""
    names = (*COLUMNS, ("strongest", "strongest attack"))
    lines = []
    for measure, name in names:
        words = Counter(
            one.word for one in verdicts if one.measure == measure and not _is_artefact(one)
        )
        parts = [f"{words[word]} {word}" for word in ("better", "equal", "worse", "not measured")]
        lines.append(f"- {name}: {', '.join(parts)}")
    return lines


def _is_artefact(verdict: Verdict) -> bool:
    return bool(verdict.note) and verdict.word != "not measured"


def _rows(verdicts: Iterable[Verdict]) -> list[list[str]]:
    groups: dict[tuple[str, str, int | None], dict[Measure, Verdict]] = {}
    for one in verdicts:
        groups.setdefault((one.net, one.attack, one.n), {})[one.measure] = one
    rows = []
    for (net, attack, n), own in groups.items():
        star = " *" if any(_is_artefact(one) for one in own.values()) else ""
        images = "" if n is None else f"{n:,}"
        cells = (_cell(own[measure]) if measure in own else "" for measure, _ in COLUMNS)
        rows.append([net, f"{attack}{star}", images, *cells])
    return rows


def _cell(verdict: Verdict) -> str:
    if verdict.difference is None or verdict.lo is None or verdict.hi is None:
        return verdict.word
    decimals = 3 if verdict.measure == "auroc" else 2
    value, lo, hi = (f"{end:+.{decimals}f}" for end in (verdict.difference, verdict.lo, verdict.hi))
    shown = f"{value} [{lo}, {hi}] {verdict.word}"
    if verdict.measure == "errors":
        return f"{verdict.con:.1f}, {verdict.rcon:.1f}: {shown}"
    return shown


def _missing(verdicts: Iterable[Verdict], folder: str) -> list[str]:
    """What is not measured by the command that makes it."""
    nets: dict[str, list[str]] = {}
    for one in verdicts:
        if one.word == "not measured":
            nets.setdefault(one.note, []).append(one.net)
    lines = [MISSING.format(folder=folder)] if nets else []
    for command, names in nets.items():
        lines.append(f"- {'; '.join(dict.fromkeys(names))}: `{command}`")
    return lines
