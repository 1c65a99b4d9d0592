"""A way to train: a frame and a head.

Method(PGDAT(), RR()).loss(net, x, y, index, stream)
Method(PGDAT(), RR(reach="head"), apart=0.2)    # A learns from images that the classifier does not
"""

from dataclasses import dataclass, field

from torch import Tensor, nn

from demur import noise
from demur.declared import Share
from demur.errors import BadInput
from demur.methods.frames import Frame
from demur.methods.heads import Head, Plain
from demur.methods.rr import RR
from demur.methods.views import Views, share_of
from demur.noise import Stream
from demur.spec import Spec, later

SPARED = 0x5BA6ED  # the seed by which images are set apart, the same in every run


@dataclass(frozen=True)
class Method(Spec):
    """The classification loss of a frame plus the term of a head.

    `apart` is a share of the images, always the same ones, from which the head alone learns; the
    classifier learns from the others alone, though batch norm sees all.
    """

    frame: Frame
    head: Head = Plain()
    apart: Share = field(default=0.0, metadata=later(neutral=0.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.head.framed(self.frame)  # refuses what does not go together
        if self.apart == 1:
            raise BadInput("apart=1 leaves the classifier no images; use less than 1")
        if self.apart and not (isinstance(self.head, RR) and self.head.reach == "head"):
            raise BadInput(
                "images set apart teach the head alone, so it may not change the net; use "
                "head=RR(reach=head) before apart"
            )
        if self.apart and not self.frame.one_price_an_image:
            raise BadInput("images can be set apart where each attacked one has a loss; use PGDAT")

    @property
    def by_image(self) -> bool:
        """Whether the loss of a batch is the mean of its parts' losses, however it is parted."""
        return self.head.by_image and self.frame.one_price_an_image and not self.apart

    def loss(self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream) -> Tensor:
        """The mean loss of a batch; `stream` gives every step its own noise."""
        x_adv = self.crafted(net, x, y, index, stream)
        return self.taught(net, x, x_adv, y, self.spared(index))

    def crafted(
        self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream
    ) -> Tensor:
        """The images to teach with."""
        return self.head.framed(self.frame).crafted(net, x, y, index, stream)

    def spared(self, index: Tensor) -> Tensor | None:
        """1 for images set apart, 0 for the others; None where there are none."""
        if self.apart == 0:
            return None
        return (noise.uniform(SPARED, index, 0, (1,))[:, 0] < self.apart).float()

    def taught(
        self, net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, spared: Tensor | None = None
    ) -> Tensor:
        """The mean loss of a batch whose images are crafted already."""
        return self.reduced(self.views(net, x, x_adv, y), spared)

    def views(self, net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> Views:
        """What the net makes of a batch."""
        if self.head.differentiates:
            x = x.detach().requires_grad_()
        return self.frame.views(net, x, x_adv, y, self.head.sees_clean)

    def reduced(self, views: Views, spared: Tensor | None = None) -> Tensor:
        """The mean loss of what the net made of a batch, in fp32 or better."""
        each = self.frame.term(views)
        if spared is None:
            return self.head.loss(each, views)
        extra = self.head.term(views)
        assert extra is not None, "only heads that learn have images set apart for them"
        return (share_of(1 - spared) * each + share_of(spared) * extra).mean()
