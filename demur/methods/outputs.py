"""Outputs of a net for one training batch."""

from typing import NamedTuple

from torch import Tensor

from demur.output import Output


class LabelledOutput(NamedTuple):
    """Images (N, C, H, W), their labels (N) and the net's output for them."""

    x: Tensor
    y: Tensor
    out: Output


class BatchOutputs(NamedTuple):
    """Outputs for the attacked images, and for the clean ones if a loss needs them.

    `unperturbed` holds the attacked images before the attack. Only CCAT sets it: its clean images
    are other images than its attacked ones.
    """

    attacked: LabelledOutput
    clean: LabelledOutput | None = None
    unperturbed: Tensor | None = None

    def clean_outputs(self) -> LabelledOutput:
        """Outputs for the clean images, which must have been computed."""
        assert self.clean is not None, "a head that uses clean outputs must set needs_clean"
        return self.clean


def subset_weights(mask: Tensor) -> Tensor:
    """Weights w with mean(w * v) = mean of v where `mask` is 1; `mask` holds ones and zeros (N)."""
    return mask * len(mask) / mask.sum().clamp_min(1)
