"""PGD on a randomised model: expectation over its random draws (EOT, Athalye et al. 2018).

Each step follows the mean gradient of several passes. No image leaves at a lucky success: restarts
are compared by their shares of successes in fresh passes.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from demur import noise, progress
from demur.attacks.attack import Attack, AttackBatch
from demur.attacks.balls import Ball
from demur.attacks.criteria import Criterion, Misclassified
from demur.attacks.driver import Found
from demur.attacks.objectives.classification import Objective, ObjectiveState, wrong_classes
from demur.attacks.objectives.rejector import SuccessProbability
from demur.images import per_image
from demur.noise import Stream
from demur.numerics import use_precision
from demur.output import as_output
from demur.spec.field_types import NonNegativeInt, PositiveInt

MOMENTUM = 0.7  # share of the earlier gradients in a step: they are draws, too
WIDTH_MEMORY = 0.7  # share of the earlier widths, since a few passes estimate them roughly


@dataclass(frozen=True)
class EOTPGD(Attack):
    """PGD with momentum on the mean objective of a randomised model.

    The step size falls from eps to zero along a cosine, so that the last iterate is an average of
    many gradients. It is what a restart returns. An image leaves only if all `passes` that judge a
    restart succeed; a single restart is not judged.
    """

    ball: Ball
    steps: PositiveInt = 40
    restarts: PositiveInt = 1
    objective: Objective | None = None  # `SuccessProbability` of the criterion
    criterion: Criterion = Misclassified()
    eot_iter: PositiveInt = 5  # passes whose gradients a step averages
    passes: PositiveInt = 50
    targeted: bool = False  # each restart aims at another wrong class, by decreasing mean logit
    seed: NonNegativeInt = 0

    @property
    def search_objective(self) -> Objective:
        return self.objective or SuccessProbability(self.criterion)

    @property
    def maximised(self) -> Objective | None:
        return self.objective  # a share of successes need not rise where no pass succeeds

    @property
    def gradient_queries(self) -> float:
        return float(self.steps * self.restarts * self.eot_iter)

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        targets, found = self._targets(batch), Found.nothing(batch)
        for number, rows in found.attempts(self.restarts):
            own = replace(batch, stream=noise.derive_seed(stream, number))
            if targets is not None:
                own = replace(own, target=targets[number % len(targets)])
            own = own.select(rows)
            with progress.part(number, self.restarts):
                x_adv = self._ascend(own)
            share = torch.zeros_like(found.value[rows])
            if self.restarts > 1:
                share = success_share(self.criterion, own, x_adv, self.passes).to(share)
            found.add(rows, Found(x_adv, share, share == 1))
        return found.x_adv

    def _targets(self, batch: AttackBatch) -> Tensor | None:
        """Return the wrong classes of each image by decreasing mean logit, shape (classes-1, N)."""
        if not self.targeted or batch.target is not None:
            return None
        with torch.no_grad():
            logits = [as_output(batch.model(batch.x)).logits for _ in range(self.eot_iter)]
        return wrong_classes(torch.stack(logits).mean(0), batch.y)

    def _ascend(self, batch: AttackBatch) -> Tensor:
        x_adv = self.ball.start(batch.x, self.seed, batch.index, batch.stream)
        objective = self.search_objective
        state = batch.prepare(objective, x_adv).objective_state
        momentum = torch.zeros_like(x_adv)
        for step in range(self.steps):
            grad, state = self._mean_gradient(batch, x_adv, state, step)
            size = grad.flatten(1).abs().mean(1).clamp_min(1e-30)
            momentum = MOMENTUM * momentum + (1 - MOMENTUM) * grad / per_image(size, grad)
            length = self.ball.eps * (1 + math.cos(math.pi * step / self.steps)) / 2
            x_adv = self.ball.project(batch.x, x_adv + length * self.ball.direction(momentum))
            progress.report(step + 1, self.steps)
        return x_adv

    def _mean_gradient(
        self, batch: AttackBatch, x_adv: Tensor, state: ObjectiveState, step: int
    ) -> tuple[Tensor, ObjectiveState]:
        """Return the mean gradient of fresh passes, and the objective's state with new widths."""
        objective, grad, margins = self.search_objective, torch.zeros_like(x_adv), []
        inputs = objective.at_step(state, step, self.steps)
        for _ in range(self.eot_iter):
            query = batch.model.gradient(objective, x_adv, batch.y, *inputs)
            grad += query.grad / self.eot_iter
            if isinstance(objective, SuccessProbability):
                margins.append(objective.margins(query.out, batch.y, state[0]))
        if isinstance(objective, SuccessProbability):
            new = objective.widths(torch.stack(margins))
            state = state[0], WIDTH_MEMORY * state[1] + (1 - WIDTH_MEMORY) * new
        return grad, state


def success_share(criterion: Criterion, batch: AttackBatch, x: Tensor, passes: int) -> Tensor:
    """Return the share of exact forward passes in which the criterion holds, N, float."""
    with torch.no_grad(), use_precision("fp32", x.device):
        found = [criterion(as_output(batch.model(x)), batch.y) for _ in range(passes)]
    return torch.stack(found).float().mean(0)
