"""RejectAutoAttack beside simpler searches that may look ten times as often.

    against_refusals(source, images, ball, rules_named((), recipe), Budget(), say)

Each search is a chain, so after each member it is known what has slipped through and what it
cost. A gradient counts as one look and an answer as a third of one. Thresholds keep 95% of the
right answers on the clean images that are then attacked, the coupled pair has its own: this
compares attacks, not rejectors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from demur.attacks import (
    PGD,
    AcceptedError,
    Attack,
    Evasion,
    MinMargin,
    RejectAutoAttackEnsemble,
    WrongConfidence,
)
from demur.attacks.batch import AttackBatch, verify_success
from demur.attacks.chain import Chain
from demur.attacks.margins import margins_at
from demur.attacks.objectives import AttackStart
from demur.attacks.orthogonal import orthogonal
from demur.attacks.reject_autoattack import RejectVersion
from demur.balls import Ball
from demur.bench.reports import Reports
from demur.calibrate import TPR
from demur.data import Images
from demur.errors import BadInput, suggestion
from demur.evaluate import Evaluator
from demur.evaluate.binding import Binding
from demur.evaluate.record_scores import values
from demur.gradient import Gradient, Model, ObjectiveFunction, approximate_value, gradient
from demur.noise import Stream
from demur.output import Output, as_output
from demur.recipes import Recipe
from demur.rejectors import Coupled
from demur.rule import Rejector
from demur.runs import provenance
from demur.spec import show

EVERYWHERE = ("Con", "Energy", "GDA")  # what every net can be held to
STEPS = 100
Curve = list[tuple[float, int]]  # looks an image, and what has slipped through by then


@dataclass(frozen=True)
class Budget:
    """Which ensemble, and how many times its looks the others get."""

    version: RejectVersion = "fast"
    times: float = 10.0


class CountingModel(nn.Module):
    """A model that counts how often it is looked at."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = (model,)  # in a tuple, so that it is not this module's
        self.queries = 0.0
        self.training = bool(getattr(model, "training", False))
        self.exact = bool(getattr(model, "exact", True))

    def forward(self, x: Tensor) -> Output:
        """The model's answer, a third of a look."""
        self.queries += len(x) / 3
        return as_output(self._model[0](x))

    def gradient(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> Gradient:
        """The model's gradient, one look."""
        self.queries += len(x)
        return gradient(self._model[0], objective, x, y, *inputs)

    def value(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Output]:
        """The model's rough value, a third of a look."""
        self.queries += len(x) / 3
        return approximate_value(self._model[0], objective, x, y, *inputs)

    def forget(self) -> None:
        """Let the model drop what it recorded."""
        getattr(self._model[0], "forget", lambda: None)()


@dataclass(frozen=True)
class OrthogonalPGD(Attack):
    """Bryniarski et al.'s attack as published: fool first, then please the score, orthogonally."""

    ball: Ball
    rule: AcceptedError
    seed: int = 0

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        """What slipped through on the way, and the last iterates of all others."""
        x_adv = self.ball.start(batch.x, self.seed, batch.index, stream)
        objective = MinMargin(self.rule)
        objective_state = objective.prepare(AttackStart(batch.model, batch.x, x_adv, batch.y, None))
        found, alive = batch.x.clone(), torch.arange(len(batch.x), device=batch.x.device)
        for _ in range(STEPS):
            margins, out = margins_at(batch, objective, x_adv, objective_state)
            broken = verify_success(self.rule, batch.model, x_adv, batch.y, self.rule(out, batch.y))
            found[alive], left = x_adv, ~broken
            alive, x_adv, batch, margins = (
                alive[left],
                x_adv[left],
                batch.select(left),
                margins.select(left),
            )
            objective_state = tuple(part[left] for part in objective_state)
            if len(alive) == 0:
                return found
            behind = margins.values[:, 1:].argmin(1) + 1
            chosen = torch.where(margins.values[:, 0] > 0, behind, 0)
            grad = orthogonal(margins.grads, chosen).view_as(x_adv)
            x_adv = self.ball.step(batch.x, x_adv, grad, self.ball.eps / 4)
        found[alive] = x_adv
        return found


def rules_by_name(names: Sequence[str], recipe: Recipe) -> dict[str, Rejector]:
    """The rejectors of these names, if a net of the recipe has them; without names, the usual.

    A second output that is no A is scored by what its head is for, never by R-Con.
    """
    known = recipe.rejectors()
    for name in names:
        if name not in known:
            raise BadInput(f"the run has no rule called {name!r}; {suggestion(name, known)}")
    own = [
        name
        for name in recipe.method.head.rejectors()
        if not (recipe.has_rectifier and name == "A")
    ]
    usual = dict.fromkeys((EVERYWHERE[0], *own, *EVERYWHERE[1:]))
    return {name: known[name] for name in names or usual}


def compare_rejection_attacks(
    evaluator: Evaluator,
    images: Images,
    ball: Ball,
    rules: Mapping[str, Rejector],
    budget: Budget,
    say: Callable[[str], None],
    reports: Reports = Reports(),
) -> dict[str, Any]:
    """The whole report as JSON values; rules that an earlier one of the same holds are its.

    Every rule is made before any attack, so that one that cannot be costs nothing.
    """
    found: dict[str, Any] = {}
    report = {
        "run": evaluator.run.name,
        "recipe": show(evaluator.run.recipe, full=True),
        "weights": evaluator.run.checkpoint["weights"],
        "machine": provenance(evaluator.device),
        "n": len(images),
        "ball": show(ball),
        "version": budget.version,
        "times": budget.times,
        "rules": found,
    }
    found.update(reports.known(report, "rules") or {})
    made = {name: _rule(evaluator, rules[name], len(images)) for name in rules if name not in found}
    for name, rule in made.items():
        curves = _curves(evaluator, images, ball, rule, budget, partial(_told, say, name))
        found[name] = {"rule": show(rules[name]), "threshold": rule.threshold, "curves": curves}
        reports.keep(report)
    return report


def _told(say: Callable[[str], None], name: str, doing: str) -> None:
    say(f"{name}: {doing}")


def _curves(
    evaluator: Evaluator,
    images: Images,
    ball: Ball,
    rule: AcceptedError,
    budget: Budget,
    say: Callable[[str], None],
) -> dict[str, Curve]:
    """The curve of the ensemble, and those of the others at their share of its looks."""
    ensemble = RejectAutoAttackEnsemble(ball, rule, version=budget.version)
    say("reject-autoattack")
    ours = _curve(evaluator, images, rule, iter(ensemble.chain().attacks), None)
    curves, most = {"reject-autoattack": ours}, budget.times * ours[-1][0]
    for label, searches in _others(ball, rule).items():
        say(f"{label}, up to {most:.0f} looks an image")
        curves[label] = _curve(evaluator, images, rule, searches, most)
    return curves


def _rule(evaluator: Evaluator, rejector: Rejector, count: int) -> AcceptedError:
    """The rule at the threshold that keeps 95% of the right answers on the clean images."""
    clean = evaluator.clean("test")
    score = Binding(evaluator.clean, evaluator.device).bound(rejector)
    if isinstance(rejector, Coupled):
        return AcceptedError(score, 0.5)  # the paper's pair: both scores above a half
    return AcceptedError(
        score, TPR(0.95).threshold(values(score, clean)[:count], clean.correct[:count])
    )


def _others(ball: Ball, rule: AcceptedError) -> dict[str, Iterator[Attack]]:
    """What the ensemble is held against: endless restarts of one attack each."""
    product = Evasion(rule.rejector, base_objective=WrongConfidence())
    return {
        "orthogonal PGD": (OrthogonalPGD(ball, rule, seed=seed) for seed in count()),
        "product PGD": (
            PGD(ball, steps=STEPS, objective=product, keep="success", criterion=rule, seed=seed)
            for seed in count()
        ),
    }


def _curve(
    evaluator: Evaluator,
    images: Images,
    rule: AcceptedError,
    searches: Iterator[Attack],
    most: float | None,
) -> Curve:
    """What slips through after each attack, until they end or have looked too often."""
    curve: Curve = []
    with evaluator.crafting(len(images)) as model:
        counted = CountingModel(model)
        batch = AttackBatch(counted, *evaluator.laid_out(images, slice(None)), None)
        left = torch.arange(len(images), device=batch.x.device)
        for member, attack in enumerate(searches):
            x_adv = Chain((attack,), rule).run(batch.select(left), stream=member)
            with torch.no_grad():
                left = left[~rule(counted(x_adv), batch.y[left])]
            curve.append((counted.queries / len(images), len(images) - len(left)))
            if len(left) == 0 or (most is not None and curve[-1][0] >= most):
                break
    return curve
