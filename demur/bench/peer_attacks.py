"""Our attacks beside other libraries', on the same weights and images.

    report = compared(source, source.images(AttackOptions()), PAIRS, ground(source), say)

Ours run as `demur attack` runs them: by the fast engine on a GPU, in plain torch on a CPU. Every
verdict is ours, in fp32 on the images that came back; outside the ball nothing is broken.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from demur.balls import Linf
from demur.bench.peer_adapters import Absent, Adapter, PeerSetup, library_of, seeded
from demur.bench.peer_pairs import Distance, Pair
from demur.bench.plain_copy import plain_copy
from demur.bench.timing import wait
from demur.data import Images
from demur.evaluate import Evaluator
from demur.evaluate.attack import VERDICT_BATCH
from demur.evaluate.batching import default_batch_size
from demur.nets import RejectingNet
from demur.output import prediction
from demur.precision import tf32
from demur.report.peer_attacks import OURS
from demur.runs import provenance
from demur.spec import show

ROUNDING = 1e-6  # of a pixel: x + eps is not eps away from x to the last bit
NOTES = (
    "seconds are of the whole call; to prepare is the part of it that a second call does not take, "
    "measured where ours are compiled",
    "on a CPU seconds are the processor's, which other programs on the machine do not change",
    "other libraries get the net with torch's own convolutions, in fp32, its weights held still, "
    "and batches as large as ours; on a GPU torch's defaults round convolutions to TF32",
    "as it comes: in the library's own batches, the weights as free as they are after training",
)


@dataclass(frozen=True)
class AttackResult:
    """What an attack made of all images, judged by us; tensors have one row per image."""

    wrong: Tensor
    broken: Tensor  # wrong, and where the attack has to stay
    outside: Tensor  # left where it has to stay: the pixel range, the ball
    size: Tensor
    seconds: float
    ready_s: float | None


@dataclass(frozen=True)
class PeerRow:
    """One attack of one library, beside ours."""

    attack: str
    by: str
    right: int  # images that are answered rightly under it
    seconds: float
    ready_s: float | None  # the part of the seconds that was spent on compiling
    times_ours: float  # its seconds over ours
    largest: float  # change
    outside: int  # images that left the ball or the pixel range
    differ: int  # verdicts other than under ours
    distance: float | None = None  # mean over the images that both break
    distance_ours: float | None = None  # ours on the same images


def ground(evaluator: Evaluator) -> PeerSetup:
    """The net as others want it, and the radius at which the data is usually attacked."""
    recipe = evaluator.run.recipe
    threat, classes = recipe.data.threat, recipe.data.domain.classes
    net = plain_copy(evaluator.run.net(evaluator.device)).classifier().eval()
    return PeerSetup(net, Linf(threat.linf), threat.linf_step, classes)


def compare_attacks(
    evaluator: Evaluator,
    images: Images,
    pairs: Mapping[str, Pair],
    on: PeerSetup,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The whole report as JSON values."""
    lines: list[PeerRow] = []
    missing: set[str] = set()
    right = ~_wrong(evaluator.net, images)
    for name, pair in pairs.items():
        peer_evaluator = PeerEvaluator(evaluator.net, images, right, on.ball, pair.distance)
        say(f"{name}: ours")
        ours = peer_evaluator.made(*_by_us(evaluator, images, pair, on))
        lines.append(_line(name, OURS, ours, ours, peer_evaluator))
        for peer, adapter in pair.peers.items():
            say(f"{name}: {peer}")
            try:
                theirs = peer_evaluator.made(*_by_them(adapter, images, on))
            except Absent:
                missing.add(library_of(peer))
                continue
            lines.append(_line(name, peer, theirs, ours, peer_evaluator))
    return {
        **_about(evaluator, images, on, int(right.sum())),
        "specs": {name: show(pair.ours(on)) for name, pair in pairs.items()},
        "libraries": {library: version(library) for library in _libraries(lines)},
        "missing": [_absence(name) for name in sorted(missing)],
        "notes": list(NOTES),
        "lines": [asdict(line) for line in lines],
    }


def _about(evaluator: Evaluator, images: Images, on: PeerSetup, right: int) -> dict[str, Any]:
    return {
        "run": evaluator.run.name,
        "recipe": show(evaluator.run.recipe, full=True),
        "weights": evaluator.run.checkpoint["weights"],
        "data": images.digest(),
        "machine": provenance(evaluator.device),
        "engine": "fast" if evaluator.fast else "plain",
        "precision": evaluator.precision,
        "batch_size": default_batch_size(len(images), evaluator.device),
        "ball": show(on.ball),
        "n": len(images),
        "right_unattacked": right,
    }


