"""The multi-targeted attack (Gowal et al. 2019): one attack towards each wrong class in turn.

    MultiTarget(PGD(Linf(8/255), steps=100, objective=TargetedMargin(), restarts=20))

With keep="max_objective" the example with the largest cross-entropy is returned, as in the
reference code.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from demur import noise
from demur.attacks.attack import Attack
from demur.attacks.batch import AttackBatch
from demur.attacks.criteria import Criterion, Misclassified
from demur.attacks.objectives import CE, AttackStart, Objective
from demur.field_types import PositiveInt
from demur.gradient import exact_value
from demur.noise import Stream


@dataclass(frozen=True)
class MultiTarget(Attack):
    """A targeted attack towards the wrong classes of each image, by decreasing logit.

    Args:
        attack: The attack to run for each target.
        targets: The number of targets; None is every wrong class.
        keep: "max_objective" returns the example with the largest `rank_by` over all targets.
            "success" returns the first success; images leave after it.
        rank_by: The objective that compares examples.
        criterion: The success criterion, used by keep="success".
    """

    attack: Attack
    targets: PositiveInt | None = None
    keep: Literal["max_objective", "success"] = "max_objective"
    rank_by: Objective = CE()
    criterion: Criterion = Misclassified()

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        best, rows = batch.x.clone(), torch.arange(len(batch.x), device=batch.x.device)
        objective_state = self.rank_by.prepare(
            AttackStart(batch.model, batch.x, batch.x, batch.y, None)
        )
        inputs = self.rank_by.at_step(objective_state, 0, 1)
        best_value, out = exact_value(batch.model, self.rank_by, batch.x, batch.y, *inputs)
        if self.keep == "success":
            rows = rows[~self.criterion(out, batch.y)]
        else:
            best_value = torch.full_like(best_value, -torch.inf)
        for number, target in enumerate(self._targets(out.logits, batch.y)):
            if len(rows) == 0:
                break
            selected = replace(batch, target=target).select(rows)
            x_adv = self.attack.run(selected, noise.derive_seed(stream, number))
            value, done = self._evaluate(selected, x_adv, [part[rows] for part in inputs])
            better = done | (value > best_value[rows])
            best[rows[better]] = x_adv[better]
            best_value[rows[better]] = value[better]
            rows = rows[~done]
        return best

    def _evaluate(
        self, batch: AttackBatch, x_adv: Tensor, inputs: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the value of `rank_by`, N, and which images need no further target, N, bool."""
        value, out = exact_value(batch.model, self.rank_by, x_adv, batch.y, *inputs)
        success = self.criterion(out, batch.y)
        return value, success if self.keep == "success" else torch.zeros_like(success)

    def _targets(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the wrong classes of each image by decreasing logit, shape (targets, N)."""
        classes = logits.shape[-1]
        is_true = one_hot(y, classes).bool()
        ranked = logits.masked_fill(is_true, -torch.inf).argsort(-1, descending=True)
        return ranked[:, : min(self.targets or classes, classes - 1)].t()
