"""A net as somebody else would have written it: with torch's own convolutions.

    plain_twin(net)(x)            # the same answers, none of our ways to reach them

Ours differentiate by kernels of their own, which an attack of another library would profit from.
"""

import copy

from torch import nn

from demur.nets import RejectingNet


def plain_copy(net: RejectingNet) -> RejectingNet:
    """A copy of the net in the same mode, its convolutions torch's."""
    twin = copy.deepcopy(net)
    for module in list(twin.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Conv2d):
                setattr(module, name, _plain(child))
    return twin


def _plain(conv: nn.Conv2d) -> nn.Conv2d:
    size, stride = conv.kernel_size[0], conv.stride[0]  # ours are square, and keep the places
    made = nn.Conv2d(conv.in_channels, conv.out_channels, size, stride, size // 2, bias=False)
    made.weight = conv.weight
    return made.train(conv.training)
