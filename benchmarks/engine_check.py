"""Check that the fast engine trains the same weights as the plain engine.

In fp64 both agree to rounding error. In fp32 rounding can flip the sign of a tiny gradient, and one
changed pixel changes every later step. The tolerance is therefore measured: a few times the
distance between plain runs that differ by the memory format or by a few ulps in the weights. Both
the distance after 20 steps and, more strictly, after each single step from equal weights count.
Sign flips are rare, so the check tries larger perturbations before it reports a difference.

    python benchmarks/engine_check.py --only pgdat,rr -o check.json
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Annotated, Any, get_args

import torch
import typer
from torch import Tensor

from demur import noise
from demur.cli.app import AsJson, Device, main, split_names
from demur.cli.progress import on_message
from demur.data import Images
from demur.engine import Compiler
from demur.errors import BadInput, suggestion
from demur.methods import FRAMEWORKS, HEADS, PGDAT, BatchNorm, Framework, Method
from demur.numerics import Precision, device_by_name
from demur.recipes import RECIPES, Recipe
from demur.runs import provenance
from demur.spec import show
from demur.training.state import TrainState
from demur.training.step import FastSteps, PlainSteps
from reports import OutFile, Reports, open_reports, print_report

StepsFactory = Callable[[Recipe, TrainState, Images], PlainSteps]
STEPS = 20
FP64_TOLERANCE = 1e-9  # relative to the distance from the initial weights
FP32_FACTOR = 3.0  # times the distance that rounding causes between plain runs
MIN_TOLERANCE = 1e-3  # the smallest tolerance in fp32
PERTURBATIONS = 12  # 0, 1, ... 11 ulps; sums by other kernels differ by about ten
PRECISIONS: tuple[Precision, ...] = ("fp64", "fp32")
WRAPPED = {"ema": 0.99, "awp": 0.01}  # wrappers around the steps of one more recipe


@dataclass(frozen=True)
class Equality:
    """Distances between the two engines, relative to the distance from the initial weights."""

    framework: str
    head: str
    precision: str
    distance_to_plain: float  # after all steps
    tolerance: float  # grows only until it exceeds the distance
    distance_in_one_step: float  # the largest over all steps
    tolerance_in_one_step: float
    captured: bool  # whether the step ran as a CUDA graph
    failure: str = ""  # why the fast engine fell back to the plain one, if it did
    wrapped: str = ""  # wrappers around the steps, if any

    @property
    def holds(self) -> bool:
        """Whether the engines agree; False after a fallback, which compares plain with plain."""
        close = (
            self.distance_to_plain <= self.tolerance
            and self.distance_in_one_step <= self.tolerance_in_one_step
        )
        return close and not self.failure


def frameworks() -> list[Framework]:
    """Every framework, PGD-AT in each batch norm mode and CCAT in both forms."""
    pgdat = RECIPES["digits-pgdat-rr"].method.framework
    assert isinstance(pgdat, PGDAT)
    modes: list[Framework] = [replace(pgdat, bn=mode) for mode in get_args(BatchNorm)]
    other_forms = [RECIPES["digits-ccat-reference"].method.framework]
    return [framework() for framework in FRAMEWORKS if framework is not PGDAT] + other_forms + modes


def pairs() -> list[Method]:
    """Every valid combination of a framework and a head."""
    methods = []
    for framework, head in product(frameworks(), HEADS):
        with suppress(BadInput):
            methods.append(Method(framework, head()))
    return methods


def recipe_of(method: Method, precision: Precision) -> Recipe:
    """A short digits recipe with this method."""
    return replace(RECIPES["digits-pgdat-rr"], method=method, precision=precision)


def recipes(precision: Precision) -> list[Recipe]:
    """One recipe per pair, and PGD-AT with RR once more with EMA and AWP."""
    unwrapped = [recipe_of(method, precision) for method in pairs()]
    pgdat_rr = recipe_of(RECIPES["digits-pgdat-rr"].method, precision)
    return [*unwrapped, replace(pgdat_rr, **WRAPPED)]  # type: ignore[arg-type]


def equality(recipe: Recipe, device: torch.device, compiler: Compiler) -> Equality:
    """Train a recipe with both engines and compare the weights."""
    fit = recipe.data.load()["fit"].to(device)
    plain, initial = _train(recipe, fit, PlainSteps)
    failures: list[str] = []

    def fast_steps(recipe: Recipe, train_state: TrainState, fit: Images) -> FastSteps:
        return FastSteps(recipe, train_state, fit, compiler, failures.append)

    fast, _ = _train(recipe, fit, fast_steps, channels_last=True)
    length = distance(plain, initial)
    to_plain = distance(plain, fast) / length
    in_one_step = _distance_in_one_step(recipe, fit, fast_steps)

    def perturbed_distance(ulps: int) -> float:
        perturbed, _ = _train(recipe, fit, PlainSteps, channels_last=True, ulps=ulps)
        return distance(plain, perturbed) / length

    def perturbed_distance_in_one_step(ulps: int) -> float:
        return _distance_in_one_step(recipe, fit, PlainSteps, ulps)

    tolerance = tolerance_in_one_step = FP64_TOLERANCE
    if recipe.precision != "fp64":
        tolerance = _allowed(to_plain, perturbed_distance)
        tolerance_in_one_step = _allowed(in_one_step, perturbed_distance_in_one_step)
    return Equality(
        **_identity(recipe),
        distance_to_plain=to_plain, tolerance=tolerance,
        distance_in_one_step=in_one_step, tolerance_in_one_step=tolerance_in_one_step,
        captured=device.type == "cuda" and not failures, failure="".join(failures),
    )  # fmt: skip


def _allowed(measured: float, perturbed_distance: Callable[[int], float]) -> float:
    """The fp32 tolerance: perturbs the weights more until it exceeds the measured distance."""
    tolerance = MIN_TOLERANCE
    for ulps in range(PERTURBATIONS):
        if measured <= tolerance:
            break
        tolerance = max(tolerance, FP32_FACTOR * perturbed_distance(ulps))
    return tolerance


def check(
    device: torch.device,
    compiler: Compiler,
    on_message: Callable[[str], None],
    only: tuple[str, ...] = (),
    reports: Reports = Reports(),
) -> dict[str, Any]:
    """Compare the engines for every framework and head in fp64 and fp32; return JSON values.

    Pairs in an earlier report of the same code and machine are not measured again.
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
        if _key(_identity(recipe)) not in known:
            on_message(f"comparing: {recipe.precision} {show(recipe.method)}")
            result = equality(recipe, device, compiler)
            report["pairs"].append(asdict(result) | {"holds": result.holds})
            reports.keep(report)
    return report


