"""The ways to build a certainty from confidence and A, and to fit it to the true confidence.

    built(out, "product")                       # R-Con = con * A, the paper's (Eq. 6)
    misfit(out, y, target, "product", "bce")    # L_RR, given T-Con as the target

The paper's footnote names the difference; A alone and confidence alone are its ablations. All is
taken in log space where that keeps gradients alive.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from demur.output import (
    Output,
    con,
    log_con,
    log_one_minus_con,
    log_one_minus_rcon,
    log_rcon,
    prediction,
    rcon,
    rectifier_logit,
)

Construction = Literal["product", "difference", "aux", "con"]
RRLossKind = Literal["bce", "squared", "absolute", "margin"]
LEAST = 0.1  # below that the log of a difference goes on as a straight line; ours to choose
MARGIN = 0.5  # how far beyond one half a certainty has to be, as a share of the way to its end


def certainty(out: Output, construction: Construction, tau: float = 1.0) -> Tensor:
    """The certainty of each image."""
    match construction:
        case "product":
            return rcon(out, tau)
        case "difference":
            return con(out, tau) - rectifier_logit(out).sigmoid()
        case "aux":
            return rectifier_logit(out).sigmoid()
        case "con":
            return con(out, tau)


def log_certainty(
    out: Output, construction: Construction, tau: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The logs of the certainty and of one minus it."""
    match construction:
        case "product":
            return log_rcon(out, tau), log_one_minus_rcon(out, tau)
        case "difference":
            missing = torch.logaddexp(log_one_minus_con(out, tau), logsigmoid(rectifier_logit(out)))
            return _extended_log(certainty(out, construction, tau)), missing
        case "aux":
            return logsigmoid(rectifier_logit(out)), logsigmoid(-rectifier_logit(out))
        case "con":
            return log_con(out, tau), log_one_minus_con(out, tau)


def rr_loss_per_image(
    out: Output,
    y: Tensor,
    target: Tensor,
    construction: Construction = "product",
    rr_loss: RRLossKind = "bce",
    tau: float = 1.0,
) -> Tensor:
    """How far the certainty of each image is from the target.

    bce: binary cross-entropy. squared: the squared difference. Both are least at the mean of what
    the target may be. absolute: the difference, which is least at its median. margin: a hinge that
    asks for a certainty well above one half where the answer is right and well below where wrong.
    """
    match rr_loss:
        case "bce":
            # reference code: BCELoss on probabilities, each log clamped at -100
            log_r, log_not_r = log_certainty(out, construction, tau)
            return -target * log_r - (1 - target) * log_not_r
        case "squared":
            return (certainty(out, construction, tau) - target).square()
        case "absolute":
            return (certainty(out, construction, tau) - target).abs()
        case "margin":
            side = torch.where(prediction(out) == y, 1.0, -1.0)
            return relu(MARGIN - side * (2 * certainty(out, construction, tau) - 1))


def _extended_log(r: Tensor) -> Tensor:
    """The log, and below the least value the straight line that touches it there."""
    line = torch.log(torch.full_like(r, LEAST)) + (r - LEAST) / LEAST
    return torch.where(r > LEAST, r.clamp_min(LEAST).log(), line)
