"""RejectAutoAttack beside simpler attacks with ten times its gradient queries.

    python benchmarks/peer_rejection.py RUN --n 100 -o rejection.json --figure rejection.svg

Attacks run one after another on the images not yet broken, so accepted errors and queries are known
after each. A gradient counts as one query, a forward pass as a third. Thresholds accept 95% of the
correct predictions on the clean images (the coupled pair has its own): this compares attacks, not
rejectors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer
from rich import box
from rich.table import Table
from torch import Tensor

from demur.attacks import (
    PGD,
    AcceptedError,
    Attack,
    MinMargin,
    PlusLogScore,
    RejectAutoAttackEnsemble,
    WrongConfidence,
)
from demur.attacks.attack import AttackBatch
from demur.attacks.attack_model import AttackModel, Gradient, Model, ObjectiveFunction, attack_model
from demur.attacks.autoattack import Chain, RejectVersion
from demur.attacks.balls import Ball, Linf
from demur.attacks.driver import verify_success
from demur.attacks.margins import Margins, margins_at, orthogonal
from demur.attacks.objectives.classification import AttackStart
from demur.calibrate import TPR
from demur.cli.app import AsJson, DataFolder, Device, FirstN, check_finite, main, split_names
from demur.cli.evaluate import RunName, load_run
from demur.cli.progress import on_message
from demur.data import Images
from demur.errors import BadInput
from demur.evaluate import LoadedRun, RecordOptions
from demur.evaluate.binding import ThresholdResolver
from demur.evaluate.record_scores import values
from demur.files.checked_files import write_bytes
from demur.noise import Stream
from demur.output import Output, as_output
from demur.paper import check_svg_file
from demur.recipes import VOCABULARY, Recipe
from demur.rejectors import Coupled
from demur.rejectors.rule import Rejector
from demur.report.plot import CORRECT, FAINT, INK, WRONG, drawing, saved
from demur.report.terminal import show_table, terminal
from demur.runs import provenance
from demur.spec import edit, show
from reports import OutFile, Reports, open_reports, print_report

ANY_NET = ("Con", "Energy", "GDA")  # rejectors that every net has
STEPS = 100
OURS = "reject-autoattack"
COLOURS = {OURS: WRONG, "orthogonal PGD": INK, "product PGD": CORRECT}
Curve = list[tuple[float, int]]  # (gradient queries per image, accepted errors so far)


@dataclass(frozen=True)
class Budget:
    """The version of the ensemble, and the other attacks' queries as a multiple of its own."""

    version: RejectVersion = "fast"
    times: float = 10.0