def selected_recipes(only: tuple[str, ...]) -> list[Recipe]:
    """The recipes to compare: all, or those of the given frameworks, heads and precisions.

    Raises:
        BadInput: A name is unknown, or no recipe matches all names.
    """
    all_recipes = [recipe for precision in PRECISIONS for recipe in recipes(precision)]
    names_of = [_names(recipe) for recipe in all_recipes]
    for name in only:
        if not any(name in names for names in names_of):
            known = dict.fromkeys(known for names in names_of for known in names)
            raise BadInput(
                f"no framework, head or precision is called {name!r}; {suggestion(name, known)}"
            )
    # a user restricts frameworks, heads or precisions; an empty set restricts nothing
    wanted = [{names[kind] for names in names_of} & set(only) for kind in range(3)]
    selected = [
        recipe
        for recipe, names in zip(all_recipes, names_of, strict=True)
        if all(not choice or name in choice for name, choice in zip(names, wanted, strict=True))
    ]
    if not selected:
        raise BadInput(f"no framework and head combine as {', '.join(only)}; name fewer of them")
    return selected


def _names(recipe: Recipe) -> tuple[str, str, str]:
    """Framework, head and precision as --only spells them."""
    method = recipe.method
    framework, head = type(method.framework).__name__, type(method.head).__name__
    return framework.lower(), head.lower(), recipe.precision


def _identity(recipe: Recipe) -> dict[str, str]:
    """The fields of an `Equality` that name its recipe."""
    wrappers = [f"{name}={value}" for name in WRAPPED if (value := getattr(recipe, name))]
    return {
        "framework": show(recipe.method.framework), "head": show(recipe.method.head),
        "precision": recipe.precision, "wrapped": " ".join(wrappers),
    }  # fmt: skip


