"""Training and attack speed of a recipe: demur's engines beside an eager baseline loop.

    python benchmarks/speed.py cifar10-pgdat-rr --only fast,attack -o speed.json

All rows are measured in one run on random images of the data set's shape; the content does not
affect the time. An epoch is 50,000 images. Compilation time is reported separately. GPU time is
also shown by kind of kernel, with the idle time between kernels.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from demur.attacks import PGD, Attack
from demur.cli.app import AsJson, Device, main, split_names
from demur.cli.progress import on_message
from demur.data import Images
from demur.engine import FrozenModel, compiler_for_attacks
from demur.errors import BadInput, suggestion
from demur.methods import PGDAT, NoHead
from demur.numerics import device_by_name, fusing, use_precision
from demur.recipes import Recipe
from demur.recipes import recipe as recipe_named
from demur.rejectors.certainty import con, rcon, tcon
from demur.report.terminal import show_table, terminal
from demur.runs import provenance
from demur.spec import show
from demur.training import FastSteps, PlainSteps, TrainState
from reports import OutFile, print_report
from timing import (
    best_of_two,
    copy_rate,
    kernel_difference,
    kernels_json,
    kernels_of,
    matrix_peak,
    seconds_each,
    time_by_kind,
    wait,
)

EPOCH = 50_000  # images
LARGE_BATCH = 1024  # fills a large GPU
ATTACKED_IMAGES = 10_000
CAPTURES, TURNS = 3, 3  # CUDA graph captures of each compared step, and timings of each capture
LONGEST_KERNELS = 30  # kernels of a step in the report
ROWS = ("eager", "plain", "fast", "eval", "overhead", "large", "attack")
ON_CPU = ("eager", "plain")
FAST = ("fast", "eval", "overhead", "large")
SPEED_COLUMNS = ("what", "batch", "batch norm", "arithmetic", "s / epoch", "images / s", "of peak",
                 "GiB", "to prepare, s")  # fmt: skip


@dataclass(frozen=True)
class SpeedRow:
    """One row of the report: the speed of one training loop."""

    what: str
    batch_size: int
    bn: str  # batch norm mode during the attack
    precision: str
    step_ms: float
    epoch_s: float
    images_per_s: float
    share_of_peak: float | None  # FLOP/s relative to `matrix_peak`; None on a CPU
    memory_gib: float | None
    prepare_s: float  # compilation and CUDA graph capture


class Bench:
    """Times one recipe on one device; `rows` collects the results."""

    def __init__(self, recipe: Recipe, device: torch.device, steps: int) -> None:
        framework = recipe.method.framework
        if not isinstance(framework, PGDAT) or not isinstance(framework.attack, PGD):
            raise BadInput("only recipes trained with PGD are measured; use cifar10-pgdat-rr")
        self.recipe, self.device, self.steps = recipe, device, steps
        self.attack = framework.attack
        self.peak = matrix_peak(device)
        self.rows: list[SpeedRow] = []

    def images(self, count: int) -> Images:
        """Random images of the data set's shape."""
        domain, g = self.recipe.data.domain, torch.Generator().manual_seed(0)
        pixels = torch.randint(0, 256, (count, *domain.shape), dtype=torch.uint8, generator=g)
        y = torch.randint(0, domain.classes, (count,), generator=g)
        return Images(pixels, y, torch.arange(count), 255).to(self.device)

    def eager(self) -> None:
        """Time the eager baseline loop."""
        self._reset_memory()
        attack, threat = self.attack, self.recipe.data.threat
        fit = self.images(max(4 * self.recipe.batch_size, 1024))
        loop = EagerLoop(
            self.recipe, fit, attack.ball.eps, attack.step_size or threat.linf_step, attack.steps
        )
        with use_precision("tf32", self.device):
            self._measure("eager loop", replace(self.recipe, precision="tf32"), loop, self._few)

    def plain(self) -> None:
        """Time the plain engine."""
        self._reset_memory()
        train_state = TrainState(self.recipe, self.device)
        steps = PlainSteps(
            self.recipe, train_state, self.images(self._few * self.recipe.batch_size)
        )
        steps.begin(0)
        self._measure("plain step", self.recipe, steps, self._few)

    def fast(self, recipe: Recipe, what: str) -> tuple[FastSteps, float]:
        """Time the fast engine; return its steps and the seconds per step."""
        steps, prepare_s = self._prepare(recipe)
        action = partial(_repeat_epoch, steps)
        return steps, self._measure(what, recipe, action, steps.batches, prepare_s)

    def profile(self, recipe: Recipe, what: str) -> dict[str, Any]:
        """Time the fast engine and profile its kernels."""
        steps, seconds = self.fast(recipe, what)
        kernels = kernels_of(partial(_repeat_epoch, steps))
        longest = dict(islice(kernels.items(), LONGEST_KERNELS))
        return {"kinds_ms": time_by_kind(kernels, seconds), "longest": kernels_json(longest)}

    def overhead(self, one: Recipe, other: Recipe) -> dict[str, Any]:
        """The relative extra time of one recipe's step over another's, and the kernels behind it.

        Each step is captured several times, and the captures are timed in turns: captures of the
        same step use different memory addresses and can differ in speed.
        """
        pairs = [[self._prepare(recipe)[0] for recipe in (one, other)] for _ in range(CAPTURES)]
        turns = [
            [[self._step_seconds(steps) for steps in pair] for pair in pairs] for _ in range(TURNS)
        ]
        ms = 1000 * torch.tensor(turns).median(0).values.T  # 2, CAPTURES
        median_one, median_other = ms.median(1).values.tolist()
        kernels = kernel_difference(
            *(kernels_of(partial(_repeat_epoch, steps)) for steps in pairs[0])
        )
        return {
            "share": median_one / median_other - 1,
            "ms": ms[0].tolist(),
            "ms_without": ms[1].tolist(),
            "kernels": kernels_json(kernels),
        }

    def _step_seconds(self, steps: FastSteps) -> float:
        return seconds_each(partial(_repeat_epoch, steps), steps.batches, self.device)

    def run_attack(self, attack: Attack, count: int, batch_size: int) -> dict[str, Any]:
        """Time an attack on random images and a net in eval mode."""
        net = self.recipe.net.build(self.recipe.data.domain, self.recipe.method.head)
        net.to(self.device).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
        precision = self.recipe.precision
        compiler = compiler_for_attacks(net.requires_grad_(False), precision)
        frozen_model = FrozenModel(net, precision, compiler, fixed=batch_size)
        images = self.images(count)

        def batch(i: int) -> Tensor:
            rows = slice(i * batch_size, (i + 1) * batch_size)
            x, y = images.batch(rows)
            x = x.contiguous(memory_format=torch.channels_last)
            return attack.perturb(frozen_model, x, y, images.index[rows])

        start = time.perf_counter()
        with use_precision(precision, self.device), fusing(compiler != "none"):
            batch(0)
            wait(self.device)
            prepare_s = time.perf_counter() - start
            seconds = seconds_each(batch, count // batch_size, self.device) * count / batch_size
        return {
            "images": count, "batch_size": batch_size, "seconds": seconds,
            "images_per_s": count / seconds, "prepare_s": prepare_s,
        }  # fmt: skip

    @property
    def _few(self) -> int:
        """The number of steps of the slow loops."""
        return max(3, self.steps // 10)

    def _prepare(self, recipe: Recipe) -> tuple[FastSteps, float]:
        """Compile and capture the fast engine; return its steps and the seconds taken."""
        start = time.perf_counter()
        count = max(3, self.steps * self.recipe.batch_size // recipe.batch_size)
        self._reset_memory()
        train_state = TrainState(recipe, self.device, channels_last=True)
        steps = FastSteps(
            recipe, train_state, self.images(count * recipe.batch_size), on_message=_raise
        )
        steps.begin(0)
        wait(self.device)
        return steps, time.perf_counter() - start

    def _reset_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def _measure(
        self,
        what: str,
        recipe: Recipe,
        action: Callable[[int], object],
        times: int,
        prepare_s: float = 0.0,
    ) -> float:
        """Time the action, append its row and return the seconds per step."""
        framework = recipe.method.framework
        assert isinstance(framework, PGDAT)
        seconds = best_of_two(action, times, self.device)
        rate = recipe.batch_size / seconds
        # in forward passes: 2 per attack step (forward, input gradient), 3 for the training step
        flops = rate * (2 * self.attack.steps + 3) * _forward_flops(recipe)
        memory = torch.cuda.max_memory_allocated(self.device) / 2**30 if self.peak else None
        self.rows.append(
            SpeedRow(
                what, recipe.batch_size, framework.bn, recipe.precision, 1000 * seconds,
                EPOCH / rate, rate, flops / self.peak if self.peak else None, memory, prepare_s,
            )
        )  # fmt: skip
        return seconds


def speed(
    recipe: Recipe,
    device: torch.device,
    steps: int,
    only: tuple[str, ...],
    on_message: Callable[[str], None],
) -> dict[str, Any]:
    """Measure the rows named in `only`; return the report as JSON values.

    Raises:
        BadInput: A row is unknown or needs a GPU, or the recipe is not trained with PGD.
    """
    for name in only:
        if name not in ROWS:
            raise BadInput(f"there is no measurement {name!r}; {suggestion(name, ROWS)}")
    if device.type != "cuda" and any(name in FAST for name in only):
        raise BadInput("the fast engine needs a GPU; on a CPU use --only eager,plain")
    bench = Bench(recipe, device, steps)
    method = recipe.method
    eval_framework = replace(method.framework, bn="eval")  # type: ignore[call-arg]
    eval_bn = replace(recipe, method=replace(method, framework=eval_framework))
    large = replace(eval_bn, batch_size=LARGE_BATCH)
    results: dict[str, Any] = {}
    measurements: dict[str, Callable[[], object]] = {
        "eager": bench.eager,
        "plain": bench.plain,
        "fast": lambda: results.update(where=bench.profile(recipe, "fast")),
        "eval": lambda: results.update(where_eval=bench.profile(eval_bn, "fast")),
        "overhead": lambda: results.update(
            head={
                "train": bench.overhead(recipe, _without_head(recipe)),
                "eval": bench.overhead(eval_bn, _without_head(eval_bn)),
            }
        ),
        "large": lambda: bench.fast(large, "fast, large batch"),
        "attack": lambda: results.update(
            attack=bench.run_attack(replace(bench.attack, steps=100), ATTACKED_IMAGES, 1000)
        ),
    }
    for name in only:
        on_message(f"measuring: {name}")
        measurements[name]()
    return {
        "recipe": show(recipe, full=True),
        "machine": provenance(device),
        "matrix_peak_tflops": bench.peak and bench.peak / 1e12,
        "copy_gb_per_s": (rate := copy_rate(device)) and rate / 1e9,
        "epoch_images": EPOCH,
        "lines": [asdict(row) for row in bench.rows],
        **results,
    }


def _without_head(recipe: Recipe) -> Recipe:
    return replace(recipe, method=replace(recipe.method, head=NoHead()))


def _repeat_epoch(steps: FastSteps, i: int) -> None:
    """Take step i; step 0 rewinds to the start of the epoch."""
    if i == 0:
        steps.cursor.zero_()
    steps(i)


def _raise(sentence: str) -> None:
    raise BadInput(sentence)  # a fallback to the plain engine is not what is measured


def _forward_flops(recipe: Recipe) -> float:
    """FLOPs of the forward pass of one image."""
    domain = recipe.data.domain
    with torch.device("meta"):
        net = recipe.net.trunk(domain)
        x = torch.empty(1, *domain.shape)
    with FlopCounterMode(display=False) as counter:
        net(x)
    return float(counter.get_total_flops())


class EagerLoop:
    """The baseline loop: `loop(i)` takes one training step on the i-th batch, in order.

    PGD adversarial training as commonly written: eager fp32 with TF32 matrix products, batch
    norm in train mode during the attack, and `loss.backward()` at every attack step, which also
    computes unused weight gradients. Only its time is measured; `demur.training` trains
    recipes.
    """

    def __init__(
        self, recipe: Recipe, fit: Images, eps: float, step_size: float, steps: int
    ) -> None:
        self.recipe, self.fit = recipe, fit
        self.eps, self.step_size, self.steps = eps, step_size, steps
        net = recipe.net.build(recipe.data.domain, recipe.method.head, recipe.seed)
        self.net: nn.Module = net.to(fit.y.device).train()
        self.optimiser = torch.optim.SGD(
            self.net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4
        )

    def __call__(self, i: int) -> None:
        """Take one training step."""
        size = self.recipe.batch_size
        first = i * size % (len(self.fit) - size + 1)
        x, y = self.fit.batch(slice(first, first + size))
        out = self.net((x + self._craft(x, y)).clamp(0, 1))
        loss = cross_entropy(out.logits, y)
        if out.aux.shape[1]:
            # Eq. 7 with R-Con = con * A (Eq. 6); con gets no gradient where the prediction is right
            confidence = torch.where(out.logits.argmax(-1) == y, con(out).detach(), con(out))
            rectified = (confidence * rcon(out) / con(out)).clamp(1e-6, 1 - 1e-6)
            loss = loss + nn.functional.binary_cross_entropy(rectified, tcon(out, y).detach())
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()

    def _craft(self, x: Tensor, y: Tensor) -> Tensor:
        """The PGD perturbations of a batch, N, C, H, W."""
        delta = torch.empty_like(x).uniform_(-self.eps, self.eps)
        delta = ((x + delta).clamp(0, 1) - x).requires_grad_()
        for _ in range(self.steps):
            cross_entropy(self.net(x + delta).logits, y).backward()
            grad = delta.grad
            assert grad is not None
            moved = (delta + self.step_size * grad.sign()).clamp(-self.eps, self.eps)
            delta = ((x + moved).clamp(0, 1) - x).detach().requires_grad_()
        return delta.detach()


def speed_cells(line: dict[str, Any]) -> tuple[str, ...]:
    """Format one line of the report."""
    share, memory = line["share_of_peak"], line["memory_gib"]
    return (
        line["what"], str(line["batch_size"]), line["bn"], line["precision"],
        f"{line['epoch_s']:.2f}", f"{line['images_per_s']:,.0f}",
        "" if share is None else f"{100 * share:.0f}%",
        "" if memory is None else f"{memory:.1f}", f"{line['prepare_s']:.0f}",
    )  # fmt: skip


def speed_sentences(report: dict[str, Any]) -> list[str]:
    """Return the figures that are not in the table, as sentences."""
    found = []
    for mode, cost in report.get("head", {}).items():
        spread = max(max(ms) / min(ms) - 1 for ms in (cost["ms"], cost["ms_without"]))
        found.append(
            f"the head costs {100 * cost['share']:+.2f}% of a step with batch norm in {mode} mode; "
            f"captures of one step are up to {100 * spread:.2f}% apart{_extra_kernels(cost)}"
        )
    if "attack" in report:
        attack = report["attack"]
        found.append(
            f"PGD-100 on {attack['images']:,} images: {attack['seconds']:.2f} s at batch "
            f"{attack['batch_size']} ({attack['prepare_s']:.0f} s to prepare)"
        )
    for key, mode in (("where", "train"), ("where_eval", "eval")):
        if key in report:
            kinds = report[key]["kinds_ms"].items()
            parts = ", ".join(f"{kind} {ms:.2f} ms" for kind, ms in kinds)
            found.append(f"a fast step with batch norm in {mode} mode: {parts}")
    return found


def _extra_kernels(cost: dict[str, Any]) -> str:
    """Return the time of the kernels that the step with the head launches in addition."""
    more = [kernel for kernel in cost["kernels"].values() if kernel["launches"]]
    if not more:
        return ""
    launches, ms = (sum(kernel[part] for kernel in more) for part in ("launches", "ms"))
    share = ms / median(cost["ms_without"])
    return f"; it launches {launches:.0f} more kernels, which take {100 * share:.2f}%"


def show_speed(report: dict[str, Any]) -> None:
    """Print the report as a table and sentences."""
    machine = report["machine"]
    table = Table(box=box.SIMPLE_HEAD, title=f"{machine['device']}, torch {machine['torch']}")
    for column in SPEED_COLUMNS:
        table.add_column(column, justify="left" if column == "what" else "right")
    for line in report["lines"]:
        table.add_row(*speed_cells(line))
    show_table(table)
    console = terminal()
    for sentence in speed_sentences(report):
        console.print(sentence)


program = typer.Typer(
    name="python benchmarks/speed.py",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@program.command()
def measure(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="The recipe to time.", show_default="cifar10-pgdat-rr; digits on a CPU"
        ),
    ] = None,
    changes: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    only: Annotated[
        str, typer.Option(help="Some of: eager,plain,fast,eval,overhead,large,attack.")
    ] = "",
    steps: Annotated[int, typer.Option(min=3, help="Steps per measurement.")] = 100,
    out: OutFile = None,
    as_json: AsJson = False,
    device: Device = "auto",
) -> None:
    """Time both engines and a plain PyTorch training loop on this machine."""
    torch_device = device_by_name(device)
    on_gpu = torch_device.type == "cuda"
    chosen = recipe or ("cifar10-pgdat-rr" if on_gpu else "digits-pgdat-rr")
    names = split_names(only) or (ROWS if on_gpu else ON_CPU)
    report = speed(recipe_named(chosen, changes or []), torch_device, steps, names, on_message)
    print_report(report, show_speed, out, as_json)


if __name__ == "__main__":
    main(program)
