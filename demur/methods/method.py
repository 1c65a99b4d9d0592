"""A way to train: a frame and a head.

Method(PGDAT(), RR()).loss(net, x, y, index, stream)
"""

from dataclasses import dataclass

from torch import Tensor, nn

from demur.methods.frames import Frame, Views
from demur.methods.heads import Head, Plain
from demur.noise import Stream
from demur.spec import Spec


@dataclass(frozen=True)
class Method(Spec):
    """The classification loss of a frame plus the term of a head."""

    frame: Frame
    head: Head = Plain()

    def loss(self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream) -> Tensor:
        """The mean loss of a batch; `stream` gives every step its own noise."""
        return self.taught(net, x, self.frame.crafted(net, x, y, index, stream), y)

    def taught(self, net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """The mean loss of a batch whose images are crafted already."""
        return self.reduced(self.frame.views(net, x, x_adv), y)

    def reduced(self, views: Views, y: Tensor) -> Tensor:
        """The mean loss of what the net made of a batch, in fp32 or better."""
        each = self.frame.term(views, y)  # N
        extra = self.head.term(views, y)  # N, or None
        return (each if extra is None else each + extra).mean()
