"""Studies of stored records: minimal distortion under C&W, oracle probes, metrics by name.

Distortion, normal: the prediction is wrong. Adaptive: it is wrong, and its score reaches the median
score of correct predictions on clean training images. An image is broken if the search changed it,
or if it needs no change: no second verdict is taken so near the boundary. An oracle probe shows
what a rejector with the outputs of a net as inputs could reach.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import one_hot

from demur import metrics
from demur.attacks import CW, Attack
from demur.attacks.attack import RuleCriterion
from demur.calibrate import TPR
from demur.errors import BadInput, import_optional, suggestion
from demur.evaluate import ScoredRecord, tcon_of, values
from demur.evaluate.binding import CleanRecord, resolve_thresholds
from demur.evaluate.paired_differences import paired
from demur.evaluate.record_scores import JsonFields, StoredScore, can_score
from demur.metrics import BoolArray, FloatArray, Interval
from demur.metrics.intervals import student_p
from demur.output import log_probabilities, prediction
from demur.paper.published import as_list, fitting
from demur.paper.scales import settings_grid
from demur.recipes import VOCABULARY, Recipe
from demur.recipes import attack as attack_named
from demur.rejectors import Rectifier, Rejector
from demur.rejectors.rule import Score
from demur.report.terminal import percent, plain_table, show_table, signed, terminal
from demur.runs import Record, Run
from demur.runs.record import read_record
from demur.spec import read, show

NORMAL = "normal"
Norm = Literal["L2", "Linf", "Linf-adam"]
UNITS = {"L2": "squared L2", "Linf": "Linf x 255", "Linf-adam": "Linf x 255, Adam"}
DISTANCE_COLUMNS = (
    "broken, %", "wrong unattacked", "mean of broken", "median", "times normal",
    "paper: mean of all",
)  # fmt: skip
DISTANCE_CAPTION = (
    "adaptive: misclassified, with a score of at least the median of correct predictions on clean "
    "training images. Mean and median are over the images that the attack broke; times normal is "
    "over those that both attacks broke. The last column follows the paper: where the adaptive "
    "attack fails, the distance of normal C&W counts, which is 0 where that fails or needs no "
    "change. An attack that fails seems closer"
)


@dataclass(frozen=True)
class Distances(JsonFields):
    """Distances that one minimal-distortion attack needed on one record.

    They are squared for L2 and times 255 for Linf. A mean over no images is None.
    """

    attack: str
    norm: Norm
    rejector_name: str  # the rejector that must accept, or normal
    threshold: float | None
    n: int
    unbroken: int  # images that the attack could not break, which `mean` and `median` leave out
    broken: float  # share of all images, including those broken without a change
    broken_interval: Interval
    broken_clean: float  # share of all images that were broken without a change
    mean: float | None  # over the images that a change broke
    mean_interval: Interval | None
    median: float | None
    paper_mean: float | None  # over all images, see `counted_distances`; None without normal
    ratio_to_normal: float | None  # mean divided by that of normal, on the images that both broke
    record: str


@dataclass(frozen=True)
class DistortionVerdicts:
    """A record with the success and the distance of each image."""

    record: Record
    attack: CW
    threshold: float | None
    broken: BoolArray
    distance: FloatArray
    correct_clean: BoolArray  # correct before the attack

    @property
    def moved(self) -> BoolArray:
        """Which images a change broke; N."""
        return self.broken & (self.distance > 0)


def default_attacks(recipe: Recipe) -> list[str]:
    """Attacks of the paper's table: both norms, normal, adaptive for Con and for the head."""
    name, _ = recipe.head_rejector
    on_confidence = [] if name == "Con" else [":rejector=Con()"]
    return [
        label
        for norm in ("", "-linf")
        for label in (f"cw{norm}", *(f"cw-adaptive{norm}{c}" for c in (*on_confidence, "")))
    ]


