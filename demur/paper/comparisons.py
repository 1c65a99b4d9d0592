"""Comparisons of recipes: each is trained with several seeds, attacked, scored and averaged.

    failures = compute(COMPARISONS["methods-digits"].needs((0, 1)), Path("runs"), steps, on_job)
    measure_comparison(COMPARISONS["methods-digits"], (0, 1), stored, failures)

A training that diverged or failed becomes a result with the reason. The paper scores CARL and ATRO
by their margin. Its CCAT is that of the reference code.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from demur.data import SplitName
from demur.errors import BadInput, Diverged, suggestion
from demur.evaluate import LoadedRun, Protocol, RecordOptions, RejectorEvaluation, Row, ScoredRecord
from demur.evaluate.paired_differences import Mean, mean_of, paired
from demur.metrics import Difference
from demur.paper.paper_runs import Failure, Need, StoredRuns
from demur.paper.published import PAPER_TABLES, PaperRow
from demur.paper.scales import COMPARED_CHANGES
from demur.recipes import RECIPES, Recipe, attack, with_changes
from demur.rejectors import Con, Rejector
from demur.runs import Run, run_folder
from demur.spec import digest

NOT_MEASURED, WITHOUT, DIVERGED = "not measured yet", "without", "diverged"


class PublishedScore(NamedTuple):
    """The published numbers of one rejector under one attack."""

    right: float  # accuracy on accepted images at TPR 95, in percent
    auroc: float


PublishedScores = Mapping[tuple[str, str, str], PublishedScore]  # by entry, score and attack
PUBLISHED_NOTE = (
    "`the paper` is TPR-95 and AUROC of the paper's Table 2: 110 epochs, the checkpoint with the "
    "best result on the test images."
)


def published_table2(attacks: Sequence[str]) -> PublishedScores:
    """The paper's Table 2; `attacks` are demur's names of its four columns."""
    return {
        (row.entry, _rejector_name(row), text): PublishedScore(*row.values[2 * i : 2 * i + 2])
        for row in PAPER_TABLES[2].rows
        for i, text in enumerate(attacks)
    }


def _rejector_name(row: PaperRow) -> str:
    return row.rejector or RECIPES[f"cifar10-{row.entry}"].head_rejector[0]


@dataclass(frozen=True)
class Comparison:
    """Recipes by entry name, and the attacks they are evaluated under.

    A recipe whose base is the name of an entry starts from that entry's run with the same seed.
    """

    title: str
    entries: Mapping[str, Recipe]
    attacks: tuple[str, ...]
    split: SplitName = "test"  # the attacked images
    learned: tuple[str, ...] = ()  # rejectors fitted to features of every trained net
    published: PublishedScores = field(default_factory=dict)
    command: tuple[str, ...] = ("demur", "paper", "study", "recipes")  # its name follows

    def recipe(self, entry: str, seed: int) -> Recipe:
        """The recipe of one training: entry and seed."""
        recipe = replace(self.entries[entry], seed=seed)
        based = recipe.base in self.entries
        return replace(recipe, base=self.folder(str(recipe.base), seed).name) if based else recipe

    def folder(self, entry: str, seed: int) -> Path:
        """The run folder of one training."""
        return run_folder(entry_folder(entry), self.recipe(entry, seed), changed=True)

    def needs(self, seeds: Sequence[int]) -> Iterator[Need]:
        """Every attack on every training of these seeds, on all images of the split."""
        for entry in self.entries:
            for seed in seeds:
                recipe, options = self.recipe(entry, seed), RecordOptions(self.split)
                for text in self.attacks:
                    yield Need(entry_folder(entry), recipe, text, options)

    def only(self, names: tuple[str, ...]) -> "Comparison":
        """The table with only these entries and their bases, in the original order.

        Raises:
            BadInput: There is no such entry.
        """
        for name in names:
            if name not in self.entries:
                hint = suggestion(name, self.entries)
                raise BadInput(f"the table has no entry {name!r}; {hint}")
        wanted = {self.entries[name].base for name in names}.union(names)
        entries = {name: recipe for name, recipe in self.entries.items() if name in wanted}
        return replace(self, entries=entries)

    def with_changes(self, changes: Iterable[str]) -> "Comparison":
        """The table with KEY=VALUE changes applied to every recipe.

        Raises:
            BadInput: A change does not apply to a recipe; the message names its entry.
        """
        all_changes, entries = tuple(changes), {}
        for name, recipe in self.entries.items():
            try:
                entries[name] = with_changes(recipe, all_changes)
            except BadInput as error:
                raise BadInput(f"the entry {name} cannot be changed: {error}") from error
        return replace(self, entries=entries)


def _every_pair(data: str) -> dict[str, Recipe]:
    """Recipes of every framework with every head of the paper that it combines with."""
    entries = {}
    for framework in ("standard", "pgdat", "trades", "ccat", "ccat-reference"):
        plain = RECIPES[f"{data}-{framework}"]
        entries[framework] = plain
        for head in ("RR", "EBD", "SNet", "ATRO", "CARL"):
            with suppress(BadInput):
                entries[f"{framework}-{head.lower()}"] = with_changes(plain, [f"head={head}()"])
    return entries


PAPER = ["data.split=paper"]
METHODS = (  # in the order of the paper's Table 2
    "standard", "pgdat", "pgdat-snet", "pgdat-ebd", "pgdat-carl", "pgdat-atro", "pgdat-rr",
    "trades", "trades-rr", "ccat", "ccat-rr", "ccat-reference", "ccat-reference-rr",
)  # fmt: skip
RADII = (
    "pgd-100:restarts=10", "pgd-100:restarts=10,eps=16/255", "pgd-100-l2:restarts=10",
)  # fmt: skip
ADAPTIVE = ("clean", "pgd-20", "adaptive", "adaptive-apgd")
COMPARISONS: dict[str, Comparison] = {
    "methods-digits": Comparison(
        "Training methods on digits",
        _every_pair("digits")
        | {
            "pgdat-ebd-swapped": with_changes(  # the paper's failing pair, which diverges
                RECIPES["digits-pgdat-ebd"],
                ["head.m_in=-5.0", "head.m_out=-23.0", "head.weight=1.0"],
            )
        },
        ADAPTIVE,
    ),
    "methods-cifar10": Comparison(
        "Training methods on CIFAR-10 (ResNet-18, 36 epochs without EMA; best: 60 epochs with EMA)",
        {
            name: with_changes(RECIPES[f"cifar10-{name}-short"], PAPER + COMPARED_CHANGES)
            for name in METHODS
        }
        | {"best": with_changes(RECIPES["cifar10-trades-rr-awp"], PAPER)},
        ("clean", "pgd-10", "pgd-100", *RADII),
        learned=("KD", "LID", "GDA", "GDA*", "GMM"),
        published=published_table2(("clean", *RADII)),
    ),
}


def entry_folder(entry: str) -> str:
    """The folder name of an entry: lower case, other characters replaced by single hyphens."""
    text = "".join(c if c.isalnum() or c in "._" else "-" for c in entry.lower())
    return "-".join(part for part in text.split("-") if part)


def comparison_by_name(name: str) -> Comparison:
    """The comparison with this name; raises BadInput if there is none."""
    if name not in COMPARISONS:
        hint = suggestion(name, COMPARISONS)
        raise BadInput(f"no comparison of recipes is called {name!r}; {hint}")
    return COMPARISONS[name]


@dataclass(frozen=True)
class TrainingResult:
    """The results of one training of one recipe, or the reason why there are none."""

    entry: str
    seed: int
    recipe: str  # digest
    run: str
    rows: tuple[Row, ...] = ()
    accuracy: dict[str, float] | None = None  # on all images, by attack
    notes: tuple[str, ...] = ()
    failure: str = ""  # why results are missing, if any are

    @property
    def has_failed(self) -> bool:
        """Whether an error that the user can fix prevented the training."""
        expected = (NOT_MEASURED, WITHOUT, DIVERGED)
        return bool(self.failure) and not self.failure.startswith(expected)


def measure_comparison(
    table: Comparison,
    seeds: Sequence[int],
    stored: StoredRuns,
    failures: Iterable[Failure] = (),
    keep: Callable[[LoadedRun, Sequence[str]], object] = lambda loaded, scores: None,
) -> list[TrainingResult]:
    """One result per entry and seed, in that order, from stored records.

    `failures` are the nets that could not be computed; `keep` is called with each scored run.
    """
    reasons = {digest(one.net.recipe): _reason(one) for one in failures}
    results = []
    for entry in table.entries:
        for seed in seeds:
            key = digest(table.recipe(entry, seed))
            empty = TrainingResult(entry, seed, key, table.folder(entry, seed).name)
            if key in reasons:
                results.append(replace(empty, failure=reasons[key]))
                continue
            try:
                results.append(_measure_training(table, empty, stored, keep))
            except BadInput as reason:
                results.append(replace(empty, failure=str(reason)))
    return results


def _reason(failure: Failure) -> str:
    prefix = f"{DIVERGED}: " if isinstance(failure.error, Diverged) else ""
    return f"{prefix}{failure.error}"


def _measure_training(
    table: Comparison,
    empty: TrainingResult,
    stored: StoredRuns,
    keep: Callable[[LoadedRun, Sequence[str]], object],
) -> TrainingResult:
    """Score the records of a trained net; return the result with all available rows."""
    recipe = table.recipe(empty.entry, empty.seed)
    run = _only_run(stored, recipe, empty.run)
    if run is None:
        return replace(empty, failure=NOT_MEASURED)
    found = {text: stored.record(run, attack(text, recipe), table.split) for text in table.attacks}
    records = {text: record for text, record in found.items() if record is not None}
    loaded = stored.open_run(run)
    evaluation = RejectorEvaluation.of(
        loaded, rejectors=_rejectors(recipe, table.learned), records=[*records.values()]
    )
    scored = {text: evaluation.score_record(record) for text, record in records.items()}
    unavailable = {name for one in scored.values() for name in one.missing_rejectors}
    keep(loaded, [name for name in evaluation.scores if name not in unavailable])
    missing = [text for text in table.attacks if text not in records]
    reasons = [f"{NOT_MEASURED}: {', '.join(missing)}"] if missing else []
    reasons += _missing_scores(evaluation, scored)
    return replace(
        empty, run=run.name,
        # a stored record may have another label
        rows=tuple(replace(row, attack=text) for text, one in scored.items() for row in one.rows),
        accuracy={text: one.summary.accuracy for text, one in scored.items()},
        notes=tuple(one.summary.artefact for one in scored.values() if one.summary.artefact),
        failure="; ".join(reasons),
    )  # fmt: skip


def _only_run(stored: StoredRuns, recipe: Recipe, name: str) -> Run | None:
    """The run of a recipe with this name, or its only one; None without a run."""
    runs = stored.find(recipe)
    runs = [run for run in runs if run.name == name] or runs
    if len(runs) > 1:
        names = " and ".join(run.name for run in runs)
        raise BadInput(f"{names} in {stored.folder} have the same recipe; keep only one of them")
    return runs[0] if runs else None


def _missing_scores(
    evaluation: RejectorEvaluation, scored: Mapping[str, ScoredRecord]
) -> list[str]:
    """The scores missing under all attacks with the reason, then those missing under some."""
    by_reason, by_attacks = dict[str, list[str]](), dict[tuple[str, ...], list[str]]()
    for name, reason in evaluation.unavailable.items():
        by_reason.setdefault(reason, []).append(name)
    for name in evaluation.scores:
        if labels := tuple(label for label, one in scored.items() if name in one.missing_rejectors):
            by_attacks.setdefault(labels, []).append(name)
    return [f"{WITHOUT} {', '.join(names)}: {reason}" for reason, names in by_reason.items()] + [
        f"{WITHOUT} {', '.join(names)} under {', '.join(labels)}"
        for labels, names in by_attacks.items()
    ]


def _rejectors(recipe: Recipe, learned: Sequence[str]) -> dict[str, Rejector]:
    """Con, the head's own score, and the rejectors fitted to features."""
    (name, own), known = recipe.head_rejector, recipe.rejectors()
    return {"Con": Con(), name: own} | {name: known[name] for name in learned}


