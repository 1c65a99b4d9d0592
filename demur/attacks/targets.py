"""One attack against each wrong class in turn, or against the most promising ones.

    EachTarget(PGD(Linf(8/255), steps=100, step=2/255, goal=Toward(), restarts=20))

Gowal et al. 2019. With `keep="criterion"` only images that are not yet broken go on.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from demur import noise
from demur.attacks.attack import Attack
from demur.attacks.criteria import Criterion, Wrong
from demur.attacks.goals import CE, Goal, Moment
from demur.attacks.victims import Victims
from demur.declared import Count
from demur.gradient import value_at
from demur.noise import Stream


@dataclass(frozen=True)
class EachTarget(Attack):
    """`attack` with a target for each image: its best wrong class first, then the next.

    largest: of all targets the image with the largest `by`; criterion: the first that breaks.
    """

    attack: Attack
    targets: Count | None = None  # None: every wrong class
    keep: Literal["largest", "criterion"] = "largest"
    by: Goal = CE()  # reference code: chosen by cross-entropy
    criterion: Criterion = Wrong()

    def against(self, on: Victims, stream: Stream) -> Tensor:
        """Attacked images, kept over all targets."""
        best, alive = on.x.clone(), torch.arange(len(on.x), device=on.x.device)
        kept = self.by.begin(Moment(on.model, on.x, on.x, on.y, None))
        given = self.by.given(kept, 0, 1)
        best_value, out = value_at(on.model, self.by, on.x, on.y, *given)
        if self.keep == "criterion":
            alive = alive[~self.criterion(out, on.y)]
        else:
            best_value = torch.full_like(best_value, -torch.inf)
        for place, wanted in enumerate(self._targets(out.logits, on.y)):
            if len(alive) == 0:
                break
            left = replace(on, target=wanted).at(alive)
            x_adv = self.attack.against(left, noise.derived(stream, place))
            value, ends = self._worth(left, x_adv, [part[alive] for part in given])
            better = ends | (value > best_value[alive])
            best[alive[better]] = x_adv[better]
            best_value[alive[better]] = value[better]
            alive = alive[~ends]
        return best

    def _worth(self, on: Victims, x_adv: Tensor, given: list[Tensor]) -> tuple[Tensor, Tensor]:
        """What a try is worth, and which images are done with."""
        value, out = value_at(on.model, self.by, x_adv, on.y, *given)
        broken = self.criterion(out, on.y)
        return value, broken if self.keep == "criterion" else torch.zeros_like(broken)

    def _targets(self, logits: Tensor, y: Tensor) -> Tensor:
        """The wrong classes of each image, the best first: targets, N."""
        classes = logits.shape[-1]
        true = one_hot(y, classes).bool()
        ranked = logits.masked_fill(true, -torch.inf).argsort(-1, descending=True)
        return ranked[:, : min(self.targets or classes, classes - 1)].t()