def distortion_attack(text: str, recipe: Recipe) -> CW:
    """Attack of that name; BadInput if it does not minimise the distortion."""
    found: Attack = attack_named(text, recipe)
    if not isinstance(found, CW):
        raise BadInput(f"{text} does not minimise the distortion; use cw, cw-linf or cw-adaptive")
    return found


def distortion_verdicts(
    record: Record, attack: CW, clean: CleanRecord, correct_clean: BoolArray
) -> DistortionVerdicts:
    """Which images of a record are broken, and the distance of each."""
    bound = resolve_thresholds(attack, clean).spec
    distance = distances_of(record, attack)
    broken = (distance > 0) | bound.criterion(record.output, record.y).numpy()
    at = bound.criterion.threshold if isinstance(bound.criterion, RuleCriterion) else None
    t = at if isinstance(at, float) else None
    return DistortionVerdicts(record, attack, t, broken, distance, correct_clean)


def counted_distances(distance: FloatArray, normal: FloatArray) -> FloatArray:
    """Distances as the paper averages them over all images; N.

    Where an adaptive attack fails, its image is the one that normal C&W returned, so the distance
    of that counts. An image that is misclassified without an attack has the distance 0 in normal
    C&W, but an adaptive attack may still have to move it until it is accepted.

    Args:
        distance: Of the attack; 0 where it changed nothing, N.
        normal: Distances of normal C&W in the same norm, N.
    """
    return np.where(distance > 0, distance, normal)


def paper_mean_distance(record: Record, normal: Record, attack: CW) -> float | None:
    """Mean distance as the paper counts, from records alone; None if `normal` lacks an image.

    `normal` is the record of normal C&W in the same norm: `record` itself, or another.
    """
    known = {int(index): row for row, index in enumerate(normal.arrays["index"])}
    indices = [int(index) for index in record.arrays["index"]]
    if not known.keys() >= set(indices):
        return None
    rows = [known[index] for index in indices]
    of_normal = distances_of(normal, attack)[rows]
    return float(counted_distances(distances_of(record, attack), of_normal).mean())


def distances(
    found: Sequence[DistortionVerdicts], rejectors: Mapping[str, Rejector]
) -> list[Distances]:
    """Distances of each attack, compared with the normal attack in the same norm if any."""
    normal = {one.attack.norm: one for one in reversed(found) if not _has_rejector(one.attack)}
    return [_distances(one, normal.get(one.attack.norm), rejectors) for one in found]


def _distances(
    one: DistortionVerdicts, normal: DistortionVerdicts | None, rejectors: Mapping[str, Rejector]
) -> Distances:
    far = one.distance[one.moved]
    adaptive = _has_rejector(one.attack)
    return Distances(
        attack=one.record.label,
        norm=one.attack.norm,
        rejector_name=_rejector_name(one.attack, rejectors),
        threshold=one.threshold,
        n=len(one.broken),
        unbroken=int((~one.broken).sum()),
        broken=float(one.broken.mean()),
        broken_interval=metrics.wilson(int(one.broken.sum()), len(one.broken)),
        broken_clean=float((one.broken & ~one.moved).mean()),
        mean=float(far.mean()) if len(far) else None,
        mean_interval=_bootstrapped_mean(far) if len(far) else None,
        median=float(np.median(far)) if len(far) else None,
        paper_mean=_paper_mean(one, normal if adaptive else one),
        ratio_to_normal=_ratio(one, normal) if normal and adaptive else None,
        record=one.record.digest,
    )


def _bootstrapped_mean(values: FloatArray) -> Interval:
    """95% percentile interval of the mean over 1,000 resamples."""
    generator, n = np.random.default_rng(0), len(values)
    means = [float(values[generator.integers(n, size=n)].mean()) for _ in range(1000)]
    return metrics.percentiles(np.array(means), 0.95)


def _paper_mean(one: DistortionVerdicts, normal: DistortionVerdicts | None) -> float | None:
    """Mean as the paper counts; None if an adaptive attack failed and there is no normal one."""
    if normal is None and (one.broken | ~one.correct_clean).all():
        normal = one
    if normal is None:
        return None
    return float(counted_distances(one.distance, normal.distance).mean())