def _libraries(lines: list[PeerRow]) -> list[str]:
    """Whose attacks ran beside ours."""
    return list(dict.fromkeys(library_of(line.by) for line in lines if line.by != OURS))


def _absence(name: str) -> str:
    words = {"torchattacks": "--no-deps torchattacks"}  # it asks for old versions of others
    return f"{name} is left out, it is not installed: pip install {words.get(name, name)}"


def _by_us(
    evaluator: Evaluator, images: Images, pair: Pair, on: PeerSetup
) -> tuple[Tensor, float, float | None]:
    """Our images, the seconds they took, and how many of those a second time would save."""
    engine = "fast" if evaluator.fast else "plain"
    fresh = Evaluator(evaluator.run, evaluator.device, engine=engine, say=evaluator.say)
    _ = fresh.net  # read before the clock starts; compiled after
    attack, size = pair.ours(on), default_batch_size(len(images), evaluator.device)

    def craft() -> Tensor:
        return torch.cat(
            [fresh.craft(attack, images, piece, size) for piece in images.slices(size)]
        )

    x_adv, seconds = _timed(craft, evaluator.device)
    if not evaluator.fast:
        return x_adv, seconds, None
    return x_adv, seconds, max(0.0, seconds - _timed(craft, evaluator.device)[1])


def _by_them(adapter: Adapter, images: Images, on: PeerSetup) -> tuple[Tensor, float, None]:
    """Their images, and the seconds they took."""
    craft, device = adapter(on), images.y.device
    x, y = images.batch(slice(None))
    with seeded(device):
        made = _timed(lambda: craft(x, y, default_batch_size(len(images), device)), device)
    return *made, None


def _timed(craft: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    wait(device)
    began = clock()
    x_adv = craft()
    wait(device)
    return x_adv, clock() - began


@dataclass(frozen=True)
class PeerEvaluator:
    """Whoever says what is broken, the same for all."""

    net: RejectingNet
    images: Images
    right: Tensor  # unattacked
    ball: Linf
    distance: Distance | None

    def made(self, x_adv: Tensor, seconds: float, ready_s: float | None) -> AttackResult:
        """Verdicts and sizes of what an attack made."""
        delta = x_adv - self.images.batch(slice(None))[0]
        far = self.ball.size(delta) > self.ball.eps + ROUNDING
        outside = ((x_adv < -ROUNDING) | (x_adv > 1 + ROUNDING)).flatten(1).any(1)
        if self.distance is None:
            outside |= far
        wrong = _wrong(self.net, self.images, x_adv)
        lost = outside if self.distance == "squared L2" else outside | far
        return AttackResult(
            wrong, torch.where(lost, ~self.right, wrong), outside, self._size(delta),
            seconds, ready_s,
        )  # fmt: skip

    def distances(
        self, theirs: AttackResult, ours: AttackResult
    ) -> tuple[float, float] | tuple[None, None]:
        """Mean distances, theirs and ours, of the images that both make wrong."""
        both = theirs.wrong & ours.wrong & ~theirs.outside & ~ours.outside & self.right
        if self.distance is None or not both.any():
            return None, None
        return float(theirs.size[both].mean()), float(ours.size[both].mean())

    def _size(self, delta: Tensor) -> Tensor:
        """How large each change is, in the norm that the attack is about."""
        flat = delta.flatten(1)
        return flat.square().sum(1) if self.distance == "squared L2" else flat.abs().amax(1)


def _line(
    name: str, by: str, made: AttackResult, ours: AttackResult, peer_evaluator: PeerEvaluator
) -> PeerRow:
    distance, beside = peer_evaluator.distances(made, ours)
    return PeerRow(
        name, by, int((~made.broken).sum()), made.seconds, made.ready_s,
        made.seconds / ours.seconds, float(made.size.max()), int(made.outside.sum()),
        int((made.broken != ours.broken).sum()), distance, beside,
    )  # fmt: skip


def _wrong(net: RejectingNet, images: Images, x_adv: Tensor | None = None) -> Tensor:
    """Which images the net answers wrongly, in fp32."""
    x, y = images.batch(slice(None))
    batches = (x if x_adv is None else x_adv).split(VERDICT_BATCH)
    with torch.no_grad(), tf32("fp32"):
        return torch.cat([prediction(net(batch)) for batch in batches]) != y
