"""The output of a net, and the certainty measures computed from it (paper, section 3).

    out = model(x)                      # Output(logits, feature, aux)
    con(out), rcon(out), tcon(out, y)   # confidence, rectified confidence, true confidence

Products and saturated softmaxes are computed in log space so that gradients do not vanish:
log rcon = log con + log A, and 1 - rcon = (1 - con) + con (1 - A) is a sum of positive terms.
Every function takes what a model returns (see `as_output`).
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from demur.errors import BadInput
from demur.nan_checks import raise_if_invalid

Construction = Literal["product", "difference", "aux", "con"]
RRLossKind = Literal["bce", "squared", "absolute", "margin"]
LINEAR_BELOW = 0.1  # con - A may be negative: below this the log continues as its tangent
MARGIN = 0.5  # of the hinge; the scale is 2 r - 1, from -1 to 1


class Output(NamedTuple):
    """What a net returns for a batch.

    Args:
        logits: N, C.
        feature: The last pooled feature, N, D; width 0 if the net gives none.
        aux: The raw output of the auxiliary head, N, A; width 0 without a head.

    Example:
        >>> import torch
        >>> none = torch.zeros(2, 0)
        >>> Output(torch.eye(2), none, none).logits.shape
        torch.Size([2, 2])
    """

    logits: Tensor  # N, C
    feature: Tensor  # N, D
    aux: Tensor  # N, A

    def select(self, rows: Tensor) -> "Output":
        """Return the outputs of some images, by index or mask."""
        return Output(*(part[rows] for part in self))

    def to(self, device: torch.device) -> "Output":
        """Return the outputs on a device."""
        return Output(*(part.to(device) for part in self))

    def detached(self) -> "Output":
        """Return the values without their autograd history."""
        return Output(*(part.detach() for part in self))


def as_output(answer: Any, rows: int | None = None) -> Output:
    """Return what a model returned as an Output.

    Args:
        answer: An Output; logits (N, C); a tuple or list whose first entry is logits and whose
            second may be an auxiliary output (N, 1) or features (N, D); a mapping or an object with
            an entry `logits`.
        rows: The number of images that the model was given; None skips this check.

    Raises:
        BadInput: There are no logits with one row per image.
    """
    out = answer if isinstance(answer, Output) else _output_of(answer)
    if torch.compiler.is_exporting():  # len() would fix the batch size of the exported graph
        return out
    counts = {len(part) for part in out}
    if out.logits.ndim != 2 or out.logits.shape[1] == 0 or len(counts) > 1:
        shapes = ", ".join(str(tuple(part.shape)) for part in out)
        raise BadInput(
            "an Output holds logits (N, C), features (N, D) and auxiliary outputs (N, A) of the "
            f"same N images, not shapes {shapes}"
        )
    if rows is not None and len(out.logits) != rows:
        raise BadInput(
            f"the model returned logits with {len(out.logits)} rows for {rows} images; return one "
            "row per image"
        )
    return out


def _output_of(answer: Any) -> Output:
    """Return logits, or a container of them, as an Output."""
    second = None
    if isinstance(answer, Mapping) and "logits" in answer:
        answer = answer["logits"]
    elif isinstance(answer, tuple | list) and answer:
        answer, second = answer[0], answer[1] if len(answer) > 1 else None
    elif not isinstance(answer, Tensor) and hasattr(answer, "logits"):
        answer = answer.logits
    if not isinstance(answer, Tensor) or answer.ndim != 2:
        raise BadInput(
            "a model must return logits with one row per image (a tensor of shape N, C), an "
            f"Output, or a tuple or mapping that holds them, not {_described(answer)}"
        )
    none = answer.new_zeros(answer.shape[0], 0)
    if isinstance(second, Tensor) and second.ndim == 2 and second.shape[0] == answer.shape[0]:
        return (
            Output(answer, none, second) if second.shape[1] == 1 else Output(answer, second, none)
        )
    return Output(answer, none, none)


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")


def outputs_in_batches(
    model: Callable[[Tensor], Output], x: Tensor, size: int, device: torch.device | str
) -> Output:
    """Return the outputs for all images x (N, C, H, W) on the CPU, `size` images at a time.

    Each batch moves to the device by itself, so that images may exceed its memory.
    """
    with torch.no_grad():
        parts = [model(batch.to(device)) for batch in x.split(size)]
    return Output(*(torch.cat(part).cpu() for part in zip(*parts, strict=True)))


def check_logits(out: Output) -> None:
    """Raise BadInput if the largest logit of an image is NaN or infinite (see `nan_checks`)."""
    remedy = "check its weights and its normalisation (-inf is allowed, for masked classes)"
    largest = out.logits.detach().amax(-1)
    raise_if_invalid("logits", largest, remedy, invalid=lambda values: ~values.isfinite())


def prediction(out: Output) -> Tensor:
    """Return the predicted label of each image: N."""
    return as_output(out).logits.argmax(-1)


def log_probabilities(out: Output, tau: float = 1.0) -> Tensor:
    """Return the log class probabilities at temperature tau, in fp32 or better: N, C."""
    return (_wide(as_output(out).logits) / tau).log_softmax(-1)


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
    return tau * (_wide(as_output(out).logits) / tau).logsumexp(-1)  # N


class AuxColumn(NamedTuple):
    """A named column of the auxiliary output, or several; a head declares its columns."""

    name: str
    at: int | slice

    def of(self, out: Output) -> Tensor:
        """Return the column in fp32 or better: N, or N, K for a slice."""
        out = as_output(out)
        if out.aux.shape[-1] == 0:
            raise BadInput(
                f"this needs a net with an auxiliary head for its {self.name}; train with "
                "head=RR() or use Con"
            )
        return _wide(out.aux[:, self.at])


ACCEPT = AuxColumn("accept logit", 0)  # A of the paper, SelectiveNet's gate, ATRO's r
ABSTAIN = AuxColumn("abstain logit", 0)  # of CARL's additional class
CLASS_LOGITS = AuxColumn("class logits", slice(1, None))  # of SelectiveNet's second classifier
SCORE = AuxColumn("score", -1)  # of a model that computes its own


def rectifier_logit(out: Output) -> Tensor:
    """Return the logit of A: N."""
    return ACCEPT.of(out)


def label_entry(table: Tensor, label: Tensor) -> Tensor:
    """Return the entry of each row at its label: N, C and N to N."""
    # equal to gather; the backward of gather uses atomic adds, and this form can be fused
    return table.where(_is(label, table), 0).sum(-1)


def mask_label(table: Tensor, label: Tensor) -> Tensor:
    """Return the table with -inf at the label of each row: N, C."""
    return table.masked_fill(_is(label, table), -torch.inf)


def _is(label: Tensor, table: Tensor) -> Tensor:
    if not torch.compiler.is_exporting() and len(label) != len(table):  # one row would broadcast
        raise BadInput(f"{len(table)} rows of outputs do not match {len(label)} labels")
    return label[:, None] == torch.arange(table.shape[-1], device=table.device)  # N, C


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


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
