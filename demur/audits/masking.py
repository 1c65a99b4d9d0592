"""Signs that a model masks its gradients, so that attacks without them must run as well.

    evidence = probe_masking(model, ball, x, y)         # a few forward passes per clean image
    for sentence in masking_signs(evidence): ...

None of them proves anything. A sign makes the ensembles run HopSkipJump, RayS and a surrogate.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from demur.attacks import APGD, Attack, Criterion, HopSkipJump, Misclassified, UntargetedMargin
from demur.attacks.attack import AttackBatch
from demur.attacks.attack_model import CheckedModel, Model, NoGradientError, exact_value
from demur.attacks.autoattack import Chain, decision_attacks
from demur.attacks.balls import Ball
from demur.attacks.criteria import AcceptedError, RuleCriterion
from demur.attacks.decision import BoundarySearch
from demur.attacks.surrogate import OutcomeMargin, SurrogateGradients, distil
from demur.audits.model_checks import zero_score_gradients
from demur.errors import BadInput

PROBE_QUERIES = 100  # to find a point on the decision boundary
ON_BOUNDARY = 1e-5  # relative distance of that point to the boundary
JUMP = 0.05  # margin there, relative to the clean one, above which the logits jump
STEP = 1e-3  # of the pixel range, along the gradient
LEAST_RISE = 0.25  # of the margin on that step, relative to what the gradient says
SHARE = 0.1  # of the images that show a sign
SQUARE_SHARE = 0.01  # of the images that no gradient attack breaks
COMPLETE = ("standard", "plus")  # versions after which the attacks on masking run
SURROGATE = "surrogate"  # the attack with the gradients of another net


class MaskingEvidence(NamedTuple):
    """What clean images and the attacks so far show: numbers of images."""

    images: int = 0  # that were probed
    flat: int = 0  # without a gradient
    wrong: int = 0  # whose margin does not rise along its gradient as the gradient says
    jumps: int = 0  # at whose decision boundary the margin jumps
    by_square: int = 0  # that Square broke, of `left_to_square`
    left_to_square: int = 0  # that no gradient attack broke


def masking_signs(evidence: MaskingEvidence) -> list[str]:
    """Return one sentence for each sign of masked gradients."""
    images, flat, wrong, jumps, by_square, left = evidence
    found = (
        (flat, images, "the margin has no gradient for {} of {} images"),
        (wrong, images, "the margin does not follow its gradient for {} of {} images"),
        (jumps, images, "the logits jump at the decision boundary of {} of {} images"),
    )
    signs = [text.format(count, n) for count, n, text in found if count > SHARE * n]
    if by_square > max(1, SQUARE_SHARE * left):
        signs.append(f"Square broke {by_square} of {left} images that no gradient attack broke")
    return signs


def probe_masking(model: CheckedModel, ball: Ball, x: Tensor, y: Tensor) -> MaskingEvidence:
    """Return what the margin does along its gradient and at the boundary of each image."""
    margin, _ = exact_value(model, UntargetedMargin(), x, y)
    right = (margin < 0).nonzero()[:, 0]
    if len(right) == 0:
        return MaskingEvidence()
    x, y, margin = x[right], y[right], margin[right]
    flat, wrong = _gradient_faults(model, x, y, margin)
    return MaskingEvidence(len(x), flat, wrong, _boundary_jumps(model, ball, x, y, margin))


def _gradient_faults(model: CheckedModel, x: Tensor, y: Tensor, margin: Tensor) -> tuple[int, int]:
    """Return the number of images without a gradient, and with one that leads nowhere."""
    try:
        grad = model.gradient(UntargetedMargin(), x, y).grad
    except NoGradientError:
        return len(x), 0
    # Away from the nearer end of the pixel range, so that no step is cut off.
    free = torch.where(x < 0.5, grad > 0, grad < 0)
    delta = STEP * grad.sign() * free
    expected = (delta * grad).flatten(1).sum(1)
    risen = exact_value(model, UntargetedMargin(), x + delta, y)[0] - margin
    flat = grad.flatten(1).abs().amax(1) == 0
    visible = expected > 1e-4 * margin.abs()  # more than the rounding of logits
    return int(flat.sum()), int((visible & (risen < LEAST_RISE * expected)).sum())


def _boundary_jumps(model: CheckedModel, ball: Ball, x: Tensor, y: Tensor, margin: Tensor) -> int:
    """Return the number of images with a large margin just behind their decision boundary."""
    attack = HopSkipJump(ball, any_distance=True)
    batch = AttackBatch(model, x, y, torch.arange(len(x)).to(y), None)
    found = BoundarySearch(attack, batch, PROBE_QUERIES)
    attack.find_starts(found, 0)
    rows = found.rows(found.distance.isfinite().nonzero()[:, 0])
    points = found.bisect(rows, found.closest[rows], ON_BOUNDARY)
    behind, _ = exact_value(model, UntargetedMargin(), points, y[rows])
    return int((behind > JUMP * margin[rows].abs()).sum())


class OnMasking:
    """The attacks that run after a chain where gradients may be masked, by name.

    The attack SURROGATE uses the gradients of the given net, and then runs without signs too, or of
    a student, which is trained on the first images that need it.
    """

    def __init__(
        self,
        ball: Ball | None = None,
        criterion: Criterion = Misclassified(),
        attacks: Mapping[str, Attack] | None = None,
        surrogate: Model | None = None,
    ) -> None:
        self.ball, self.criterion, self.attacks = ball, criterion, dict(attacks or {})
        self.surrogate, self.student = surrogate, surrogate

    @classmethod
    def after(cls, chain: Chain, version: str, seed: int, surrogate: Model | None) -> Self:
        """Return the attacks after a version: all after a complete one, else a given net's."""
        given: Any = surrogate
        if given is not None and not callable(given):
            raise BadInput(f"surrogate must be a net from images to logits, not {given!r}")
        (ball,), criterion = chain.balls(), chain.criterion
        found = decision_attacks(ball, criterion, seed) if version in COMPLETE else {}
        if version in COMPLETE or given is not None:
            rejects = isinstance(criterion, RuleCriterion) and given is None
            objective = OutcomeMargin(criterion, rejects)
            found[SURROGATE] = APGD(
                ball, restarts=5, objective=objective, criterion=criterion, seed=seed
            )
        return cls(ball, criterion, found, surrogate)

    def signs(self, model: CheckedModel, x: Tensor, y: Tensor) -> list[str]:
        """Return the signs that clean images show."""
        assert self.ball is not None
        found = masking_signs(probe_masking(model, self.ball, x, y))
        signs = [f"gradients may be masked: {sign}" for sign in found]
        if isinstance(self.criterion, AcceptedError):
            signs += zero_score_gradients(model, self.criterion, x, y)
        return signs

    def batch(self, name: str, model: CheckedModel, batch: AttackBatch, bs: int) -> AttackBatch:
        """Return the batch for an attack, for SURROGATE with the gradients of the other net."""
        if name != SURROGATE:
            return batch
        if self.student is None or (self.surrogate is None and int(batch.index[0]) == 0):
            assert self.ball is not None
            seed = self.attacks[name].noise_seed or 0
            self.student = distil(model, self.criterion, self.ball, batch.x, seed, bs)
        return replace(batch, model=SurrogateGradients(batch.model, self.student))
