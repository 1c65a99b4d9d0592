"""The runs behind tables and figures: what is needed, what is stored, what must be computed.

    failures = compute(needs, Path("runs"), steps, on_job)      # by net: train, then every attack
    stored = StoredRuns(Path("runs"), open_run, print)
    stored.record(stored.find(recipe)[0], attack)

Finished runs and records are not computed again, so the same call resumes after a stop. A training
that fails is reported, and the other nets are computed.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from demur import evaluate, metrics
from demur.attacks import Attack, Corruption, MultiTarget
from demur.attacks.corruption import image_severities
from demur.cli import evaluate as cli_evaluate
from demur.cli.listing import RUNS
from demur.cli.progress import on_message
from demur.cli.train import train_run
from demur.data.corruptions import SEVERITIES
from demur.errors import BadInput, Diverged
from demur.evaluate import ArchiveKeepsLess, LoadedRun, RecordOptions
from demur.metrics import FloatArray
from demur.metrics.checks import IntArray
from demur.paper import check_archive_folder
from demur.paper.scales import ALL_IMAGES, find_field
from demur.recipes import VOCABULARY, Recipe, attack
from demur.runs import Record, Run, run_folder
from demur.runs.metadata import RECORD, read_metadata
from demur.runs.record import REMEDY, record_path
from demur.spec import digest, read

RECORD_COST = 50  # of clean outputs, thresholds and files, in gradient queries
RUNS_IN_MEMORY = 4
PER_IMAGE = ("y", "index", "size_linf", "size_l2", "logits", "aux", "feature", "correct")
Open = Callable[[Run], LoadedRun]


class Need(NamedTuple):
    """An attack on a net that a table or a figure is made from."""

    net: str  # the beginning of the name of a new run folder
    recipe: Recipe
    attack: str
    options: RecordOptions


@dataclass(frozen=True)
class RunSteps:
    """Functions that train a recipe, open a run and attack it.

    `keep` stores an evaluated run with the named scores, for example as an archive.
    """

    train: Callable[[Recipe, Path], Run]
    open: Open
    craft: Callable[[LoadedRun, str, Attack, RecordOptions], Record]
    keep: Callable[[LoadedRun, Sequence[str]], object] = lambda loaded, scores: None


@dataclass(frozen=True)
class Net:
    """A net with the attacks that are needed of it."""

    folder: Path
    recipe: Recipe
    needs: tuple[Need, ...]


class Failure(NamedTuple):
    """A net that could not be computed, and why."""

    net: Net
    error: BadInput


@dataclass(frozen=True)
class Job:
    """A training or an attack that begins, and how far the computation has come."""

    name: str  # "train" or the attack
    run: str
    number: int  # from 1
    count: int
    seconds_left: float | None  # None before there is an estimate


def compute(
    needs: Iterable[Need],
    home: Path,
    steps: RunSteps,
    on_job: Callable[[Job], None],
    last_epoch: bool = False,
) -> list[Failure]:
    """Train and attack what is missing.

    Args:
        needs: Attacks on nets; several may be the same. A base comes before what is built on it.
        home: Folder of the run folders.
        steps: Functions that train and attack.
        on_job: Function that is called with each job before it begins.
        last_epoch: Attack the last epoch too, where an earlier one was selected.

    Returns:
        The nets that could not be computed; empty if all were.
    """
    nets = nets_of(needs, home)
    jobs, failures = JobClock(nets, on_job), list[Failure]()
    diverged: dict[str | None, str] = {}  # nets by folder name
    for net in nets:
        try:
            if net.recipe.base in diverged:
                raise Diverged(f"its base {diverged[net.recipe.base]} diverged")
            _compute_net(net, steps, jobs, last_epoch)
        except BadInput as error:
            failures.append(Failure(net, error))
            if isinstance(error, Diverged):
                diverged[net.folder.name] = net.needs[0].net
    return failures


def nets_of(needs: Iterable[Need], home: Path) -> list[Net]:
    """The nets that are needed, each with its attacks once, in the order of first use.

    A stored run of the same recipe is used, except for a base, which is found by its name.
    """
    by_recipe: dict[str, dict[str, Need]] = {}
    for need in needs:
        attacks = by_recipe.setdefault(digest(need.recipe), {})
        known = attacks.get(need.attack, need)
        attacks[need.attack] = need._replace(options=_covering(known.options, need.options))
    stored, nets = _folders_by_recipe(home), list[Net]()
    bases = {need.recipe.base for attacks in by_recipe.values() for need in attacks.values()}
    for key, attacks in by_recipe.items():
        first = next(iter(attacks.values()))
        folder = run_folder(first.net, first.recipe, changed=True, home=home)
        if folder.name not in bases:
            folder = stored.get(key, folder)
        nets.append(Net(folder, first.recipe, tuple(attacks.values())))
    return nets


def _covering(one: RecordOptions, other: RecordOptions) -> RecordOptions:
    """Options of a record that suffices for both."""
    n = None if one.n is None or other.n is None else max(one.n, other.n)
    return replace(other, n=n, keep_features=one.keep_features or other.keep_features)


def _folders_by_recipe(home: Path) -> dict[str, Path]:
    """The runs with weights in a folder, by the digest of their recipes."""
    found: dict[str, Path] = {}
    for path in sorted(home.glob("[!.]*/recipe.txt")):
        run = Run(path.parent)
        with suppress(BadInput):  # a damaged run is reported where it is needed
            if run.has_weights:
                found.setdefault(str(run.checkpoint["recipe_digest"]), run.path)
    return found


def _compute_net(net: Net, steps: RunSteps, jobs: "JobClock", last_epoch: bool) -> None:
    """Train a net and attack it."""
    run = Run(net.folder)
    if not run.has_weights:
        with jobs.training(run):
            steps.train(net.recipe, net.folder)
    last = Run(net.folder / "last")
    for part in (run, last) if last_epoch and last.has_weights else (run,):
        missing = missing_attacks(part, net.needs)
        jobs.add(part, missing)
        loaded = steps.open(part) if missing else None
        for need in missing:
            assert loaded is not None
            with jobs.attack(part, need):
                spec = attack(need.attack, part.recipe)
                steps.craft(loaded, need.attack, spec, need.options)


def missing_attacks(run: Run, needs: Sequence[Need]) -> list[Need]:
    """The attacks that a run has no record of, or only one of fewer images or without features.

    Attacks on all images are among them; an existing record is read when it is asked for.
    """
    if not run.has_weights:
        return list(needs)
    weights, found = run.checkpoint["weights"], dict[str, list[tuple[int, bool]]]()
    for path in run.records_folder.glob("*-test-*.json"):
        record = read_metadata(path, RECORD, REMEDY)
        if record["weights"] == weights:
            size = (int(record["n"]), bool(record["features"]))
            found.setdefault(str(record["attack"]), []).append(size)
    return [
        need
        for need in needs
        if need.options.n is None
        or not any(
            n >= need.options.n and features >= need.options.keep_features
            for n, features in found.get(digest(attack(need.attack, run.recipe)), ())
        )
    ]


class JobClock:
    """Counts jobs and estimates the time left from the mean times of trainings and attacks."""

    def __init__(self, nets: Sequence[Net], on_job: Callable[[Job], None]) -> None:
        self.on_job, self.begun = on_job, 0
        self.trained, self.training_seconds, self.worked, self.attack_seconds = 0, 0.0, 0.0, 0.0
        self.to_train = sum(not Run(net.folder).has_weights for net in nets)
        self.count = self.to_train
        self.to_attack: dict[tuple[Path, str], float] = {}  # work by run and attack
        for net in nets:
            run = Run(net.folder)
            self.add(run, missing_attacks(run, net.needs))

    def add(self, run: Run, needs: Sequence[Need]) -> None:
        """Add attacks that are not counted yet, such as those on a last epoch after training."""
        new = {(run.path, need.attack): _work(need) for need in needs}
        self.count += len(new.keys() - self.to_attack.keys())
        self.to_attack |= new

    @contextmanager
    def training(self, run: Run) -> Iterator[None]:
        """Time a training."""
        self._begin("train", run)
        start = time.monotonic()
        yield
        self.training_seconds += time.monotonic() - start
        self.trained, self.to_train = self.trained + 1, self.to_train - 1

    @contextmanager
    def attack(self, run: Run, need: Need) -> Iterator[None]:
        """Time an attack."""
        self._begin(need.attack, run)
        start = time.monotonic()
        yield
        self.attack_seconds += time.monotonic() - start
        self.worked += self.to_attack.pop((run.path, need.attack))

    @property
    def seconds_left(self) -> float | None:
        """None if there was no training or no attack yet to estimate from."""
        if (self.to_train and not self.trained) or (self.to_attack and not self.worked):
            return None
        each = self.training_seconds / self.trained if self.trained else 0.0
        rate = self.attack_seconds / self.worked if self.worked else 0.0
        return self.to_train * each + sum(self.to_attack.values()) * rate

    def _begin(self, name: str, run: Run) -> None:
        self.begun += 1
        # the run in `last` is named after the run that it belongs to
        shown = f"{run.path.parent.name}/last" if run.name == "last" else run.name
        self.on_job(Job(name, shown, self.begun, self.count, self.seconds_left))


def _work(need: Need) -> float:
    """The cost of an attack: images times gradient queries of each, and some for the record."""
    spec: Attack = attack(need.attack, need.recipe)
    queries = 1
    for field in ("steps", "restarts", "searches"):
        queries *= find_field(spec, field) or 1
    if isinstance(spec, MultiTarget):
        queries *= need.recipe.data.domain.classes - 1
    return (need.options.n or ALL_IMAGES) * (queries + RECORD_COST)


class StoredRuns:
    """The index of the runs under a folder by their recipes, and of their records by attack.

    Runs with an unreadable recipe are skipped and reported; hidden folders are unfinished archives.

    Raises:
        BadInput: The folder does not exist or contains no run, and `required` is true.
    """

    def __init__(
        self, folder: Path, open_run: Open, on_message: Callable[[str], None], required: bool = True
    ) -> None:
        if required and not folder.is_dir():
            raise BadInput(
                f"there is no folder {folder}; name one that contains runs, such as results"
            )
        self.folder, self.open_run = folder, open_run
        self.runs: dict[str, list[Run]] = {}
        for path in sorted(folder.rglob("recipe.txt")):
            if any(part.startswith(".") for part in path.relative_to(folder).parts):
                continue
            try:
                run = Run(path.parent)
                key = digest(run.recipe)
                if run.trained:
                    self.runs.setdefault(key, []).append(run)
            except BadInput as reason:
                on_message(f"{path.parent} is skipped: {reason}")
        if required and not self.runs:
            raise BadInput(f"{folder} holds no run; name a folder of runs, such as results")
        self.records = lru_cache(RUNS_IN_MEMORY)(_records_by_attack)

    def find(self, recipe: Recipe) -> list[Run]:
        """The runs of a recipe, in the order of their paths."""
        return self.runs.get(digest(recipe), [])

    def record(self, run: Run, spec: Attack, split: str = "test") -> Record | None:
        """The record of an attack on the most images of a split, whatever its label.

        For a corruption of mixed severities this is, if there are, five records of one each.
        """
        if isinstance(spec, Corruption) and spec.severity is None:
            found = (self.record(run, replace(spec, severity=one), split) for one in SEVERITIES)
            parts = [record for record in found if record is not None]
            if len(parts) == len(SEVERITIES):
                return pool_severities(parts)
        return max(
            self.records(run.path, split).get(digest(spec), ()),
            key=lambda record: (len(record.y), record.metadata["features"]),
            default=None,
        )


def _records_by_attack(path: Path, split: str) -> Mapping[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in Run(path).records(split):
        found.setdefault(record.metadata["attack"], []).append(record)
    return found


@dataclass(frozen=True)
class RunSource:
    """Where runs come from: read from a folder, or computed into `runs` and archived if asked."""

    read_from: str | None
    device: str
    data: str | None
    engine: str
    runs: str = RUNS
    archive: str | None = None

    def __post_init__(self) -> None:
        if self.read_from is None:
            check_archive_folder(self.runs)
        elif not self.read_from.strip():
            raise BadInput("the name of the folder to read is empty; name a folder of runs")
        elif self.runs != RUNS:
            raise BadInput("--from only reads runs, and --runs is for new ones; leave out one")
        elif self.archive:
            raise BadInput("--from only reads runs, and --archive copies new ones; leave out one")
        if self.archive and Path(self.archive).resolve() == Path(self.runs).resolve():
            raise BadInput(
                f"{self.archive} holds the runs themselves; name another folder for archives"
            )

    @property
    def folder(self) -> Path:
        """The folder of the runs to read."""
        return Path(self.runs if self.read_from is None else self.read_from)

    def open_run(self, run: Run) -> LoadedRun:
        """Open a run for evaluation."""
        return cli_evaluate.load_run(str(run.path), self.device, self.data, self.engine)

    def compute(self, needs: Iterable[Need], last_epoch: bool = False) -> list[Failure]:
        """Train and attack what is missing, unless runs are only read; return what failed."""
        if self.read_from is not None:
            return []
        return compute(needs, Path(self.runs), self.steps(), _show_job, last_epoch)

    def stored(self, required: bool = True) -> StoredRuns:
        """The index of the runs to read."""
        return StoredRuns(self.folder, self.open_run, on_message, required)

    def steps(self) -> RunSteps:
        """Functions that train and attack with progress bars, and archive if asked to."""

        def keep(loaded: LoadedRun, scores: Sequence[str]) -> None:
            if self.archive:
                target = Path(self.archive) / loaded.run.name
                evaluate.archive(loaded, target, scores, again=True)

        def craft(loaded: LoadedRun, label: str, spec: Attack, options: RecordOptions) -> Record:
            record = cli_evaluate.attack_and_report(loaded, label, spec, options)
            head_score, _ = loaded.run.recipe.head_rejector
            copies = Path(self.archive or "") / loaded.run.name / "records"
            stored = record_path(copies, record.label, options.split, record.digest).exists()
            if self.archive and not stored:
                # After every attack, so that a stop loses one attack at most. An earlier archive
                # may hold more scores than this one.
                with suppress(ArchiveKeepsLess):
                    keep(loaded, [head_score])
            return record

        data = Path(self.data) if self.data else None
        return RunSteps(
            train=lambda recipe, folder: train_run(recipe, folder, self.device, data, self.engine),
            open=self.open_run,
            craft=craft,
            keep=keep,
        )


def _show_job(job: Job) -> None:
    left = "" if job.seconds_left is None else f", {_duration(job.seconds_left)} left"
    on_message(f"{job.number} of {job.count}{left}: {job.name}, {job.run}")


def _duration(seconds: float) -> str:
    """Seconds in words: 40 s, 12 min or 3.5 h."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def pool_severities(records: Sequence[Record]) -> Record:
    """One record of the images of several severities; its metadata are those of the first.

    The reference code chooses one threshold for the images of all severities; the paper speaks of
    a mean over severities, see `accuracy_by_severity`.

    Raises BadInput if they hold different scores.
    """
    first = records[0]
    if any(record.metadata.get("scores") != first.metadata.get("scores") for record in records):
        raise BadInput(f"the records of {first.label} hold different scores; archive them together")
    every = [record.arrays for record in records]
    arrays = {
        name: torch.cat([arrays[name] for arrays in every])
        for name in PER_IMAGE
        if all(name in arrays for arrays in every)
    }
    if "scores" in first.arrays:
        arrays["scores"] = torch.cat([one["scores"] for one in every], 1)
    arrays["severity"] = torch.cat([torch.from_numpy(severities(record)) for record in records])
    return Record(arrays, first.metadata)


def severities(record: Record) -> IntArray:
    """Severity of each image of a record of a corruption, N; BadInput for another attack."""
    if "severity" in record.arrays:
        found: IntArray = record.arrays["severity"].numpy()
        return found
    spec = read(str(record.metadata["spec"]), VOCABULARY)
    if not isinstance(spec, Corruption):
        raise BadInput(f"{record.label} is no corruption and has no severities")
    return image_severities(spec, record.arrays["index"].numpy())


def accuracy_by_severity(score: FloatArray, record: Record, level: float) -> float:
    """Accuracy of accepted images with a threshold for each severity, as a mean over severities."""
    of_image, correct = severities(record), record.correct
    parts = [of_image == severity for severity in np.unique(of_image)]
    return float(
        np.mean([metrics.paper_stats(score[p], correct[p], level).accuracy for p in parts])
    )
