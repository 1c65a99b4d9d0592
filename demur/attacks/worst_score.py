"""The highest score that a wrong prediction reaches in the ball, for every image.

The share of images whose highest score reaches t is the accepted-error rate at the threshold t, for
every t, and falls as t rises by construction.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from demur import noise, progress
from demur.attacks.apgd import APGD
from demur.attacks.attack import Attack, AttackBatch, RuleCriterion, is_wrong
from demur.attacks.attack_model import Gradient, exact_value
from demur.attacks.balls import Ball
from demur.attacks.driver import Best
from demur.attacks.objectives.classification import TargetedMargin, wrong_classes
from demur.attacks.objectives.rejector import TargetedLogScore, TargetedScore
from demur.errors import BadInput
from demur.noise import Stream
from demur.output import Output
from demur.rejectors.rule import OperatingPoint, Rejector, Score, Unresolved, as_score
from demur.spec import later
from demur.spec.field_types import NonNegativeInt, PositiveInt

RANDOMISED = (
    "worst-score compares scores of single passes, and this model returns another output for the "
    "same images; use reject-autoattack:version=rand, which judges by fresh passes"
)


@dataclass(frozen=True)
class ScoreAscent(APGD):
    """Auto-PGD on an objective with a target that compares iterates by its `rank`."""

    objective: TargetedScore | TargetedLogScore = field(kw_only=True)

    def _query(self, batch: AttackBatch, x_adv: Tensor, step: int) -> tuple[Gradient, Tensor]:
        query, candidate = super()._query(batch, x_adv, step)
        rank = self.objective.rank(query.out, batch.y, *batch.objective_state)
        return query._replace(value=rank), candidate


@dataclass(frozen=True)
class WorstScore(Attack):
    """For each image, the wrong prediction with the highest score that is found in the ball.

    Auto-PGD towards each wrong class, on `TargetedScore` and on `TargetedLogScore`: one finds more
    for most nets, the other where gradients mislead. The likeliest wrong classes have a second run
    of both. Images on which no prediction is wrong yet are attacked on the margin of each class
    alone. Examples are compared by their score in an exact forward pass. An image on which no
    prediction became wrong is returned unchanged. A coupled rejector keeps the threshold of its
    gate; the score is the second one.

    Args:
        ball: Where adversarial examples may lie, for instance Linf(8/255).
        rejector: The rejector or its score, one or a coupled pair.
        steps: The steps towards each class.
        targets: The number of wrong classes, by decreasing logit; None is every one.
        again: The number of wrong classes, the likeliest ones, that have a second run.
        restarts: The number of times that all this is done.
        seed: The seed of the random starts.
        threshold: The largest threshold of interest, such as TPR(0.4). Restarts leave out
            images whose worst score has reached it. None leaves out no image.

    Raises:
        BadInput: The model is randomised: scores of single passes cannot be compared.

    Example:
        >>> import torch
        >>> from demur import Con, Linf, WorstScore
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> attack = WorstScore(Linf(8 / 255), Con(), steps=10, targets=3)
        >>> x_adv = attack(model, torch.rand(4, 1, 8, 8), torch.arange(4))
    """

    VERSION: ClassVar[int] = 3  # version 1 had the first objective alone, version 2 no second run

    ball: Ball
    rejector: Rejector | Score
    steps: PositiveInt = 100
    targets: PositiveInt | None = 9
    again: NonNegativeInt = field(default=3, metadata={"since": 3})
    restarts: PositiveInt = 1
    seed: NonNegativeInt = 0
    threshold: float | OperatingPoint | None = field(default=None, metadata=later(neutral=None))

    @classmethod
    def example(cls, ball: Ball, criterion: RuleCriterion) -> Attack:
        return cls(ball, criterion.rejector)

    @property
    def gradient_queries(self) -> float:
        *by_score, margin = (ascent.gradient_queries for ascent in self.ascents)
        targets = self.targets or 1
        each = (targets + min(self.again, targets)) * sum(by_score) + targets * margin
        return self.restarts * each

    @property
    def ascents(self) -> tuple[APGD, ...]:
        """The attacks towards one class; the last is for images without a wrong prediction."""
        own: Any = {"keep": "max_objective", "seed": self.seed}
        by_score = (
            ScoreAscent(self.ball, self.steps, objective=objective(self.rejector), **own)
            for objective in (TargetedScore, TargetedLogScore)
        )
        return *by_score, APGD(self.ball, self.steps, objective=TargetedMargin(), **own)

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        value, out = exact_value(batch.model, self._wrong_score, batch.x, batch.y)
        _, again = exact_value(batch.model, self._wrong_score, batch.x, batch.y)
        parts = ((out.logits, again.logits), (out.aux, again.aux))
        if not all(torch.allclose(*pair, rtol=1e-3, atol=1e-3) for pair in parts):
            raise BadInput(RANDOMISED)
        found = Best(batch.x.clone(), value)
        targets = wrong_classes(out.logits, batch.y, self.targets)  # T, N
        *by_score, _ = self.ascents
        second = [(ascent, target) for ascent in by_score for target in targets[: self.again]]
        once = second + [(ascent, target) for ascent in self.ascents for target in targets]
        attempts = self.restarts * len(once)
        for number in range(attempts):
            ascent, target = once[number % len(once)]
            still = found.value < (self._enough if number >= len(once) else torch.inf)
            if not isinstance(ascent, ScoreAscent):
                still &= found.value == -torch.inf
            rows = still.nonzero()[:, 0]
            if len(rows) == 0:
                continue
            own = replace(batch.select(rows), target=target[rows])
            with progress.part(number, attempts):
                x_adv = ascent.run(own, noise.derive_seed(stream, number))
            value, _ = exact_value(batch.model, self._wrong_score, x_adv, own.y)
            better = value > found.value[rows]
            found.set(rows[better], x_adv[better], value[better])
        return found.x_adv

    @property
    def _enough(self) -> float:
        if isinstance(self.threshold, OperatingPoint):
            raise Unresolved(f"{self.threshold} is no number; call demur.resolve_thresholds first")
        return torch.inf if self.threshold is None else self.threshold

    def _wrong_score(self, out: Output, y: Tensor) -> Tensor:
        """Return the score where the prediction is wrong, and -inf where it is correct, N."""
        return as_score(self.rejector)(out).masked_fill(~is_wrong(out, y), -torch.inf)
