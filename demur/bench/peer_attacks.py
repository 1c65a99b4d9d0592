"""Peer comparison: demur's attacks beside other libraries', on the same weights and images.

    images = loaded.images(RecordOptions())
    report = compare_attacks(loaded, images, PAIRS, ground(loaded), say)

demur's attacks run as in `demur attack`: with the fast engine on a GPU, in plain torch on a CPU.
demur evaluates all adversarial examples in fp32; those outside the ball do not count as broken.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from demur.balls import Linf
from demur.bench.peer_adapters import Adapter, LibraryMissing, PeerSetup, library_of, seeded
from demur.bench.peer_pairs import Distance, Pair
from demur.bench.plain_copy import plain_copy
from demur.bench.timing import wait
from demur.data import Images
from demur.evaluate import LoadedRun
from demur.evaluate.attack import VERDICT_BATCH
from demur.evaluate.batching import default_batch_size
from demur.nets import RejectingNet
from demur.output import prediction
from demur.precision import tf32
from demur.report.peer_attacks import OURS
from demur.runs import provenance
from demur.spec import show

ROUNDING = 1e-6  # slack for (x + eps) - x, which is not exactly eps
NOTES = (
    "seconds are for the whole call; 'to prepare' is the part that a second call saves, measured "
    "only for compiled attacks",
    "on a CPU, seconds are processor time, which other programs on the machine do not change",
    "other libraries get the net with torch's own convolutions, in fp32, with frozen weights and "
    "demur's batch size; on a GPU torch's defaults round convolutions to TF32",
    "as it comes: with the library's own batch size and weights that require gradients",
)


@dataclass(frozen=True)
class AttackResult:
    """An attack on all images, evaluated by demur; tensors have shape N."""

    wrong: Tensor  # misclassified
    broken: Tensor  # misclassified within the constraints
    outside: Tensor  # outside the pixel range or the ball
    size: Tensor  # norm of the perturbation
    seconds: float
    ready_s: float | None  # seconds that a second call saves


@dataclass(frozen=True)
class PeerRow:
    """One row of the report: one attack of one library, compared with demur's."""

    attack: str
    by: str
    right: int  # images still classified correctly
    seconds: float
    ready_s: float | None  # the part of `seconds` spent on compilation
    times_ours: float  # its seconds / demur's seconds
    largest: float  # norm of the largest perturbation
    outside: int  # images outside the ball or the pixel range
    differ: int  # images broken by only one of the two attacks
    distance: float | None = None  # mean over the images that both break
    distance_ours: float | None = None  # demur's mean on the same images


def peer_setup(loaded: LoadedRun) -> PeerSetup:
    """The setup of a peer comparison: a plain copy of the net and the data set's usual radius."""
    recipe = loaded.run.recipe
    threat, classes = recipe.data.threat, recipe.data.domain.classes
    net = plain_copy(loaded.run.net(loaded.device)).classifier().eval()
    return PeerSetup(net, Linf(threat.linf), threat.linf_step, classes)


def compare_attacks(
    loaded: LoadedRun,
    images: Images,
    pairs: Mapping[str, Pair],
    setup: PeerSetup,
    on_message: Callable[[str], None],
) -> dict[str, Any]:
    """Run every pair; return the report as JSON values.

    Libraries that are not installed are skipped and named in the report.
    """
    rows: list[PeerRow] = []
    missing: set[str] = set()
    correct = ~_misclassified(loaded.net, images)
    for name, pair in pairs.items():
        peer_evaluator = PeerEvaluator(loaded.net, images, correct, setup.ball, pair.distance)
        on_message(f"{name}: demur")
        ours = peer_evaluator.evaluate(*_run_ours(loaded, images, pair, setup))
        rows.append(_row(name, OURS, ours, ours, peer_evaluator))
        for peer, adapter in pair.peers.items():
            on_message(f"{name}: {peer}")
            try:
                theirs = peer_evaluator.evaluate(*_run_peer(adapter, images, setup))
            except LibraryMissing:
                missing.add(library_of(peer))
                continue
            rows.append(_row(name, peer, theirs, ours, peer_evaluator))
    return {
        **_header(loaded, images, setup, int(correct.sum())),
        "specs": {name: show(pair.ours(setup)) for name, pair in pairs.items()},
        "libraries": {library: version(library) for library in _libraries(rows)},
        "missing": [_missing_note(name) for name in sorted(missing)],
        "notes": list(NOTES),
        "lines": [asdict(row) for row in rows],
    }


def _header(loaded: LoadedRun, images: Images, setup: PeerSetup, correct: int) -> dict[str, Any]:
    return {
        "run": loaded.run.name,
        "recipe": show(loaded.run.recipe, full=True),
        "weights": loaded.run.checkpoint["weights"],
        "data": images.digest(),
        "machine": provenance(loaded.device),
        "engine": "fast" if loaded.fast else "plain",
        "precision": loaded.precision,
        "batch_size": default_batch_size(len(images), loaded.device),
        "ball": show(setup.ball),
        "n": len(images),
        "right_unattacked": correct,
    }


