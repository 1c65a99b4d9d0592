"""One attack against each wrong class in turn, or against the most promising ones.

    MultiTarget(PGD(Linf(8/255), steps=100, step_size=2/255, objective=TargetedMargin(), restarts=20))

Gowal et al. 2019. With `keep="success"` only images that are not yet broken go on.
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
    """`attack` with a target for each image: its best wrong class first, then the next.

    largest: of all targets the image with the largest `by`; criterion: the first that breaks.
    """

    attack: Attack
    targets: PositiveInt | None = None  # None: every wrong class
    keep: Literal["max_objective", "success"] = "max_objective"
    rank_by: Objective = CE()  # reference code: chosen by cross-entropy
    criterion: Criterion = Misclassified()

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        """Attacked images, kept over all targets."""
        best, alive = batch.x.clone(), torch.arange(len(batch.x), device=batch.x.device)
        objective_state = self.rank_by.prepare(
            AttackStart(batch.model, batch.x, batch.x, batch.y, None)
        )
        inputs = self.rank_by.at_step(objective_state, 0, 1)
        best_value, out = exact_value(batch.model, self.rank_by, batch.x, batch.y, *inputs)
        if self.keep == "success":
            alive = alive[~self.criterion(out, batch.y)]
        else:
            best_value = torch.full_like(best_value, -torch.inf)
        for member, wanted in enumerate(self._targets(out.logits, batch.y)):
            if len(alive) == 0:
                break
            left = replace(batch, target=wanted).select(alive)
            x_adv = self.attack.run(left, noise.derived(stream, member))
            value, ends = self._worth(left, x_adv, [part[alive] for part in inputs])
            better = ends | (value > best_value[alive])
            best[alive[better]] = x_adv[better]
            best_value[alive[better]] = value[better]
            alive = alive[~ends]
        return best

    def _worth(
        self, batch: AttackBatch, x_adv: Tensor, inputs: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """What a try is worth, and which images are done with."""
        value, out = exact_value(batch.model, self.rank_by, x_adv, batch.y, *inputs)
        broken = self.criterion(out, batch.y)
        return value, broken if self.keep == "success" else torch.zeros_like(broken)

    def _targets(self, logits: Tensor, y: Tensor) -> Tensor:
        """The wrong classes of each image, the best first: targets, N."""
        classes = logits.shape[-1]
        true = one_hot(y, classes).bool()
        ranked = logits.masked_fill(true, -torch.inf).argsort(-1, descending=True)
        return ranked[:, : min(self.targets or classes, classes - 1)].t()
