"""A way to train: a frame and a head.

Method(PGDAT(), RR()).loss(net, x, y, index, stream)
"""

from dataclasses import dataclass

from torch import Tensor, nn

from demur.methods.frames import Frame
from demur.methods.heads import Head, Plain
from demur.spec import Spec


@dataclass(frozen=True)
class Method(Spec):
    """The classification loss of a frame plus the term of a head."""

    frame: Frame
    head: Head = Plain()

    def loss(self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: int) -> Tensor:
        """The mean loss of a batch, in fp32; `stream` gives every step its own noise."""
        views = self.frame.views(net, x, y, index, stream)
        each = self.frame.term(views, y)  # N
        extra = self.head.term(views, y)  # N, or None
        return (each if extra is None else each + extra).mean()
