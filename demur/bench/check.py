"""Proof that the fast step is the plain step: the same weights after twenty steps.

In fp64 both agree to rounding. In fp32 a sign of a tiny gradient may turn, and one turned pixel
moves everything after it; how much is shown by the plain step itself, with another layout or from
weights that differ by a few roundings. The fast step may stray no more than a few times that, after
twenty steps and, which is sharper, in each single step from the plain one's weights. Such turns
are rare, so more and more roundings are tried before a fast step is called different.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, get_args

import torch
from torch import Tensor

from demur import noise
from demur.bench.reports import Reports
from demur.data import Images
from demur.engine import FastSteps, PlainSteps, TrainState
from demur.engine.copies import Compiler
from demur.errors import BadInput, suggestion
from demur.methods import FRAMEWORKS, HEADS, PGDAT, BatchNorm, Framework, Method
from demur.precision import Precision
from demur.recipes import RECIPES, Recipe
from demur.runs import provenance
from demur.spec import show

Make = Callable[[Recipe, TrainState, Images], PlainSteps]
STEPS = 20
CLOSE = 1e-9  # of the way the weights went, in fp64
STRAY = 3.0  # times what roundings alone make of the plain step, in fp32
LEAST = 1e-3
NUDGES = 12  # weights moved by 0, 1, ... 11 roundings; other kernels' sums differ by about ten
PRECISIONS: tuple[Precision, ...] = ("fp64", "fp32")
WRAPPED = {"ema": 0.99, "awp": 0.01}  # around the steps of one more recipe


@dataclass(frozen=True)
class Equality:
    """How far two engines end from each other, as a share of the way the weights went."""

    framework: str
    head: str
    precision: str
    distance_to_plain: float  # after all steps
    tolerance: float  # as far as it was needed: no rounding is tried where less is apart
    distance_in_one_step: float  # after one step, the largest of all
    tolerance_in_one_step: float
    captured: bool  # whether the step ran as a graph
    failure: str = ""  # why the fast engine gave way to the plain one, if it did
    wrapped: str = ""  # what was around the steps, if anything

    @property
    def holds(self) -> bool:
        """Whether they may be called the same; plain compared with plain proves nothing."""
        near = (
            self.distance_to_plain <= self.tolerance
            and self.distance_in_one_step <= self.tolerance_in_one_step
        )
        return near and not self.failure


def frameworks() -> list[Framework]:
    """Every frame, with all modes of batch norm and other forms where it has them."""
    usual = RECIPES["digits-pgdat-rr"].method.framework
    assert isinstance(usual, PGDAT)
    modes: list[Framework] = [replace(usual, bn=mode) for mode in get_args(BatchNorm)]
    other_forms = [RECIPES["digits-ccat-reference"].method.framework]
    return [framework() for framework in FRAMEWORKS if framework is not PGDAT] + other_forms + modes


def pairs() -> list[Method]:
    """Every frame with every head that it goes with."""
    found = []
    for framework, head in product(frameworks(), HEADS):
        with suppress(BadInput):
            found.append(Method(framework, head()))
    return found


def recipe_of(method: Method, precision: Precision) -> Recipe:
    """A short training on the digits by this method."""
    return replace(RECIPES["digits-pgdat-rr"], method=method, precision=precision)


def recipes(precision: Precision) -> list[Recipe]:
    """Every pair, and the usual one once more with its steps wrapped."""
    made = [recipe_of(method, precision) for method in pairs()]
    usual = recipe_of(RECIPES["digits-pgdat-rr"].method, precision)
    return [*made, replace(usual, **WRAPPED)]  # type: ignore[arg-type]


def equality(recipe: Recipe, device: torch.device, compiler: Compiler) -> Equality:
    """The fast engine beside the plain one on a recipe."""
    fit = recipe.data.load()["fit"].to(device)
    plain, start = _trained(recipe, fit, PlainSteps)
    refusals: list[str] = []

    def fast_steps(recipe: Recipe, train_state: TrainState, fit: Images) -> FastSteps:
        return FastSteps(recipe, train_state, fit, compiler, refusals.append)

    fast, _ = _trained(recipe, fit, fast_steps, channels_last=True)
    way = distance(plain, start)
    distance_to_plain, in_one = (
        distance(plain, fast) / way,
        _distance_in_one_step(recipe, fit, fast_steps),
    )

    def stray(nudge: int) -> float:
        twin, _ = _trained(recipe, fit, PlainSteps, channels_last=True, nudge=nudge)
        return distance(plain, twin) / way

    def stray_in_one(nudge: int) -> float:
        return _distance_in_one_step(recipe, fit, PlainSteps, nudge)

    exact = recipe.precision == "fp64"
    return Equality(
        **_about(recipe),
        distance_to_plain=distance_to_plain, tolerance=CLOSE if exact else _allowed(distance_to_plain, stray),
        distance_in_one_step=in_one, tolerance_in_one_step=CLOSE if exact else _allowed(in_one, stray_in_one),
        captured=device.type == "cuda" and not refusals, failure="".join(refusals),
    )  # fmt: skip


def _allowed(distance_to_plain: float, stray: Callable[[int], float]) -> float:
    """A few times what roundings make of the plain step, tried while more is apart."""
    tolerance = LEAST
    for nudge in range(NUDGES):
        if distance_to_plain <= tolerance:
            break
        tolerance = max(tolerance, STRAY * stray(nudge))
    return tolerance


def check(
    device: torch.device,
    compiler: Compiler,
    say: Callable[[str], None],
    only: tuple[str, ...] = (),
    reports: Reports = Reports(),
) -> dict[str, Any]:
    """Every frame with every head, and wrapped steps, in fp64 and fp32, as JSON values.

    Pairs that an earlier report of the same code and machine holds are taken from it.
    """
    report: dict[str, Any] = {
        "machine": provenance(device),
        "steps": STEPS,
        "noise_is_equal": noise_is_equal(device),
        "pairs": [],
    }
    report["pairs"] = [*(reports.known(report, "pairs") or [])]
    known = {_key(pair) for pair in report["pairs"]}
    for recipe in selected_recipes(only):
        if _key(_about(recipe)) not in known:
            say(f"comparing: {recipe.precision} {show(recipe.method)}")
            found = equality(recipe, device, compiler)
            report["pairs"].append(asdict(found) | {"holds": found.holds})
            reports.keep(report)
    return report


def selected_recipes(only: tuple[str, ...]) -> list[Recipe]:
    """All recipes to compare, or those of the frames, heads and precisions that are named."""
    whole = [recipe for precision in PRECISIONS for recipe in recipes(precision)]
    words = [_words(recipe) for recipe in whole]
    for name in only:
        if not any(name in each for each in words):
            known = dict.fromkeys(word for each in words for word in each)
            raise BadInput(f"nothing to compare is called {name!r}; {suggestion(name, known)}")
    kinds = [{each[kind] for each in words} & set(only) for kind in range(3)]
    found = [
        recipe
        for recipe, each in zip(whole, words, strict=True)
        if all(not named or word in named for word, named in zip(each, kinds, strict=True))
    ]
    if not found:
        raise BadInput(f"no frame and head go together as {', '.join(only)}; name fewer of them")
    return found


def _words(recipe: Recipe) -> tuple[str, str, str]:
    """Frame, head and precision as a user names them."""
    method = recipe.method
    return (
        type(method.framework).__name__.lower(),
        type(method.head).__name__.lower(),
        recipe.precision,
    )


def _about(recipe: Recipe) -> dict[str, str]:
    """What an equality says of the recipe it is about."""
    around = [f"{name}={value}" for name in WRAPPED if (value := getattr(recipe, name))]
    return {
        "framework": show(recipe.method.framework), "head": show(recipe.method.head),
        "precision": recipe.precision, "wrapped": " ".join(around),
    }  # fmt: skip


def _key(pair: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(pair[name] for name in ("framework", "head", "precision", "wrapped"))


def noise_is_equal(device: torch.device) -> bool:
    """Whether the device draws the numbers that the CPU draws."""
    index, seed, stream = torch.tensor([0, 7, 2**40 + 3]), 2**61 + 5, 2**45 + 9
    here = noise.uniform(seed, index, stream, (3, 700))
    held = torch.full((1,), stream, dtype=torch.int64, device=device)
    there = noise.uniform(seed, index.to(device), held, (3, 700))
    derived = noise.derived(seed, 4, held)
    assert isinstance(derived, Tensor)
    return torch.equal(here, there.cpu()) and int(derived) == noise.derived(seed, 4, stream)


def _distance_in_one_step(recipe: Recipe, fit: Images, make: Make, nudge: int = 0) -> float:
    """The largest distance after one step from the plain step's weights, of its way."""
    learners = [TrainState(recipe, fit.y.device, last) for last in (False, True)]
    plain, other = PlainSteps(recipe, learners[0], fit), make(recipe, learners[1], fit)
    largest = 0.0
    for step in range(STEPS):
        epoch, i = divmod(step, plain.batches)
        before = {name: value.clone() for name, value in learners[0].tensors().items()}
        for train_state, steps in zip(learners, (plain, other), strict=True):
            train_state.restore(before)
            if steps is other:
                _nudge(train_state, nudge)
            if i == 0:
                steps.begin(epoch)
            steps(i)
        after, there = (train_state.tensors() for train_state in learners)
        largest = max(largest, distance(after, there) / distance(after, before))
    return largest


