"""What a net returns, and the certainty measures that are functions of it.

    out = model(x)                      # Output(logits, feature, aux)
    con(out), rcon(out), tcon(out, y)   # confidence, rectified confidence, true confidence

Products and saturated softmaxes are taken in log space, so their gradients survive: log rcon =
log con + log A, and 1 - rcon = (1 - con) + con (1 - A) is a sum of positive terms. Shapes: N
images, C classes, D features, A auxiliary outputs.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from demur.errors import BadInput


class Output(NamedTuple):
    """A net's answer for a batch; `aux` is the extra head's raw output, width 0 without one."""

    logits: Tensor  # N, C
    feature: Tensor  # N, D
    aux: Tensor  # N, A

    def select(self, chosen: Tensor) -> "Output":
        """The outputs of the chosen images."""
        return Output(*(part[chosen] for part in self))

    def to(self, device: torch.device) -> "Output":
        """The same outputs on a device."""
        return Output(*(part.to(device) for part in self))

    def detached(self) -> "Output":
        """The same values without their history."""
        return Output(*(part.detach() for part in self))


def as_output(answer: Output | Tensor) -> Output:
    """A model's answer as an Output; a plain tensor is taken as logits."""
    if isinstance(answer, Output):
        return answer
    if getattr(answer, "ndim", 0) == 2:
        none = answer.new_zeros(len(answer), 0)
        return Output(answer, none, none)
    raise BadInput("a model must return an Output or a tensor of logits with one row per image")


def prediction(out: Output) -> Tensor:
    """The predicted label of each image."""
    return out.logits.argmax(-1)  # N


def log_probabilities(out: Output, tau: float = 1.0) -> Tensor:
    """Log of the class probabilities at temperature tau, in at least fp32."""
    return (_wide(out.logits) / tau).log_softmax(-1)  # N, C


def log_con(out: Output, tau: float = 1.0) -> Tensor:
    """Log of the confidence."""
    return label_entry(log_probabilities(out, tau), prediction(out))  # N


def log_one_minus_con(out: Output, tau: float = 1.0) -> Tensor:
    """Log of one minus the confidence: the mass on all other classes."""
    return mask_label(log_probabilities(out, tau), prediction(out)).logsumexp(-1)  # N


def log_tcon(out: Output, y: Tensor, tau: float = 1.0) -> Tensor:
    """Log of the true confidence."""
    return label_entry(log_probabilities(out, tau), y)  # N


def log_rcon(out: Output, tau: float = 1.0) -> Tensor:
    """Log of the rectified confidence."""
    return log_con(out, tau) + logsigmoid(rectifier_logit(out))  # N


def log_one_minus_rcon(out: Output, tau: float = 1.0) -> Tensor:
    """Log of one minus the rectified confidence."""
    return torch.logaddexp(
        log_one_minus_con(out, tau), log_con(out, tau) + logsigmoid(-rectifier_logit(out))
    )  # N


def con(out: Output, tau: float = 1.0) -> Tensor:
    """Confidence: the probability of the predicted label."""
    return log_con(out, tau).exp()  # N


def tcon(out: Output, y: Tensor, tau: float = 1.0) -> Tensor:
    """True confidence: the probability of the true label; an oracle, since it needs y."""
    return log_tcon(out, y, tau).exp()  # N


def rcon(out: Output, tau: float = 1.0) -> Tensor:
    """Rectified confidence: confidence times A."""
    return log_rcon(out, tau).exp()  # N


def energy(out: Output, tau: float = 1.0) -> Tensor:
    """Free energy with its sign turned: tau times the log-sum-exp of logits over tau."""
    return tau * (_wide(out.logits) / tau).logsumexp(-1)  # N


def rectifier_logit(out: Output) -> Tensor:
    """The logit of A."""
    if out.aux.shape[-1] == 0:
        raise BadInput("this needs a net with an auxiliary head; train with head=RR() or use Con")
    return _wide(out.aux[:, 0])


def label_entry(table: Tensor, label: Tensor) -> Tensor:
    """The entry of each row at its label."""
    # the same as gather, whose gradient a GPU spreads with atomic sums; this one it fuses
    return table.where(_is(label, table), 0).sum(-1)


def mask_label(table: Tensor, label: Tensor) -> Tensor:
    """The table with minus infinity at the label of each row."""
    return table.masked_fill(_is(label, table), -torch.inf)


def _is(label: Tensor, table: Tensor) -> Tensor:
    return label[:, None] == torch.arange(table.shape[-1], device=table.device)  # N, C


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
