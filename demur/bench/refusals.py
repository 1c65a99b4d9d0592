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

from demur.attacks import PGD, Attack, Evade, Least, RejectAutoAttack, Slips, WrongCon
from demur.attacks.chain import Chain
from demur.attacks.goals import Moment
from demur.attacks.margins import margins_at
from demur.attacks.orthogonal import orthogonal
from demur.attacks.rejecting import RejectVersion
from demur.attacks.victims import Victims, confirmed
from demur.balls import Ball
from demur.bench.reports import Reports
from demur.calibrate import TPR
from demur.data import Images
from demur.errors import BadInput, suggestion
from demur.evaluate import Source
from demur.evaluate.binding import Binding
from demur.evaluate.values import values
from demur.gradient import GoalFunction, Gradient, Model, glance, gradient
from demur.noise import Stream
from demur.output import Output, output_of
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


class Counted(nn.Module):
    """A model that counts how often it is looked at."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = (model,)  # in a tuple, so that it is not this module's
        self.looks = 0.0
        self.training = bool(getattr(model, "training", False))
        self.exact = bool(getattr(model, "exact", True))

    def forward(self, x: Tensor) -> Output:
        """The model's answer, a third of a look."""
        self.looks += len(x) / 3
        return output_of(self._model[0](x))

    def gradient(self, goal: GoalFunction, x: Tensor, y: Tensor, *given: Tensor) -> Gradient:
        """The model's gradient, one look."""
        self.looks += len(x)
        return gradient(self._model[0], goal, x, y, *given)

    def value(
        self, goal: GoalFunction, x: Tensor, y: Tensor, *given: Tensor
    ) -> tuple[Tensor, Output]:
        """The model's rough value, a third of a look."""
        self.looks += len(x) / 3
        return glance(self._model[0], goal, x, y, *given)

    def forget(self) -> None:
        """Let the model drop what it recorded."""
        getattr(self._model[0], "forget", lambda: None)()


@dataclass(frozen=True)
class OrthogonalPGD(Attack):
    """Bryniarski et al.'s attack as published: fool first, then please the score, orthogonally."""

    ball: Ball
    rule: Slips
    seed: int = 0

    def against(self, on: Victims, stream: Stream) -> Tensor:
        """What slipped through on the way, and the last iterates of all others."""
        x_adv = self.ball.start(on.x, self.seed, on.index, stream)
        goal = Least(self.rule)
        kept = goal.begin(Moment(on.model, on.x, x_adv, on.y, None))
        found, alive = on.x.clone(), torch.arange(len(on.x), device=on.x.device)
        for _ in range(STEPS):
            margins, out = margins_at(on, goal, x_adv, kept)
            broken = confirmed(self.rule, on.model, x_adv, on.y, self.rule(out, on.y))
            found[alive], left = x_adv, ~broken
            alive, x_adv, on, margins = alive[left], x_adv[left], on.at(left), margins.at(left)
            kept = tuple(part[left] for part in kept)
            if len(alive) == 0:
                return found
            behind = margins.values[:, 1:].argmin(1) + 1
            chosen = torch.where(margins.values[:, 0] > 0, behind, 0)
            grad = orthogonal(margins.grads, chosen).view_as(x_adv)
            x_adv = self.ball.step(on.x, x_adv, grad, self.ball.eps / 4)
        found[alive] = x_adv
        return found


def rules_named(names: Sequence[str], recipe: Recipe) -> dict[str, Rejector]:
    """The rejectors of these names, if a net of the recipe has them; without names, the usual.

    A second output that is no A is scored by what its head is for, never by R-Con.
    """
    known = recipe.rejectors()
    for name in names:
        if name not in known:
            raise BadInput(f"the run has no rule called {name!r}; {suggestion(name, known)}")
    own = [name for name in recipe.method.head.rejectors() if not (recipe.has_a and name == "A")]
    usual = dict.fromkeys((EVERYWHERE[0], *own, *EVERYWHERE[1:]))
    return {name: known[name] for name in names or usual}


def against_refusals(
    source: Source,
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
        "run": source.run.name,
        "recipe": show(source.run.recipe, full=True),
        "weights": source.run.chosen["weights"],
        "machine": provenance(source.device),
        "n": len(images),
        "ball": show(ball),
        "version": budget.version,
        "times": budget.times,
        "rules": found,
    }
    found.update(reports.known(report, "rules") or {})
    made = {name: _rule(source, rules[name], len(images)) for name in rules if name not in found}
    for name, rule in made.items():
        curves = _curves(source, images, ball, rule, budget, partial(_told, say, name))
        found[name] = {"rule": show(rules[name]), "threshold": rule.at, "curves": curves}
        reports.keep(report)
    return report


def _told(say: Callable[[str], None], name: str, doing: str) -> None:
    say(f"{name}: {doing}")


def _curves(
    source: Source,
    images: Images,
    ball: Ball,
    rule: Slips,
    budget: Budget,
    say: Callable[[str], None],
) -> dict[str, Curve]:
    """The curve of the ensemble, and those of the others at their share of its looks."""
    ensemble = RejectAutoAttack(ball, rule, version=budget.version)
    say("reject-autoattack")
    ours = _curve(source, images, rule, iter(ensemble.chain().attacks), None)
    curves, most = {"reject-autoattack": ours}, budget.times * ours[-1][0]
    for label, searches in _others(ball, rule).items():
        say(f"{label}, up to {most:.0f} looks an image")
        curves[label] = _curve(source, images, rule, searches, most)
    return curves


def _rule(source: Source, rejector: Rejector, count: int) -> Slips:
    """The rule at the threshold that keeps 95% of the right answers on the clean images."""
    clean = source.clean("test")
    score = Binding(source.clean, source.device).bound(rejector)
    if isinstance(rejector, Coupled):
        return Slips(score, 0.5)  # the paper's pair: both scores above a half
    return Slips(score, TPR(0.95).threshold(values(score, clean)[:count], clean.correct[:count]))


def _others(ball: Ball, rule: Slips) -> dict[str, Iterator[Attack]]:
    """What the ensemble is held against: endless restarts of one attack each."""
    product = Evade(rule.rejector, fool=WrongCon())
    return {
        "orthogonal PGD": (OrthogonalPGD(ball, rule, seed=seed) for seed in count()),
        "product PGD": (
            PGD(ball, steps=STEPS, goal=product, keep="criterion", criterion=rule, seed=seed)
            for seed in count()
        ),
    }


def _curve(
    source: Source, images: Images, rule: Slips, searches: Iterator[Attack], most: float | None
) -> Curve:
    """What slips through after each attack, until they end or have looked too often."""
    curve: Curve = []
    with source.crafting(len(images)) as model:
        counted = Counted(model)
        on = Victims(counted, *source.laid_out(images, slice(None)), None)
        left = torch.arange(len(images), device=on.x.device)
        for place, attack in enumerate(searches):
            x_adv = Chain((attack,), rule).against(on.at(left), stream=place)
            with torch.no_grad():
                left = left[~rule(counted(x_adv), on.y[left])]
            curve.append((counted.looks / len(images), len(images) - len(left)))
            if len(left) == 0 or (most is not None and curve[-1][0] >= most):
                break
    return curve
