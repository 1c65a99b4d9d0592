"""A way to train: a frame and a head.

Method(PGDAT(), RR()).loss(net, x, y, index, stream)
Method(PGDAT(), RR(gradient_to="head"), head_only=0.2)    # A learns from images that the classifier does not
"""

from dataclasses import dataclass, field

from torch import Tensor, nn

from demur import noise
from demur.errors import BadInput
from demur.field_types import UnitInterval
from demur.methods.frameworks import Framework
from demur.methods.heads import Head, NoHead
from demur.methods.outputs import BatchOutputs, subset_weights
from demur.methods.rr import RR
from demur.noise import Stream
from demur.spec import Spec, later

HEAD_ONLY = 0x5BA6ED  # the seed by which images are set apart, the same in every run


@dataclass(frozen=True)
class Method(Spec):
    """The classification loss of a frame plus the term of a head.

    `apart` is a share of the images, always the same ones, from which the head alone learns; the
    classifier learns from the others alone, though batch norm sees all.
    """

    framework: Framework
    head: Head = NoHead()
    head_only: UnitInterval = field(default=0.0, metadata=later(neutral=0.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.head.adapt_framework(self.framework)  # refuses what does not go together
        if self.head_only == 1:
            raise BadInput("head_only=1 leaves the classifier no images; use less than 1")
        if self.head_only and not (isinstance(self.head, RR) and self.head.gradient_to == "head"):
            raise BadInput(
                "images set apart teach the head alone, so it may not change the net; use "
                "head=RR(gradient_to=head) before apart"
            )
        if self.head_only and not self.framework.one_loss_per_image:
            raise BadInput("images can be set apart where each attacked one has a loss; use PGDAT")

    @property
    def is_mean_over_images(self) -> bool:
        """Whether the loss of a batch is the mean of its parts' losses, however it is parted."""
        return (
            self.head.is_mean_over_images
            and self.framework.one_loss_per_image
            and not self.head_only
        )

    def loss(self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream) -> Tensor:
        """The mean loss of a batch; `stream` gives every step its own noise."""
        x_adv = self.craft(net, x, y, index, stream)
        return self.batch_loss(net, x, x_adv, y, self.head_only_mask(index))

    def craft(self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream) -> Tensor:
        """The images to teach with."""
        return self.head.adapt_framework(self.framework).craft(net, x, y, index, stream)

    def head_only_mask(self, index: Tensor) -> Tensor | None:
        """1 for images set apart, 0 for the others; None where there are none."""
        if self.head_only == 0:
            return None
        return (noise.uniform(HEAD_ONLY, index, 0, (1,))[:, 0] < self.head_only).float()

    def batch_loss(
        self,
        net: nn.Module,
        x: Tensor,
        x_adv: Tensor,
        y: Tensor,
        head_only_mask: Tensor | None = None,
    ) -> Tensor:
        """The mean loss of a batch whose images are crafted already."""
        return self.reduce_loss(self.outputs(net, x, x_adv, y), head_only_mask)

    def outputs(self, net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> BatchOutputs:
        """What the net makes of a batch."""
        if self.head.needs_input_gradient:
            x = x.detach().requires_grad_()
        return self.framework.outputs(net, x, x_adv, y, self.head.needs_clean)

    def reduce_loss(self, outputs: BatchOutputs, head_only_mask: Tensor | None = None) -> Tensor:
        """The mean loss of what the net made of a batch, in fp32 or better."""
        loss_per_image = self.framework.classification_loss(outputs)
        if head_only_mask is None:
            return self.head.loss(loss_per_image, outputs)
        extra = self.head.auxiliary_loss(outputs)
        assert extra is not None, "only heads that learn have images set apart for them"
        return (
            subset_weights(1 - head_only_mask) * loss_per_image
            + subset_weights(head_only_mask) * extra
        ).mean()
