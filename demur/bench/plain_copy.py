"""A copy of a net with torch's own convolutions, for attacks of other libraries.

    plain_copy(net)(x)            # the same output

demur's convolutions have faster backward kernels; a peer comparison must not lend them to a peer.
"""

import copy

from torch import nn

from demur.nets import RejectingNet


def plain_copy(net: RejectingNet) -> RejectingNet:
    """Copy a net, in the same mode and with the same weights, with `torch.nn.Conv2d` layers."""
    plain = copy.deepcopy(net)
    for module in list(plain.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Conv2d):
                setattr(module, name, _plain_conv(child))
    return plain


def _plain_conv(conv: nn.Conv2d) -> nn.Conv2d:
    size, stride = conv.kernel_size[0], conv.stride[0]  # demur's are square with "same" padding
    plain = nn.Conv2d(conv.in_channels, conv.out_channels, size, stride, size // 2, bias=False)
    plain.weight = conv.weight
    return plain.train(conv.training)