def _ratio(one: DistortionVerdicts, other: DistortionVerdicts) -> float | None:
    """Ratio of the mean distances on the images that a change broke in both."""
    both = one.moved & other.moved
    return float(one.distance[both].mean() / other.distance[both].mean()) if both.any() else None


def distances_of(record: Record, attack: CW) -> FloatArray:
    """Distance of each image in the units of the paper; N."""
    sizes = record.arrays["size_l2" if attack.norm == "L2" else "size_linf"].double().numpy()
    found: FloatArray = sizes**2 if attack.norm == "L2" else 255 * sizes
    return found


def _has_rejector(attack: CW) -> bool:
    return isinstance(attack.criterion, RuleCriterion)


def _rejector_name(attack: CW, rejectors: Mapping[str, Rejector]) -> str:
    """Name of the rejector that must accept, or normal."""
    criterion = attack.criterion
    if not isinstance(criterion, RuleCriterion):
        return NORMAL
    known = (name for name, rejector in rejectors.items() if rejector == criterion.rejector)
    return next(known, str(criterion.rejector))


def show_distances(lines: Sequence[Distances]) -> None:
    """Print the table, and which means leave out images that were not broken."""
    show_table(distance_table(lines))
    for line in lines:
        if line.unbroken:
            terminal().print(
                f"{line.attack} did not break {line.unbroken} of {line.n} images: its mean and "
                "median are over the others",
                soft_wrap=True,
            )


def distance_table(lines: Sequence[Distances]) -> Table:
    """Return minimum-norm attacks by norm, normal beside adaptive."""
    title = f"smallest change that breaks an image, n={lines[0].n}"
    first = "distance, must be accepted by"
    table = plain_table(title, first, *DISTANCE_COLUMNS, caption=DISTANCE_CAPTION)
    for norm in dict.fromkeys(line.norm for line in lines):
        table.add_row(UNITS[norm], style="bold")
        for line in lines:
            if line.norm == norm:
                table.add_row(f"  {line.rejector_name} ({line.attack})", *distance_cells(line))
        table.add_section()
    return table


def distance_cells(line: Distances) -> tuple[str, ...]:
    """Format a line: the cells of DISTANCE_COLUMNS."""
    ends = line.mean_interval
    mean = "" if line.mean is None else _three_digits(line.mean)
    return (
        percent(line.broken, line.broken_interval),
        percent(line.broken_clean),
        mean if ends is None else f"{mean} [{_three_digits(ends.lo)}, {_three_digits(ends.hi)}]",
        "" if line.median is None else _three_digits(line.median),
        "" if line.ratio_to_normal is None else f"{line.ratio_to_normal:.2f}",
        "" if line.paper_mean is None else _three_digits(line.paper_mean),
    )