def _trained(
    recipe: Recipe,
    fit: Images,
    make: Make,
    channels_last: bool = False,
    nudge: int = 0,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after some steps, and before."""
    train_state = TrainState(recipe, fit.y.device, channels_last)
    start = {name: value.clone() for name, value in train_state.tensors().items()}
    _nudge(train_state, nudge)
    steps = make(recipe, train_state, fit)
    for step in range(STEPS):
        epoch, i = divmod(step, steps.batches)
        if i == 0:
            steps.begin(epoch)
        steps(i)
    return {name: value.clone() for name, value in train_state.tensors().items()}, start


@torch.no_grad()
def _nudge(train_state: TrainState, roundings: int) -> None:
    """Move every weight by so many roundings, up or down by a coin."""
    for stream, parameter in enumerate(train_state.net.parameters()):
        places = torch.arange(parameter.numel(), device=parameter.device)
        draw = noise.uniform(roundings, places, stream, (1,)).view_as(parameter)
        size = roundings * torch.finfo(parameter.dtype).eps
        parameter.mul_(1 + size * (2 * draw.round() - 1))


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The length of the difference of all weights and statistics, averaged ones too."""
    squares = [
        float((one[name].double() - other[name].double()).square().sum())
        for name in one
        if name.startswith(("net.", "average.")) and one[name].is_floating_point()
    ]
    return math.sqrt(sum(squares))
