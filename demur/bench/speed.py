"""How fast a recipe trains and is attacked here: our engines beside the usual eager loop.

    report = speed("cifar10-pgdat-rr", device)

Everything is measured in one run on made-up images of the data's shape, whose content costs no
time. An epoch is 50,000 images; compilation is reported apart.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from demur.attacks import PGD, Attack
from demur.bench.eager import EagerLoop
from demur.bench.kernel_profile import added, kernels_of, plain_kernels, time_by_kind
from demur.bench.timing import best_of_restarts, copy_rate, matrix_peak, seconds_each, wait
from demur.data import Images
from demur.engine import FastSteps, FrozenModel, PlainSteps, TrainState, compiler_for_attacks
from demur.errors import BadInput, suggestion
from demur.fused import fusing
from demur.methods import PGDAT, NoHead
from demur.precision import use_precision
from demur.recipes import Recipe
from demur.runs import provenance
from demur.spec import show

EPOCH = 50_000  # images
LARGE = 1024  # a batch that fills a large GPU
ATTACKED = 10_000
RECORDINGS, TURNS = 3, 3  # of each step that is compared with another
LONGEST = 30  # kernels of a step that are told
ROWS = ("eager", "plain", "fast", "eval", "overhead", "large", "attack")
ON_CPU = ("eager", "plain")
FAST = ("fast", "eval", "overhead", "large")


@dataclass(frozen=True)
class SpeedRow:
    """One way to train, measured."""

    what: str
    batch_size: int
    crafting: str  # batch norm's mode
    precision: str
    step_ms: float
    epoch_s: float
    images_per_s: float
    share_of_peak: float | None
    memory_gib: float | None
    prepare_s: float


class Bench:
    """A recipe under the clock on one device."""

    def __init__(self, recipe: Recipe, device: torch.device, steps: int) -> None:
        framework = recipe.method.framework
        if not isinstance(framework, PGDAT) or not isinstance(framework.attack, PGD):
            raise BadInput("demur bench measures recipes trained on PGD; try cifar10-pgdat-rr")
        self.recipe, self.device, self.steps = recipe, device, steps
        self.attack = framework.attack
        self.peak = matrix_peak(device)
        self.lines: list[SpeedRow] = []

    def images(self, count: int) -> Images:
        """Made-up images of the data's shape."""
        domain, g = self.recipe.data.domain, torch.Generator().manual_seed(0)
        pixels = torch.randint(0, 256, (count, *domain.shape), dtype=torch.uint8, generator=g)
        y = torch.randint(0, domain.classes, (count,), generator=g)
        return Images(pixels, y, torch.arange(count), 255).to(self.device)

    def eager(self) -> None:
        """The usual loop."""
        self._forget_memory()
        attack, threat = self.attack, self.recipe.data.threat
        fit = self.images(max(4 * self.recipe.batch_size, 1024))
        loop = EagerLoop(
            self.recipe, fit, attack.ball.eps, attack.step_size or threat.linf_step, attack.steps
        )
        with use_precision("tf32", self.device):
            self._line("eager loop", replace(self.recipe, precision="tf32"), loop, self._few)

    def plain(self) -> None:
        """Our reference step."""
        self._forget_memory()
        train_state = TrainState(self.recipe, self.device)
        steps = PlainSteps(
            self.recipe, train_state, self.images(self._few * self.recipe.batch_size)
        )
        steps.begin(0)
        self._line("plain step", self.recipe, steps, self._few)

    def fast(self, recipe: Recipe, what: str) -> tuple[FastSteps, float]:
        """The fast engine on a recipe: its steps, and the seconds that each takes."""
        steps, prepared = self._prepared(recipe)
        return steps, self._line(what, recipe, partial(_again, steps), steps.batches, prepared)

    def seen(self, recipe: Recipe, what: str) -> dict[str, Any]:
        """The fast engine on a recipe, and where its time goes."""
        steps, took = self.fast(recipe, what)
        kernels = kernels_of(partial(_again, steps))
        longest = dict(islice(kernels.items(), LONGEST))
        return {"kinds_ms": time_by_kind(kernels, took), "longest": plain_kernels(longest)}

    def overhead(self, one: Recipe, other: Recipe) -> dict[str, Any]:
        """By what share one recipe's step takes longer than another's, and by which kernels.

        Of each there are several recordings, measured in turns: two recordings of one and the same
        step lie in different places and need not take the same time.
        """
        pairs = [[self._prepared(each)[0] for each in (one, other)] for _ in range(RECORDINGS)]
        turns = [
            [[self._step_seconds(steps) for steps in pair] for pair in pairs] for _ in range(TURNS)
        ]
        ms = 1000 * torch.tensor(turns).median(0).values.T  # 2, RECORDINGS
        with_it, without = ms.median(1).values.tolist()
        kernels = added(*(kernels_of(partial(_again, steps)) for steps in pairs[0]))
        return {
            "share": with_it / without - 1, "ms": ms[0].tolist(), "ms_without": ms[1].tolist(),
            "kernels": plain_kernels(kernels),
        }  # fmt: skip

    def _step_seconds(self, steps: FastSteps) -> float:
        return seconds_each(partial(_again, steps), steps.batches, self.device)

    def run_attack(self, attack: Attack, count: int, batch_size: int) -> dict[str, Any]:
        """Seconds of an attack on a net in eval mode."""
        net = self.recipe.net.build(self.recipe.data.domain, self.recipe.method.head)
        net.to(self.device).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
        precision = self.recipe.precision
        compiler = compiler_for_attacks(net.requires_grad_(False), precision)
        frozen_model = FrozenModel(net, precision, compiler, fixed=batch_size)
        images = self.images(count)

        def batch(i: int) -> Tensor:
            piece = slice(i * batch_size, (i + 1) * batch_size)
            x, y = images.batch(piece)
            x = x.contiguous(memory_format=torch.channels_last)
            return attack.perturb(frozen_model, x, y, images.index[piece])

        began = time.perf_counter()
        with use_precision(precision, self.device), fusing(compiler != "none"):
            batch(0)
            wait(self.device)
            prepared = time.perf_counter() - began
            took = seconds_each(batch, count // batch_size, self.device) * count / batch_size
        return {
            "images": count, "batch_size": batch_size, "seconds": took,
            "images_per_s": count / took, "prepare_s": prepared,
        }  # fmt: skip

    @property
    def _few(self) -> int:
        return max(3, self.steps // 10)

    def _prepared(self, recipe: Recipe) -> tuple[FastSteps, float]:
        """The fast engine, compiled and recorded, and how long that took."""
        began = time.perf_counter()
        count = max(3, self.steps * self.recipe.batch_size // recipe.batch_size)
        self._forget_memory()
        train_state = TrainState(recipe, self.device, channels_last=True)
        steps = FastSteps(recipe, train_state, self.images(count * recipe.batch_size), say=_refuse)
        steps.begin(0)
        wait(self.device)
        return steps, time.perf_counter() - began

    def _forget_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def _line(
        self,
        what: str,
        recipe: Recipe,
        action: Callable[[int], object],
        times: int,
        prepared: float = 0.0,
    ) -> float:
        framework = recipe.method.framework
        assert isinstance(framework, PGDAT)
        took = best_of_restarts(action, times, self.device)
        rate = recipe.batch_size / took
        flops = rate * (2 * self.attack.steps + 3) * _forward_flops(recipe)
        memory = torch.cuda.max_memory_allocated(self.device) / 2**30 if self.peak else None
        self.lines.append(
            SpeedRow(
                what, recipe.batch_size, framework.bn, recipe.precision, 1000 * took, EPOCH / rate,
                rate, flops / self.peak if self.peak else None, memory, prepared,
            )
        )  # fmt: skip
        return took


def speed(
    recipe: Recipe,
    device: torch.device,
    steps: int,
    only: tuple[str, ...],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The whole report as JSON values."""
    for name in only:
        if name not in ROWS:
            raise BadInput(f"no measurement is called {name!r}; {suggestion(name, ROWS)}")
    if device.type != "cuda" and any(name in FAST for name in only):
        raise BadInput("the fast engine needs a GPU; on a CPU use --only eager,plain")
    bench = Bench(recipe, device, steps)
    framework = bench.recipe.method.framework
    method = recipe.method
    evaluated = replace(recipe, method=replace(method, framework=replace(framework, bn="eval")))  # type: ignore[call-arg]
    large = replace(evaluated, batch_size=LARGE)
    found: dict[str, Any] = {}
    work: dict[str, Callable[[], object]] = {
        "eager": bench.eager,
        "plain": bench.plain,
        "fast": lambda: found.update(where=bench.seen(recipe, "fast")),
        "eval": lambda: found.update(where_eval=bench.seen(evaluated, "fast")),
        "overhead": lambda: found.update(
            head={
                "train": bench.overhead(recipe, _headless(recipe)),
                "eval": bench.overhead(evaluated, _headless(evaluated)),
            }
        ),
        "large": lambda: bench.fast(large, "fast, large batch"),
        "attack": lambda: found.update(
            attack=bench.run_attack(replace(bench.attack, steps=100), ATTACKED, 1000)
        ),
    }
    for name in only:
        say(f"measuring: {name}")
        work[name]()
    return {
        "recipe": show(recipe, full=True),
        "machine": provenance(device),
        "matrix_peak_tflops": bench.peak and bench.peak / 1e12,
        "copy_gb_per_s": (rate := copy_rate(device)) and rate / 1e9,
        "epoch_images": EPOCH,
        "lines": [asdict(line) for line in bench.lines],
        **found,
    }


def _headless(recipe: Recipe) -> Recipe:
    return replace(recipe, method=replace(recipe.method, head=NoHead()))


def _again(steps: FastSteps, i: int) -> None:
    """Step i of an epoch that begins anew by itself."""
    if i == 0:
        steps.cursor.zero_()
    steps(i)


def _refuse(sentence: str) -> None:
    raise BadInput(sentence)


def _forward_flops(recipe: Recipe) -> float:
    """Operations of one image's forward pass."""
    domain = recipe.data.domain
    with torch.device("meta"):
        net = recipe.net.trunk(domain.shape[0])
        x = torch.empty(1, *domain.shape)
    with FlopCounterMode(display=False) as counter:
        net(x)
    return float(counter.get_total_flops())
