"""What a net made of a batch while it learns."""

from typing import NamedTuple

from torch import Tensor

from demur.output import Output


class Seen(NamedTuple):
    """Images, their labels, and the net's answer."""

    x: Tensor
    y: Tensor
    out: Output


class Views(NamedTuple):
    """The attacked images, and the same as they are where somebody asked for that."""

    attacked: Seen
    clean: Seen | None = None

    def unattacked(self) -> Seen:
        """The images as they are."""
        assert self.clean is not None, "the head did not say that it looks at clean images"
        return self.clean