class CountingModel(AttackModel):
    """A model that counts gradient queries: one per gradient, a third per forward pass."""

    def __init__(self, model: Model) -> None:
        self.model, self.queries = attack_model(model), 0.0
        self.exact = self.model.exact

    def __call__(self, x: Tensor, /) -> Output:
        self.queries += len(x) / 3
        return as_output(self.model(x))

    def gradient(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> Gradient:
        self.queries += len(x)
        return self.model.gradient(objective, x, y, *inputs)

    def value(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Output]:
        self.queries += len(x) / 3
        return self.model.value(objective, x, y, *inputs)

    def drop_graphs(self) -> None:
        self.model.drop_graphs()


@dataclass(frozen=True)
class OrthogonalPGD(Attack):
    """Orthogonal PGD of Bryniarski et al.: misclassify first, then raise the rejection score.

    Each step follows the gradient of one margin, orthogonal to the gradients of the others.
    """

    ball: Ball
    rule: AcceptedError
    seed: int = 0

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        x_adv = self.ball.start(batch.x, self.seed, batch.index, stream)
        objective = MinMargin(self.rule)
        objective_state = objective.prepare(AttackStart(batch.model, batch.x, x_adv, batch.y, None))
        result, alive = batch.x.clone(), torch.arange(len(batch.x), device=batch.x.device)
        for _ in range(STEPS):
            margins, out = margins_at(batch, objective, x_adv, objective_state)
            broken = verify_success(self.rule, batch.model, x_adv, batch.y, self.rule(out, batch.y))
            result[alive], left = x_adv, ~broken
            alive, x_adv = alive[left], x_adv[left]
            batch, margins = batch.select(left), Margins(*(part[left] for part in margins))
            objective_state = tuple(part[left] for part in objective_state)
            if len(alive) == 0:
                return result
            worst_score = margins.values[:, 1:].argmin(1) + 1
            misclassified = margins.values[:, 0] > 0
            chosen = torch.where(misclassified, worst_score, 0)
            grad = orthogonal(margins.grads, chosen).view_as(x_adv)
            x_adv = self.ball.step(batch.x, x_adv, grad, self.ball.eps / 4)
        result[alive] = x_adv
        return result


def rules_by_name(names: Sequence[str], recipe: Recipe) -> dict[str, Rejector]:
    """The rejectors with these names; without names, the head's own and those of every net.

    R-Con is included only if the head's second output is A (Eq. 6).

    Raises:
        BadInput: A net of the recipe has no such rejector.
    """
    known = recipe.rejectors()
    names = [recipe.find_rejector(name) for name in names]
    own = [
        name
        for name in recipe.method.head.rejectors()
        if not (recipe.has_rectifier and name == "A")
    ]
    default = dict.fromkeys((ANY_NET[0], *own, *ANY_NET[1:]))
    return {name: known[name] for name in names or default}


def compare_rejection_attacks(
    loaded: LoadedRun,
    images: Images,
    ball: Ball,
    rules: Mapping[str, Rejector],
    budget: Budget,
    on_message: Callable[[str], None],
    reports: Reports = Reports(),
) -> dict[str, Any]:
    """Attack each rejector with each attack; return the report as JSON values.

    Rules in an earlier report of the same run and code are not attacked again. All thresholds are
    set before the first attack, so that a rejector that cannot be fitted fails early.
    """
    results: dict[str, Any] = {}
    report = {
        "run": loaded.run.name,
        "recipe": show(loaded.run.recipe, full=True),
        "weights": loaded.run.checkpoint["weights"],
        "machine": provenance(loaded.device),
        "n": len(images),
        "ball": show(ball),
        "version": budget.version,
        "times": budget.times,
        "rules": results,
    }
    results.update(reports.known(report, "rules") or {})
    remaining = [name for name in rules if name not in results]
    criteria = {name: _criterion(loaded, rules[name], len(images)) for name in remaining}
    for name, rule in criteria.items():
        curves = _curves(
            loaded, images, ball, rule, budget, partial(_prefix_message, on_message, name)
        )
        results[name] = {"rule": show(rules[name]), "threshold": rule.threshold, "curves": curves}
        reports.keep(report)
    return report


def _prefix_message(on_message: Callable[[str], None], name: str, sentence: str) -> None:
    on_message(f"{name}: {sentence}")


def _curves(
    loaded: LoadedRun,
    images: Images,
    ball: Ball,
    rule: AcceptedError,
    budget: Budget,
    on_message: Callable[[str], None],
) -> dict[str, Curve]:
    """The curve of the ensemble, and those of the other attacks at a multiple of its queries."""
    ensemble = RejectAutoAttackEnsemble(ball, rule, version=budget.version)
    on_message("reject-autoattack")
    ours = _curve(loaded, images, rule, iter(ensemble.chain().attacks), None)
    curves, max_queries = {"reject-autoattack": ours}, budget.times * ours[-1][0]
    for label, attacks in _baselines(ball, rule).items():
        on_message(f"{label}, up to {max_queries:.0f} gradient queries per image")
        curves[label] = _curve(loaded, images, rule, attacks, max_queries)
    return curves


def _criterion(loaded: LoadedRun, rejector: Rejector, count: int) -> AcceptedError:
    """AcceptedError at the threshold that accepts 95% of the correct clean predictions."""
    clean = loaded.clean("test")
    score = ThresholdResolver(loaded.clean, loaded.device).bound(rejector)
    if isinstance(rejector, Coupled):
        return AcceptedError(score, 0.5)  # the paper accepts if both scores exceed 1/2
    return AcceptedError(
        score, TPR(0.95).threshold(values(score, clean)[:count], clean.correct[:count])
    )


def _baselines(ball: Ball, rule: AcceptedError) -> dict[str, Iterator[Attack]]:
    """The simpler attacks: each an endless sequence of restarts of one attack."""
    product = PlusLogScore(rule.rejector, base_objective=WrongConfidence())
    return {
        "orthogonal PGD": (OrthogonalPGD(ball, rule, seed=seed) for seed in count()),
        "product PGD": (
            PGD(ball, steps=STEPS, objective=product, keep="success", criterion=rule, seed=seed)
            for seed in count()
        ),
    }


def _curve(
    loaded: LoadedRun,
    images: Images,
    rule: AcceptedError,
    attacks: Iterator[Attack],
    max_queries: float | None,
) -> Curve:
    """Queries and accepted errors after each attack, until none is left or `max_queries`."""
    curve: Curve = []
    with loaded.attack_model(len(images)) as model:
        counting = CountingModel(model)
        batch = AttackBatch(counting, *loaded.batch_in_layout(images, slice(None)), None)
        left = torch.arange(len(images), device=batch.x.device)
        for member, attack in enumerate(attacks):
            x_adv = Chain((attack,), rule).run(batch.select(left), stream=member)
            with torch.no_grad():
                left = left[~rule(counting(x_adv), batch.y[left])]
            curve.append((counting.queries / len(images), len(images) - len(left)))
            if len(left) == 0 or (max_queries is not None and curve[-1][0] >= max_queries):
                break
    return curve


def show_peer_rejection(report: dict[str, Any]) -> None:
    """Print one line per rule: accepted errors, and gradient queries per image."""
    table = Table(
        box=box.SIMPLE_HEAD, title_justify="left",
        title=f"{report['run']}, {report['ball']}: wrong and accepted, of {report['n']} images",
    )  # fmt: skip
    for column in ("rule", *COLOURS):
        table.add_column(column, justify="left" if column == "rule" else "right")
    for name, about in report["rules"].items():
        ends = [about["curves"][label][-1] for label in COLOURS]
        table.add_row(name, *(f"{errors} at {queries:,.0f}" for queries, errors in ends))
    show_table(table)
    terminal().print(
        f"errors at gradient queries per image (a forward pass counts a third); the other attacks "
        f"get {report['times']:g} times as many queries"
    )


def peer_rejection_svg(report: dict[str, Any]) -> bytes:
    """Draw one panel per rule: accepted errors against gradient queries per image."""
    rules = report["rules"]
    with drawing(2.5 * len(rules), 2.6) as figure:
        panels = figure.subplots(1, len(rules), squeeze=False)[0]
        for axes, (name, about) in zip(panels, rules.items(), strict=True):
            for label, curve in about["curves"].items():
                queries, errors = zip(*curve, strict=True)
                axes.plot(queries, errors, color=COLOURS[label], linewidth=1.6, marker=".",
                          markersize=4, label=label)  # fmt: skip
            axes.set_xscale("log")
            axes.set_title(name, fontsize=9)
            axes.tick_params(labelsize=7, colors=FAINT)
            axes.set_xlabel("gradient queries per image", fontsize=8)
        panels[0].set_ylabel(f"wrong and accepted, of {report['n']}", fontsize=8)
        panels[-1].legend(fontsize=7, frameon=False)
        return saved(figure, "svg")


program = typer.Typer(
    name="python benchmarks/peer_rejection.py",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@program.command()
def rejection(
    run: RunName,
    n: FirstN = None,
    only: Annotated[str, typer.Option(help="Only these rejectors, such as Con,R-Con,GDA.")] = "",
    version: Annotated[
        str, typer.Option(help="Version of reject-autoattack: fast or standard.")
    ] = "fast",
    times: Annotated[
        float,
        typer.Option(
            min=0.0,
            callback=check_finite,
            help="Gradient queries of the other attacks, as a multiple.",
        ),
    ] = 10.0,
    eps: Annotated[
        str | None,
        typer.Option(help="The Linf radius, such as 0.2 or 8/255.", show_default="the data's own"),
    ] = None,
    out: OutFile = None,
    figure: Annotated[
        str | None,
        typer.Option(callback=check_svg_file, help="Draw the curves into this SVG file."),
    ] = None,
    as_json: AsJson = False,
    device: Device = "auto",
    data: DataFolder = None,
) -> None:
    """Compare reject-autoattack with simpler attacks that get ten times its gradient queries."""
    if out and figure and Path(out).resolve() == Path(figure).resolve():
        raise BadInput(f"{out} cannot take both the report and the picture; name two files")
    budget = Budget(_version(version), times)
    loaded = load_run(run, device, data)
    rules = rules_by_name(split_names(only), loaded.run.recipe)
    ball = Linf(loaded.run.recipe.data.threat.linf)
    if eps is not None:
        ball = edit(ball, "eps", eps, VOCABULARY)
    images, reports = loaded.images(RecordOptions(n=n)), open_reports(out, "rules")
    so_far: dict[str, Any] = {}

    def keep(report: dict[str, Any]) -> None:
        so_far.update(report)
        reports.keep(report)

    try:
        growing = replace(reports, keep=keep)
        keep(compare_rejection_attacks(loaded, images, ball, rules, budget, on_message, growing))
    finally:
        if so_far:  # also after an error or Ctrl-C: show the rules that are finished
            _print_and_draw(so_far, out, figure, as_json)


def _version(name: str) -> RejectVersion:
    """Return the version of that name; raise BadInput where there is none."""
    versions: tuple[RejectVersion, ...] = get_args(RejectVersion)
    for version in versions:
        if version == name:
            return version
    raise BadInput(f"the version must be {' or '.join(versions)}, not {name!r}")


def _print_and_draw(
    report: dict[str, Any], out: str | None, figure: str | None, as_json: bool
) -> None:
    """Print the report as a table or JSON, write it to `out` and draw its curves into `figure`."""
    print_report(report, show_peer_rejection, out, as_json)
    if figure:
        write_bytes(Path(figure), peer_rejection_svg(report))


if __name__ == "__main__":
    main(program)
