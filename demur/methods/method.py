"""A way to train: a frame and a head.

Method(PGDAT(), RR()).loss(net, x, y, index, stream)
"""

from dataclasses import dataclass

from torch import Tensor, nn

from demur.methods.frames import Frame
from demur.methods.heads import Head, Plain
from demur.methods.views import Views
from demur.noise import Stream
from demur.spec import Spec


@dataclass(frozen=True)
class Method(Spec):
    """The classification loss of a frame plus the term of a head."""

    frame: Frame
    head: Head = Plain()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.head.framed(self.frame)  # refuses what does not go together

    def loss(self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream) -> Tensor:
        """The mean loss of a batch; `stream` gives every step its own noise."""
        return self.taught(net, x, self.crafted(net, x, y, index, stream), y)

    def crafted(
        self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream
    ) -> Tensor:
        """The images to teach with."""
        return self.head.framed(self.frame).crafted(net, x, y, index, stream)

    def taught(self, net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """The mean loss of a batch whose images are crafted already."""
        return self.reduced(self.views(net, x, x_adv, y))

    def views(self, net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> Views:
        """What the net makes of a batch."""
        if self.head.differentiates:
            x = x.detach().requires_grad_()
        return self.frame.views(net, x, x_adv, y, self.head.sees_clean)

    def reduced(self, views: Views) -> Tensor:
        """The mean loss of what the net made of a batch, in fp32 or better."""
        return self.head.loss(self.frame.term(views), views)
