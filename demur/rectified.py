"""Constructions of R-Con from the confidence and A, and losses that fit them to T-Con.

    certainty(out, "product")                               # R-Con = con * A (Eq. 6)
    rr_loss_per_image(out, y, t_con, "product", "bce")      # L_RR = BCE(R-Con, T-Con) (Eq. 7)

The paper's footnote names the difference con - A; A alone and con alone are ablations. Values are
computed in log space where probabilities saturate and their gradients would vanish.
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
LINEAR_BELOW = 0.1  # con - A may be negative: below this the log continues as its tangent
MARGIN = 0.5  # of the hinge; the scale is 2 r - 1, from -1 to 1


def certainty(out: Output, construction: Construction, tau: float = 1.0) -> Tensor:
    """R-Con in the given construction, N."""
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
    """log R-Con and log(1 - R-Con) in the given construction, N each."""
    match construction:
        case "product":
            return log_rcon(out, tau), log_one_minus_rcon(out, tau)
        case "difference":
            # 1 - (con - A) = (1 - con) + A
            log_rest = torch.logaddexp(
                log_one_minus_con(out, tau), logsigmoid(rectifier_logit(out))
            )
            return _extended_log(certainty(out, construction, tau)), log_rest
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
    """Loss between r = R-Con and the target t = T-Con, N.

    "bce":      -t log r - (1 - t) log(1 - r)  (Eq. 7), minimised by the mean of t
    "squared":  (r - t)^2, minimised by the mean of t
    "absolute": |r - t|, minimised by the median of t
    "margin":   relu(MARGIN - s (2 r - 1)), with s = 1 for a correct prediction and -1 for a wrong
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
            sign = torch.where(prediction(out) == y, 1.0, -1.0)
            return relu(MARGIN - sign * (2 * certainty(out, construction, tau) - 1))


def _extended_log(r: Tensor) -> Tensor:
    """log r, continued below LINEAR_BELOW by its tangent there."""
    tangent = torch.log(torch.full_like(r, LINEAR_BELOW)) + (r - LINEAR_BELOW) / LINEAR_BELOW
    return torch.where(r > LINEAR_BELOW, r.clamp_min(LINEAR_BELOW).log(), tangent)
