"""What a net made of a batch while it learns."""

from typing import NamedTuple

from torch import Tensor

from demur.output import Output


class LabelledOutput(NamedTuple):
    """Images, their labels, and the net's answer."""

    x: Tensor
    y: Tensor
    out: Output


class BatchOutputs(NamedTuple):
    """The attacked images, and the same as they are where somebody asked for that.

    `before`: what the attacked images were, for a frame whose clean images are others.
    """

    attacked: LabelledOutput
    clean: LabelledOutput | None = None
    before: Tensor | None = None

    def clean_outputs(self) -> LabelledOutput:
        """The images as they are."""
        assert self.clean is not None, "the head did not say that it looks at clean images"
        return self.clean


def subset_weights(members: Tensor) -> Tensor:
    """Weights, from ones and zeros, that turn a mean over all images into one over the members."""
    return members * len(members) / members.sum().clamp_min(1)
