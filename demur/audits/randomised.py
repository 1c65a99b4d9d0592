"""Randomised models: decisions over many passes, and noise that is not random.

    decisions = decide_by_passes(model, criterion, x, y, bs=250, passes=100)
    decisions.kinds          # N, 3: passes by decision of each image

A model that draws its noise with a fixed seed, or with a seed computed from its input, is a
deterministic function. Two passes do not differ, but gradients need not describe it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from demur.attacks.attack_model import Model
from demur.attacks.criteria import Criterion
from demur.audits.image_parts import Decisions, decide
from demur.evaluate.recording import ROUNDING
from demur.output import as_output

CHANGE = 1e-3  # of each pixel, in a test whether outputs are continuous
JUMP = 1e-2  # change of the outputs, relative to the largest one, that is no rounding


def is_random(model: Model, x: Tensor) -> bool:
    """Return whether two passes on the same images x (N, C, H, W) differ by more than rounding."""
    return bool((_difference(_outputs(model, x), _outputs(model, x)) > ROUNDING).any())


def decide_by_passes(
    model: Model, criterion: Criterion, x: Tensor, y: Tensor, bs: int, passes: int
) -> Decisions:
    """Return the most frequent label and decision, mean scores and passes by decision.

    `kinds` holds for each image the number of passes in which it is accepted and right, accepted
    and wrong, and rejected: N, 3. It is empty for one pass.
    """
    if passes == 1:
        return decide(model, criterion, x, bs)
    parts = [decide(model, criterion, x, bs) for _ in range(passes)]
    labels, accepted = (torch.stack(list(column)) for column in list(zip(*parts, strict=True))[:2])
    right = labels == y.cpu()
    kinds = torch.stack([accepted & right, accepted & ~right, ~accepted]).sum(1).t()
    means = [torch.stack(column).mean(0) for column in zip(*(p.scores for p in parts), strict=True)]
    votes = 2 * accepted.sum(0) >= passes
    return Decisions(labels.mode(0).values, votes, tuple(means), kinds)


def seeded_noise_notes(model: Model, x: Tensor) -> Iterator[str]:
    """Yield a sentence if a model without random outputs looks as if it drew noise with a seed."""
    remedy = "draw the noise anew in each pass and use version='rand'"
    # Inside the pixel range, and not at the levels where a quantisation jumps.
    inside = 0.98 * x + 0.01 + 0.005 * torch.sin(torch.arange(x[0].numel()).to(x)).view_as(x[0])
    base = _outputs(model, inside)
    far, near = (_difference(_outputs(model, inside + c), base) for c in (CHANGE, CHANGE / 10))
    jumps = (near > JUMP) & (near > far / 2)  # of the change of a smooth function a tenth is left
    if jumps.float().mean() > 0.5:
        yield (
            f"the outputs of {int(jumps.sum())} of {len(x)} images jump when each pixel changes by "
            f"{CHANGE / 10:g}, as with noise whose seed is computed from the input: a "
            f"deterministic function that its gradients do not describe; {remedy}"
        )
        return
    moved = _difference(_outputs(model, inside.flip(0)).flip(0), base) > JUMP
    if moved.float().mean() > 0.5:
        yield (
            f"the outputs of {int(moved.sum())} of {len(x)} images depend on their place in the "
            "batch, as with noise from a fixed seed: a deterministic function that may mask its "
            f"gradients, and an image in another batch has another verdict; {remedy}"
        )


def _outputs(model: Model, x: Tensor) -> Tensor:
    """Return logits and auxiliary outputs, N, K."""
    with torch.no_grad():
        out = as_output(model(x))
    return torch.cat((out.logits, out.aux.to(out.logits)), -1)


def _difference(first: Tensor, second: Tensor) -> Tensor:
    """Return the largest difference of the outputs relative to the largest output, N."""
    size = second.abs().nan_to_num(0, 0, 0).amax(-1).clamp_min(1e-30)
    return (first - second).nan_to_num(0).abs().amax(-1) / size
