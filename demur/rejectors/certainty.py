"""Certainty measures of an output (paper, section 3), and the loss that trains R-Con.

Products and saturated softmaxes are computed in log space so that gradients do not vanish: log rcon
= log con + log A, and 1 - rcon = (1 - con) + con (1 - A) is a sum of positive terms.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from demur.output import (
    ACCEPT,
    Output,
    as_output,
    label_entry,
    log_probabilities,
    mask_label,
    prediction,
    widened,
)

Construction = Literal["product", "difference", "aux", "con"]
RRLossKind = Literal["bce", "squared", "absolute", "margin"]
LINEAR_BELOW = 0.1  # con - A may be negative: below this the log continues as its tangent
MARGIN = 0.5  # of the hinge; the scale is 2 r - 1, from -1 to 1


def log_con(out: Output, tau: float = 1.0) -> Tensor:
    """Return log con: N."""
    return label_entry(log_probabilities(out, tau), prediction(out))  # N


def log_one_minus_con(out: Output, tau: float = 1.0) -> Tensor:
    """Return log(1 - con), the log mass on all other classes: N."""
    return mask_label(log_probabilities(out, tau), prediction(out)).logsumexp(-1)  # N


def log_tcon(out: Output, y: Tensor, tau: float = 1.0) -> Tensor:
    """Return log T-Con: N."""
    return label_entry(log_probabilities(out, tau), y)  # N


def log_rcon(out: Output, tau: float = 1.0) -> Tensor:
    """Return log R-Con: N."""
    return log_con(out, tau) + logsigmoid(rectifier_logit(out))  # N


def log_one_minus_rcon(out: Output, tau: float = 1.0) -> Tensor:
    """Return log(1 - R-Con): N."""
    return torch.logaddexp(
        log_one_minus_con(out, tau), log_con(out, tau) + logsigmoid(-rectifier_logit(out))
    )  # N


def con(out: Output, tau: float = 1.0) -> Tensor:
    """Return the confidence, the probability of the predicted label: N."""
    return log_con(out, tau).exp()  # N


def tcon(out: Output, y: Tensor, tau: float = 1.0) -> Tensor:
    """Return the true confidence T-Con, the probability of the true label: N.

    It is unknown at test time, since it needs the label.
    """
    return log_tcon(out, y, tau).exp()  # N


def rcon(out: Output, tau: float = 1.0) -> Tensor:
    """Return the rectified confidence R-Con = con * A (Eq. 6): N."""
    return log_rcon(out, tau).exp()  # N


def energy(out: Output, tau: float = 1.0) -> Tensor:
    """Return the negative free energy tau * logsumexp(logits / tau): N."""
    return tau * (widened(as_output(out).logits) / tau).logsumexp(-1)  # N


def rectifier_logit(out: Output) -> Tensor:
    """Return the logit of A: N."""
    return ACCEPT.of(out)


def certainty(out: Output, construction: Construction, tau: float = 1.0) -> Tensor:
    """R-Con in the given construction, N.

    The paper's footnote names the difference con - A; A alone and con alone are ablations.
    Values are computed in log space where probabilities saturate and their gradients would
    vanish.
    """
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
            r = certainty(out, construction, tau)
            tangent = torch.full_like(r, LINEAR_BELOW).log() + (r - LINEAR_BELOW) / LINEAR_BELOW
            log_r = torch.where(r > LINEAR_BELOW, r.clamp_min(LINEAR_BELOW).log(), tangent)
            return log_r, log_rest
        case "aux":
            return logsigmoid(rectifier_logit(out)), logsigmoid(-rectifier_logit(out))
        case "con":
            return log_con(out, tau), log_one_minus_con(out, tau)


def rr_loss_per_image(
    out: Output, y: Tensor, target: Tensor, construction: Construction = "product",
    rr_loss: RRLossKind = "bce", tau: float = 1.0,
) -> Tensor:  # fmt: skip
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