@dataclass(frozen=True)
class SeedAverage:
    """One rejector of one entry under one attack in one protocol, averaged over seeds."""

    entry: str
    attack: str
    rejector: str
    protocol: Protocol
    seeds: int
    n: int
    all: Mean  # accuracy on all images
    right: Mean  # accuracy on accepted images
    right_vs_con: Difference
    coverage: Mean
    accepted_wrong: Mean
    auroc: Mean
    auroc_vs_con: Difference


def average_seeds(results: Iterable[TrainingResult]) -> list[SeedAverage]:
    """Average over seeds: one result per entry, attack, rejector, protocol and image count."""
    groups: dict[tuple[str, str, str, Protocol, int], list[tuple[TrainingResult, Row]]] = {}
    for result in results:
        for row in result.rows:  # records of another number of images are not averaged
            key = (result.entry, row.attack, row.rejector, row.protocol, row.point.n)
            groups.setdefault(key, []).append((result, row))
    return [_average(*key, members) for key, members in groups.items()]


def _average(
    entry: str,
    label: str,
    rejector: str,
    protocol: Protocol,
    n: int,
    members: list[tuple[TrainingResult, Row]],
) -> SeedAverage:
    rows = [row for _, row in members]
    accuracy = [result.accuracy[label] for result, _ in members if result.accuracy is not None]
    return SeedAverage(
        entry, label, rejector, protocol, len(rows), n,
        mean_of(accuracy),
        mean_of([row.point.accuracy for row in rows], rows[0].accuracy_interval),
        paired([row.accuracy_vs_con for row in rows]),
        mean_of([row.point.coverage for row in rows], rows[0].coverage_interval),
        mean_of([row.point.accepted_wrong for row in rows], rows[0].accepted_wrong_interval),
        mean_of([row.ranking.auroc for row in rows], rows[0].ranking.auroc_interval),
        paired([row.ranking.auroc_vs_con for row in rows]),
    )  # fmt: skip
