"""The output of a net: what a model may return, its parts, and predictions.

`rejectors/certainty.py` has confidence, R-Con and T-Con.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from demur.errors import BadInput
from demur.numerics import raise_if_invalid


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

    def select(self, rows: Tensor | slice) -> "Output":
        return Output(*(part[rows] for part in self))

    def to(self, device: torch.device) -> "Output":
        return Output(*(part.to(device) for part in self))

    def detached(self) -> "Output":
        return Output(*(part.detach() for part in self))


def as_output(answer: Any, rows: int | None = None) -> Output:
    """Return what a model returned as an Output.

    `answer` is an Output; logits (N, C); a tuple or list whose first entry is logits and whose
    second may be an auxiliary output (N, 1) or features (N, D); a mapping or an object with an
    entry `logits`. BadInput: there are no logits with one row per image, `rows` of them if it is
    given.
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
    second, several = None, list[Tensor]()
    if isinstance(answer, Mapping) and "logits" in answer:
        answer = answer["logits"]
    elif isinstance(answer, tuple | list) and answer:
        several = [part for part in answer if isinstance(part, Tensor) and part.ndim == 2]
        answer, second = answer[0], answer[1] if len(answer) > 1 else None
    elif not isinstance(answer, Tensor) and hasattr(answer, "logits"):
        answer = answer.logits
    if not isinstance(answer, Tensor) or answer.ndim != 2:
        raise BadInput(
            "a model must return logits with one row per image (a tensor of shape N, C), an "
            f"Output, or a tuple or mapping that holds them, not {_described(answer)}"
        )
    if len(several) > 2 or (len(several) == 2 and several[0].shape == several[1].shape):
        shapes = ", ".join(str(tuple(part.shape)) for part in several)
        raise BadInput(
            f"the model returns {len(several)} outputs of shapes {shapes}, and which one holds the "
            "logits is not clear; return one, as in lambda x: model(x)[0], or "
            "Output(logits, feature, aux)"
        )
    none = answer.new_zeros(answer.shape[0], 0)
    if isinstance(second, Tensor) and second.ndim == 2 and second.shape[0] == answer.shape[0]:
        parts = (none, second) if second.shape[1] == 1 else (second, none)
        return Output(answer, *parts)
    return Output(answer, none, none)


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with {', '.join(map(str, value)) or 'no entries'}"
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
    """Raise BadInput if the largest logit of an image is NaN or infinite (see `numerics`)."""
    remedy = "check its weights and its normalisation (-inf is allowed, for masked classes)"
    largest = out.logits.detach().amax(-1)
    raise_if_invalid("logits", largest, remedy, invalid=lambda values: ~values.isfinite())


def prediction(out: Output) -> Tensor:
    """Return the predicted label of each image: N."""
    return as_output(out).logits.argmax(-1)


def log_probabilities(out: Output, tau: float = 1.0) -> Tensor:
    """Return the log class probabilities at temperature tau, in fp32 or better: N, C."""
    return (widened(as_output(out).logits) / tau).log_softmax(-1)


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
        return widened(out.aux[:, self.at])


ACCEPT = AuxColumn("accept logit", 0)  # A of the paper, SelectiveNet's gate, ATRO's r
ABSTAIN = AuxColumn("abstain logit", 0)  # of CARL's additional class
CLASS_LOGITS = AuxColumn("class logits", slice(1, None))  # of SelectiveNet's second classifier
SCORE = AuxColumn("score", -1)  # of a model that computes its own


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


def widened(x: Tensor) -> Tensor:
    """Return values of 16 bits in float32, others as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
