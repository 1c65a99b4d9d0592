"""Compute what tables and figures of the paper need: by net, train once, then run every attack.

    failures = compute(needs(tables, "smoke"), "smoke", Path("runs"), factories, on_job)

Finished runs and records are not computed again, so the same call resumes after a stop. A training
that fails is reported, and the other nets are computed.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from demur.attacks import Attack, MultiTarget
from demur.errors import BadInput, Diverged
from demur.evaluate import RecordOptions
from demur.paper.cells import Need
from demur.paper.measure import Factories
from demur.paper.scales import find_field
from demur.recipes import Recipe, attack
from demur.runs import Run, run_folder
from demur.runs.metadata import RECORD, read_metadata
from demur.runs.record import REMEDY
from demur.spec import digest

RECORD_COST = 50  # of clean outputs, thresholds and files, in gradient queries


@dataclass(frozen=True)
class Net:
    """A net with the attacks that are needed of it."""

    folder: Path
    recipe: Recipe
    needs: tuple[Need, ...]


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
    scale: str,
    home: Path,
    factories: Factories,
    on_job: Callable[[Job], None],
    last_epoch: bool = True,
) -> list[str]:
    """Train and attack what is missing.

    Args:
        needs: Attacks on nets; several may be the same.
        scale: Name of the scale, the first part of the names of new run folders.
        home: Folder of the run folders.
        factories: Functions that train and attack.
        on_job: Function that is called with each job before it begins.
        last_epoch: Attack the last epoch too, where an earlier one was selected.

    Returns:
        Why some nets could not be computed; empty if all were.
    """
    nets = nets_of(needs, scale, home)
    jobs, failures = JobClock(nets, on_job), []
    for net in nets:
        try:
            _compute_net(net, factories, jobs, last_epoch)
        except (BadInput, Diverged) as reason:
            failures.append(f"{net.folder.name}: {reason}")
    return failures


def nets_of(needs: Iterable[Need], scale: str, home: Path) -> list[Net]:
    """The nets that are needed, each with its attacks once, in the order of first use."""
    by_recipe: dict[str, dict[str, Need]] = {}
    for need in needs:
        attacks = by_recipe.setdefault(digest(need.recipe), {})
        known = attacks.get(need.attack, need)
        attacks[need.attack] = need._replace(
            images=max(known.images, need.images), features=known.features or need.features
        )
    stored = _folders_by_recipe(home)
    nets = []
    for key, attacks in by_recipe.items():
        first = next(iter(attacks.values()))
        folder = run_folder(f"{scale}-{first.entry}", first.recipe, changed=True, home=home)
        nets.append(Net(stored.get(key, folder), first.recipe, tuple(attacks.values())))
    return nets


def _folders_by_recipe(home: Path) -> dict[str, Path]:
    """The runs with weights in a folder, by the digest of their recipes."""
    found: dict[str, Path] = {}
    for path in sorted(home.glob("[!.]*/recipe.txt")):
        run = Run(path.parent)
        if run.has_weights:
            found.setdefault(str(run.checkpoint["recipe_digest"]), run.path)
    return found


def _compute_net(net: Net, factories: Factories, jobs: "JobClock", last_epoch: bool) -> None:
    """Train a net and attack it."""
    run = Run(net.folder)
    if not run.has_weights:
        with jobs.training(run):
            factories.train(net.recipe, net.folder)
    last = Run(net.folder / "last")
    for part in (run, last) if last_epoch and last.has_weights else (run,):
        missing = missing_attacks(part, net.needs)
        jobs.add(part, missing)
        loaded = factories.open(part) if missing else None
        for need in missing:
            assert loaded is not None
            options = RecordOptions("test", need.images, keep_images=0, keep_features=need.features)
            with jobs.attack(part, need):
                spec = attack(need.attack, part.recipe)
                factories.craft(loaded, need.attack, spec, options)


def missing_attacks(run: Run, needs: Sequence[Need]) -> list[Need]:
    """The attacks that a run has no record of, or only one of fewer images or without features."""
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
        if not any(
            n >= need.images and features >= need.features
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
    return need.images * (queries + RECORD_COST)