def _three_digits(value: float) -> str:
    """Format a number with three significant digits."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


FOLDS = 5
MIN_PER_OUTCOME = 100  # least number of correct and of wrong predictions to fit a probe
LINEAR, TREES = "outputs, linear (oracle)", "outputs, trees (oracle)"
FEATURES = "features, linear (oracle)"  # features and outputs
PROBES = (LINEAR, TREES, FEATURES)


def probe_scores(record: Record) -> dict[str, FloatArray]:
    """Scores (N) of each probe that the record has inputs for; BadInput if there is none.

    A probe is a classifier of correct and wrong predictions of the net. It is trained with the
    labels of the record that it scores, which no deployed rejector has. Scores are cross-
    fitted: the model that scores an image was fitted to the other folds.
    """
    import_optional("sklearn", "probes need scikit-learn", "'demur[sklearn]'")
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if reason := why_unprobed(record):
        raise BadInput(f"the record of {record.label} cannot be probed: {reason}")
    out, correct = record.output, record.correct
    logs = log_probabilities(out)
    ordered = logs.sort(-1, descending=True).values
    predicted = one_hot(prediction(out), logs.shape[-1])
    inputs = torch.cat([logs, ordered, predicted, out.aux], 1).double()  # N, 3C + H
    linear = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))
    trees = HistGradientBoostingClassifier(
        learning_rate=0.05, max_iter=150, max_leaf_nodes=15, min_samples_leaf=40, random_state=0
    )
    probes = {LINEAR: (linear, inputs), TREES: (trees, inputs)}
    if out.feature.shape[-1]:
        probes[FEATURES] = (linear, torch.cat([inputs, out.feature.double()], 1))
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)

    def scores(model: Any, x: Tensor) -> FloatArray:
        found = cross_val_predict(model, x.numpy(), correct, cv=folds, method="predict_proba")
        return np.asarray(found[:, 1])

    return {name: scores(*probe) for name, probe in probes.items()}


def why_unprobed(record: Record) -> str:
    """Reason why no probe can be fitted to a record; empty if one can."""
    if record.scores_only:
        return "the record has only scores; attack the run again and archive it without --only"
    correct = int(record.correct.sum())
    if min(correct, len(record.y) - correct) < MIN_PER_OUTCOME:
        return (
            f"{correct} of {len(record.y)} predictions are correct, and a probe needs "
            f"{MIN_PER_OUTCOME} correct and {MIN_PER_OUTCOME} wrong ones; attack more images or "
            "use another attack"
        )
    return ""


def probe_sentence(scored: ScoredRecord) -> str:
    """Compare the AUROC of the best probe with that of confidence."""
    rows = [row for row in scored.rows if row.rejector in PROBES]
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


def rr_loss(p: FloatArray, target: FloatArray) -> float:
    """Mean binary cross-entropy: L_RR of R-Con and T-Con, N each."""
    p = np.clip(p, 1e-12, 1 - 1e-12)
    return float(-np.mean(target * np.log(p) + (1 - target) * np.log(1 - p)))


def best_constants(con: FloatArray, tcon: FloatArray, bins: int) -> dict[str, Any]:
    """The constants A that minimise L_RR in equal parts of the images by confidence, and L_RR."""
    order, found = np.argsort(con, kind="stable"), np.empty(len(con))
    for part in np.array_split(order, bins):
        c, t, low, high = con[part], tcon[part], 0.0, 1.0
        for _ in range(30):  # the loss is convex in A: bisect its derivative
            a = (low + high) / 2
            rises = np.mean((1 - t) * c / (1 - c * a)) > np.mean(t) / a
            low, high = (low, a) if rises else (a, high)
        found[part] = a
    return {"a": found[order], "loss": rr_loss(con * found, tcon)}


def p_value(a: FloatArray, b: FloatArray) -> float:
    """Two-sided p of Student's t-test of two independent samples."""
    freedom, parts = len(a) + len(b) - 2, [((one - one.mean()) ** 2).sum() for one in (a, b)]
    error = np.sqrt(sum(parts) / freedom * (1 / len(a) + 1 / len(b)))
    return student_p(float((a.mean() - b.mean()) / error), freedom)


def rank_correlation(a: FloatArray, b: FloatArray) -> float:
    """Spearman's rank correlation of scores without ties."""
    ranks = [np.argsort(np.argsort(one)) for one in (a, b)]
    matrix: FloatArray = np.corrcoef(np.stack(ranks))
    return float(matrix[0, 1])


