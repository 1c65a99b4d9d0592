"""Successes of minimum-distance attacks that survive the rounding of another forward pass.

The closest adversarial example lies on the decision boundary, where batch size, TF32 and the
algorithm of cuDNN decide the prediction. It is moved away from the clean image until its margins
exceed what such passes differ by.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from demur.attacks.attack_model import Model
from demur.attacks.criteria import AcceptedError, Criterion, Rejected, RuleCriterion
from demur.attacks.objectives.classification import best_wrong
from demur.attacks.objectives.rejector import best_wrong_class
from demur.numerics import tf32
from demur.output import Output, as_output, label_entry, prediction

SLACK = 1e-5  # relative, on logits and thresholds: what passes in fp32 may differ by
PARTS = (1, 2, 8)  # batches into which the images of a pass are split
SAFETY = 2.0  # times the largest difference that was measured
# How far beyond the found example to look, as multiples of its distance. The last ones are for
# clean images on the boundary itself, whose examples are nearly at distance zero.
LADDER = (0.0, *(2.0**power for power in range(-16, 9)))


@dataclass(frozen=True)
class SuccessMargins:
    """The margins by which an attack has succeeded: the logit margin and those of the scores."""

    criterion: Criterion
    confidence: float = 0.0  # the required logit margin

    def holds(self, out: Output, y: Tensor, *target: Tensor) -> Tensor:
        """Return on which images the attack has succeeded, N, bool."""
        success = self.criterion(out, y)
        if self.confidence == 0 or isinstance(self.criterion, Rejected):
            return success
        return success & (logit_margin(out, y, *target) >= self.confidence)

    def margins(self, out: Output, y: Tensor, *target: Tensor) -> Tensor:
        """Return the margins less SLACK, N, M; at a success all of them are positive."""
        slack = SLACK * out.logits.detach().abs().nan_to_num(posinf=0).amax(-1)  # -inf: masked
        margin = logit_margin(out, y, *target)[:, None] - (self.confidence + slack)[:, None]
        if not isinstance(self.criterion, RuleCriterion):
            return margin
        if isinstance(self.criterion, Rejected):  # for any prediction
            return self._decision(out, self.criterion, prediction(out))
        label = target[0] if target else best_wrong_class(out.logits, y)
        return torch.cat((margin, self._decision(out, self.criterion, label)), 1)

    def __call__(
        self, out: Output, y: Tensor, needed: Tensor | None = None, *target: Tensor
    ) -> Tensor:
        """Return the hinge loss of C&W: what the margins lack, in sum, N; 0 at a success."""
        margins = self.margins(out, y, *target)
        return (-margins if needed is None else needed - margins).clamp_min(0).sum(1)

    def _decision(self, out: Output, criterion: RuleCriterion, label: Tensor) -> Tensor:
        """Return the margins of the decision; one low score is enough to reject."""
        sign = 1 if isinstance(criterion, AcceptedError) else -1
        each = [
            sign * score.accept_margin(out, t, label) - SLACK * max(1, abs(t))
            for score, t in criterion.accept_rule.pairs
        ]
        stacked = torch.stack(each, 1)
        return stacked if sign > 0 else stacked.amax(1, keepdim=True)


def logit_margin(out: Output, y: Tensor, *target: Tensor) -> Tensor:
    """Return the margin of the target over the other logits, or of the best wrong class, N."""
    if target:
        return label_entry(out.logits, target[0]) - best_wrong(out.logits, target[0])
    return best_wrong(out.logits, y) - label_entry(out.logits, y)


def rounding_margins(
    success: SuccessMargins, model: Model, x: Tensor, y: Tensor, *target: Tensor
) -> tuple[Tensor, Tensor]:
    """Return margins that rounding does not undo, N, M, and where success is safe already, N, bool.

    The margins are the same for all images, and zero where passes differ by less than SLACK.
    """
    margins, holds = _all_passes(success, model, x, y, *target)
    spread = SAFETY * (margins.amax(0) - margins.amin(0)).nan_to_num().amax(0)  # M
    scale = margins.abs().nan_to_num(posinf=0).amax((0, 1))
    needed = torch.where(spread > SLACK * scale, spread, 0).expand(len(x), -1)
    return needed, holds & (margins.amin(0) >= needed - SLACK * scale).all(1)


def confirmed_outward(
    success: SuccessMargins, model: Model, x: Tensor, x_adv: Tensor, needed: Tensor, y: Tensor,
    *target: Tensor, inside: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return examples that succeed in every pass, and for which images there is one, N, bool.

    An example moves outward by the first step of LADDER at which it has the margins `needed`, N, M,
    from `rounding_margins`. Where there is none, the closest one that succeeds in every pass is
    taken. Other images are returned clean. `target` is the class that should be predicted, if there
    is one; `inside` says whether an example (x, x_adv) may be returned, N, bool, and None allows
    all.
    """
    result, confirmed = x.clone(), torch.zeros_like(y, dtype=torch.bool)
    rows = torch.arange(len(x), device=x.device)  # without a safe example so far
    for step in LADDER:
        moved = (x[rows] + (1 + step) * (x_adv[rows] - x[rows])).clamp(0, 1)
        moved = moved if step else x_adv[rows]
        labels = y[rows], *(part[rows] for part in target)
        margins, holds = _all_passes(success, model, moved, *labels)
        allowed = torch.ones_like(holds) if inside is None else inside(x[rows], moved)
        safe = allowed & holds & (margins.amin(0) >= needed[rows]).all(1)
        taken = safe | (allowed & holds & ~confirmed[rows])
        result[rows[taken]], confirmed[rows[taken]] = moved[taken], True
        rows = rows[allowed & ~safe]
        if len(rows) == 0:
            break
    return result, confirmed


def _all_passes(
    success: SuccessMargins, model: Model, x: Tensor, y: Tensor, *target: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the margins of each pass, P, N, M, and which images succeed in all of them, N."""
    margins, holds = [], torch.ones_like(y, dtype=torch.bool)
    for out in _passes(model, x):
        margins.append(success.margins(out, y, *target))
        holds &= success.holds(out, y, *target)
    return torch.stack(margins), holds


def _passes(model: Model, x: Tensor) -> Iterator[Output]:
    """Yield outputs as the user computes them, and with and without TF32 at other batch sizes."""
    with torch.no_grad():
        yield as_output(model(x))
        for precision in ("fp32", "tf32"):
            with tf32(precision):
                for parts in PARTS:
                    outs = [as_output(model(part)) for part in x.chunk(parts)]
                    yield Output(*(torch.cat(column) for column in zip(*outs, strict=True)))
