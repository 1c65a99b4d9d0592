"""Peer comparison: demur's attacks beside other libraries', on the same weights and images.

    python benchmarks/peer_attacks.py RUN --only autoattack,cw-l2 -o attacks.json

demur's attacks run as in `demur attack`: with the fast engine on a GPU, in plain torch on a CPU.
demur evaluates all adversarial examples in fp32; those outside the ball do not count as broken.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table
from torch import Tensor

from demur.attacks.balls import Linf
from demur.cli.app import AsJson, DataFolder, Device, FirstN, main, split_names
from demur.cli.evaluate import RunName, load_run
from demur.cli.progress import on_message
from demur.data import Images
from demur.evaluate import LoadedRun, RecordOptions
from demur.evaluate.recording import VERDICT_BATCH
from demur.evaluate.resumable_batches import default_batch_size
from demur.nets import RejectingNet
from demur.numerics import tf32
from demur.output import prediction
from demur.report.terminal import show_table, terminal
from demur.runs import provenance
from demur.spec import show
from peer_adapters import (
    Adapter,
    Distance,
    LibraryMissing,
    Pair,
    PeerSetup,
    library_of,
    pairs_by_name,
    plain_copy,
    seeded,
)
from reports import OutFile, print_report
from timing import wait

COLUMNS = ("attack", "by", "correct", "other verdicts", "s", "to prepare", "times ours",
           "largest change", "distance", "ours there")  # fmt: skip
OURS = "demur"
MAX_EXTRA = 1  # images that ours may leave correct beyond a peer's, by chance
MAX_RATIO = 1.02  # of our distance to a peer's
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


def cells(line: dict[str, Any]) -> tuple[str, ...]:
    """Format one line of the report; missing values are empty."""
    ready, left = line["ready_s"], line["outside"]
    versus_ours = ("", "", "")
    if line["by"] != OURS:
        versus_ours = (
            str(line["differ"]),
            f"{line['times_ours']:.2f}",
            _format_distance(line["distance_ours"]),
        )
    return (
        line["attack"], line["by"], str(line["right"]), versus_ours[0], f"{line['seconds']:.1f}",
        "" if ready is None else f"{ready:.1f}", versus_ours[1],
        _format_distance(line["largest"]) + (f", {left} outside" if left else ""),
        _format_distance(line["distance"]),
        versus_ours[2],
    )  # fmt: skip


def weaker(report: dict[str, Any]) -> list[str]:
    """Return where our attack leaves more images correct than a peer's, or needs larger changes."""
    found = []
    ours = {line["attack"]: line for line in report["lines"] if line["by"] == OURS}
    for line in report["lines"]:
        more = ours[line["attack"]]["right"] - line["right"]
        if more > MAX_EXTRA:
            found.append(f"{line['attack']} leaves {more} more images correct than {line['by']}'s")
        if line["distance"] is not None and line["distance_ours"] > MAX_RATIO * line["distance"]:
            further = 100 * (line["distance_ours"] / line["distance"] - 1)
            found.append(
                f"{line['attack']} needs changes {further:.1f}% larger than {line['by']}'s"
            )
    return found


def sentences(report: dict[str, Any]) -> list[str]:
    """Return the comparison in words, missing libraries and notes."""
    verdict = "; ".join(weaker(report)) or (
        f"none of our attacks leaves more than {MAX_EXTRA} more image correct than a peer's, or "
        f"needs changes more than {100 * (MAX_RATIO - 1):.0f}% larger"
    )
    return [verdict, *report["missing"], *report["notes"]]


def show_peer_attacks(report: dict[str, Any]) -> None:
    """Print the report as a table and sentences."""
    machine = report["machine"]
    table = Table(
        box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0),
        title=f"{report['run']}, {report['ball']}, {report['right_unattacked']} of {report['n']} "
        f"correct unattacked; {machine['device']}, torch {machine['torch']}, "
        f"{machine['threads']} threads",
    )  # fmt: skip
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:2] else "right")
    for line in report["lines"]:
        if line["by"] == OURS and table.rows:
            table.add_section()
        table.add_row(*cells(line))
    show_table(table)
    for sentence in sentences(report):
        terminal().print(sentence, soft_wrap=True)


def _format_distance(distance: float | None) -> str:
    return "" if distance is None else f"{distance:.4f}"


program = typer.Typer(
    name="python benchmarks/peer_attacks.py",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@program.command()
def attacks(
    run: RunName,
    n: FirstN = None,
    only: Annotated[str, typer.Option(help="Only these attacks, such as autoattack,cw-l2.")] = "",
    out: OutFile = None,
    as_json: AsJson = False,
    device: Device = "auto",
    data: DataFolder = None,
) -> None:
    """Compare our attacks with pyautoattack's, torchattacks' and foolbox's on a trained run."""
    pairs = pairs_by_name(split_names(only))
    loaded = load_run(run, device, data)
    report = compare_attacks(
        loaded, loaded.images(RecordOptions(n=n)), pairs, peer_setup(loaded), on_message
    )
    print_report(report, show_peer_attacks, out, as_json)


if __name__ == "__main__":
    main(program)