def _libraries(rows: list[PeerRow]) -> list[str]:
    """The other libraries of the rows."""
    return list(dict.fromkeys(library_of(row.by) for row in rows if row.by != OURS))


def _missing_note(name: str) -> str:
    options = {"torchattacks": "--no-deps torchattacks"}  # its dependencies pin old versions
    return f"{name} is not installed and left out: pip install {options.get(name, name)}"


def _run_ours(
    loaded: LoadedRun, images: Images, pair: Pair, setup: PeerSetup
) -> tuple[Tensor, float, float | None]:
    """Run demur's attack: adversarial examples, seconds, and seconds that a second call saves."""
    engine = "fast" if loaded.fast else "plain"
    fresh = LoadedRun(loaded.run, loaded.device, engine=engine, on_message=loaded.on_message)
    _ = fresh.net  # load the weights before timing; compilation is timed
    attack, size = pair.ours(setup), default_batch_size(len(images), loaded.device)

    def craft() -> Tensor:
        return torch.cat([fresh.craft(attack, images, rows, size) for rows in images.slices(size)])

    x_adv, seconds = _time(craft, loaded.device)
    if not loaded.fast:
        return x_adv, seconds, None
    return x_adv, seconds, max(0.0, seconds - _time(craft, loaded.device)[1])


def _run_peer(adapter: Adapter, images: Images, setup: PeerSetup) -> tuple[Tensor, float, None]:
    """Run a peer's attack: adversarial examples and seconds."""
    craft, device = adapter(setup), images.y.device
    x, y = images.batch(slice(None))
    with seeded(device):
        timed = _time(lambda: craft(x, y, default_batch_size(len(images), device)), device)
    return *timed, None


def _time(craft: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    """The adversarial examples and the seconds (processor time on a CPU)."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    wait(device)
    start = clock()
    x_adv = craft()
    wait(device)
    return x_adv, clock() - start


@dataclass(frozen=True)
class PeerEvaluator:
    """Evaluates the adversarial examples of all attacks by the same rules."""

    net: RejectingNet
    images: Images
    correct: Tensor  # N, classified correctly without an attack
    ball: Linf
    distance: Distance | None

    def evaluate(self, x_adv: Tensor, seconds: float, ready_s: float | None) -> AttackResult:
        """Predictions and perturbation norms of adversarial examples."""
        delta = x_adv - self.images.batch(slice(None))[0]
        far = self.ball.norm(delta) > self.ball.eps + ROUNDING
        outside = ((x_adv < -ROUNDING) | (x_adv > 1 + ROUNDING)).flatten(1).any(1)
        if self.distance is None:
            outside |= far
        wrong = _misclassified(self.net, self.images, x_adv)
        invalid = outside if self.distance == "squared L2" else outside | far
        return AttackResult(
            wrong, torch.where(invalid, ~self.correct, wrong), outside, self._size(delta),
            seconds, ready_s,
        )  # fmt: skip

    def distances(
        self, theirs: AttackResult, ours: AttackResult
    ) -> tuple[float, float] | tuple[None, None]:
        """Mean distances, theirs and ours, over the images that both attacks break."""
        both = theirs.wrong & ours.wrong & ~theirs.outside & ~ours.outside & self.correct
        if self.distance is None or not both.any():
            return None, None
        return float(theirs.size[both].mean()), float(ours.size[both].mean())

    def _size(self, delta: Tensor) -> Tensor:
        """The norm of each perturbation that the attack minimises, Linf by default; N."""
        flat = delta.flatten(1)
        return flat.square().sum(1) if self.distance == "squared L2" else flat.abs().amax(1)


def _row(
    name: str, by: str, result: AttackResult, ours: AttackResult, peer_evaluator: PeerEvaluator
) -> PeerRow:
    distance, distance_ours = peer_evaluator.distances(result, ours)
    return PeerRow(
        name, by, int((~result.broken).sum()), result.seconds, result.ready_s,
        result.seconds / ours.seconds, float(result.size.max()), int(result.outside.sum()),
        int((result.broken != ours.broken).sum()), distance, distance_ours,
    )  # fmt: skip


def _misclassified(net: RejectingNet, images: Images, x_adv: Tensor | None = None) -> Tensor:
    """Which images, or their adversarial examples, the net misclassifies in fp32; N, bool."""
    x, y = images.batch(slice(None))
    batches = (x if x_adv is None else x_adv).split(VERDICT_BATCH)
    with torch.no_grad(), tf32("fp32"):
        return torch.cat([prediction(net(batch)) for batch in batches]) != y