def _key(pair: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(pair[name] for name in ("framework", "head", "precision", "wrapped"))


def noise_is_equal(device: torch.device) -> bool:
    """Whether the device draws the same random numbers as the CPU."""
    index, seed, stream = torch.tensor([0, 7, 2**40 + 3]), 2**61 + 5, 2**45 + 9
    on_cpu = noise.uniform(seed, index, stream, (3, 700))
    device_stream = torch.full((1,), stream, dtype=torch.int64, device=device)
    on_device = noise.uniform(seed, index.to(device), device_stream, (3, 700))
    derived = noise.derive_seed(seed, 4, device_stream)
    assert isinstance(derived, Tensor)
    return torch.equal(on_cpu, on_device.cpu()) and int(derived) == noise.derive_seed(
        seed, 4, stream
    )


def _distance_in_one_step(
    recipe: Recipe, fit: Images, make_steps: StepsFactory, ulps: int = 0
) -> float:
    """The largest distance after one step from equal weights, relative to the plain step."""
    states = [TrainState(recipe, fit.y.device, last) for last in (False, True)]
    plain, other = PlainSteps(recipe, states[0], fit), make_steps(recipe, states[1], fit)
    largest = 0.0
    for step in range(STEPS):
        epoch, i = divmod(step, plain.batches)
        before = {name: value.clone() for name, value in states[0].tensors().items()}
        for train_state, steps in zip(states, (plain, other), strict=True):
            train_state.restore(before)
            if steps is other:
                _perturb(train_state, ulps)
            if i == 0:
                steps.begin(epoch)
            steps(i)
        after, after_other = (train_state.tensors() for train_state in states)
        largest = max(largest, distance(after, after_other) / distance(after, before))
    return largest


def _train(
    recipe: Recipe,
    fit: Images,
    make_steps: StepsFactory,
    channels_last: bool = False,
    ulps: int = 0,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train for `STEPS` steps; return the final and the initial tensors."""
    train_state = TrainState(recipe, fit.y.device, channels_last)
    initial = {name: value.clone() for name, value in train_state.tensors().items()}
    _perturb(train_state, ulps)
    steps = make_steps(recipe, train_state, fit)
    for step in range(STEPS):
        epoch, i = divmod(step, steps.batches)
        if i == 0:
            steps.begin(epoch)
        steps(i)
    return {name: value.clone() for name, value in train_state.tensors().items()}, initial


@torch.no_grad()
def _perturb(train_state: TrainState, ulps: int) -> None:
    """Scale every weight by 1 + ulps * eps or 1 - ulps * eps, at random."""
    if ulps == 0:
        return
    for stream, parameter in enumerate(train_state.net.parameters()):
        index = torch.arange(parameter.numel(), device=parameter.device)
        draw = noise.uniform(ulps, index, stream, (1,)).view_as(parameter)
        size = ulps * torch.finfo(parameter.dtype).eps
        parameter.mul_(1 + size * (2 * draw.round() - 1))


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The L2 distance of all weights and running statistics, including the EMA ones."""
    squares = [
        float((one[name].double() - other[name].double()).square().sum())
        for name in one
        if name.startswith(("net.", "average.")) and one[name].is_floating_point()
    ]
    return math.sqrt(sum(squares))


program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@program.command()
def compare(
    only: Annotated[
        str, typer.Option(help="Some frameworks, heads and precisions, such as pgdat,rr,fp32.")
    ] = "",
    out: OutFile = None,
    as_json: AsJson = False,
    device: Device = "auto",
) -> None:
    """Check that the fast engine trains the same weights as the plain one on this machine.

    The report is stored after every pair and resumes where it was stopped.
    """
    where = device_by_name(device)
    compiler: Compiler = "inductor" if where.type == "cuda" else "aot_eager"
    report = check(where, compiler, on_message, split_names(only), open_reports(out, "pairs"))
    print_report(report, show_check, out, as_json)
    if not (report["noise_is_equal"] and all(pair["holds"] for pair in report["pairs"])):
        typer.echo(
            "demur: the fast engine differs from the plain one; use --engine plain", err=True
        )
        raise typer.Exit(1)


def show_check(report: dict[str, Any]) -> None:
    """Print one line per pair of engines."""
    for pair in report["pairs"]:
        distance, in_one_step = pair["distance_to_plain"], pair["distance_in_one_step"]
        verdict = "same" if pair["holds"] else "DIFFERENT"
        how = "captured" if pair["captured"] else "eager"
        typer.echo(
            f"{verdict:9} {pair['precision']}  distance {distance:.1e} of {pair['tolerance']:.1e}, "
            f"in one step {in_one_step:.1e} of {pair['tolerance_in_one_step']:.1e}, "
            f"{how}: {pair['framework']}, {pair['head']} {pair['wrapped']} {pair['failure']}"
        )
    typer.echo(f"noise is the same on CPU and device: {report['noise_is_equal']}")


if __name__ == "__main__":
    main(program)