class RecordMetrics:
    """Metrics of stored records, by patterns of a run, an attack and a score.

    `functions` has each by name. Lists of patterns, or a pattern of several runs, give an array.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = cache(self._runs)
        self.record = cache(self._record)
        self.scores = cache(self._scores)
        self.functions: dict[str, Callable[..., Any]] = {
            "accuracy": self._each(lambda *one: 100 * self.record(*one).correct.mean()),
            "tpr95": self._each(lambda *one: 100 * metrics.paper_stats(*self.pair(*one)).accuracy),
            "auroc": self._each(lambda *one: metrics.auroc(*self.pair(*one))),
            "errors": self._each(self._errors),
            "distance": self._each(self._distance),
            "gap": self._gap,
            "score": self._each(self.scores),
            "correct": self._each(lambda *one: self.record(*one).correct),
        }

    def _runs(self, pattern: str) -> tuple[Run, ...]:
        found = sorted(self.folder.glob(f"{pattern}/recipe.txt"))
        if not found:
            raise BadInput(f"{self.folder} has no run {pattern!r}")
        return tuple(Run(path.parent) for path in found)

    def _record(self, run: Run, attack: str) -> Record:
        """The record of most images of the attack whose label fits the pattern."""
        found = [(json.loads(p.read_text()), p) for p in run.records_folder.glob("*.json")]
        labels = fitting(attack, {one["label"] for one, _ in found})
        if len(labels) != 1:
            raise BadInput(f"{run.path} has {len(labels)} attacks like {attack!r}, not one")
        of_attack = [(one["n"], path) for one, path in found if one["label"] == labels[0]]
        return read_record(max(of_attack)[1].with_suffix(".npz"))

    def _scores(self, run: Run, attack: str, name: str) -> FloatArray:
        """A score of the images, N: Con, head (that of the head), A, T-Con, or a rejector's."""
        record = self.record(run, attack)
        if name == "T-Con":
            return tcon_of(record)
        if name == "A" and not can_score(Rectifier(), record):
            found: FloatArray = self.scores(run, attack, "head") / self.scores(run, attack, "Con")
            return found
        known = run.recipe.rejectors() | settings_grid(run.recipe)
        own = {"head": run.recipe.head_rejector[1], "A": Rectifier()}
        if name not in (both := known | own):
            raise BadInput(f"{run.path} has no rejector {name!r}; {suggestion(name, both)}")
        rejector = both[name]
        stored = StoredScore(show(rejector, full=True))  # of a rejector that was fitted
        return values(rejector if isinstance(rejector, Score) else stored, record)

    def pair(self, run: Run, attack: str, name: str) -> tuple[FloatArray, metrics.BoolArray]:
        """A score of the images, and which predictions are correct; N each."""
        return self.scores(run, attack, name), self.record(run, attack).correct

    def _errors(self, run: Run, attack: str, name: str) -> float:
        """Accepted errors in percent of the images, at the threshold from clean images."""
        threshold = TPR(0.95).threshold(*self.pair(run, "clean", name))
        score, correct = self.pair(run, attack, name)
        return 100 * float(((score >= threshold) & ~correct).mean())

    def _distance(self, run: Run, attack: str) -> float:
        """The mean distance as the paper counts it."""
        record = self.record(run, attack)
        spec = read(str(record.metadata["spec"]), VOCABULARY)
        normal = self.record(run, attack.replace("-adaptive", ""))
        found = paper_mean_distance(record, normal, spec) if isinstance(spec, CW) else None
        if found is None:
            raise BadInput(f"{record.label} on {run.path} has no distances of C&W")
        return found

    def _gap(self, pattern: str, attack: str) -> dict[str, float]:
        """AUROC of R-Con minus that of confidence of the same nets, with its interval."""
        gaps = [
            metrics.auroc_difference(
                self.scores(run, attack, "head"), *self.pair(run, attack, "Con")
            )
            for run in self.runs(pattern)
        ]
        return paired(gaps)._asdict()

    def _each(self, measure: Callable[..., Any]) -> Callable[..., Any]:
        """The measure of all runs, attacks and scores that are given, or of the only one."""

        def measured(pattern: Any, *rest: Any) -> Any:
            runs = [run for one in as_list(pattern) for run in self.runs(one)]
            found = [measure(*one) for one in product(runs, *map(as_list, rest))]
            return np.array(found) if len(found) > 1 else found[0]

        return measured
