"""The average of a net's weights over the steps of a training, held beside the net.

    average = EMA(net, decay=0.995)
    average.follow()        # after every step; average.net is what is judged and saved

Each step takes a share of the new weights, max(1 - decay, 9 / (10 + t)) at step t = 0, 1, ...: the
decay grows to its full value, so the random weights of the start are soon forgotten.
"""

import copy

import torch
from torch import Tensor

from demur.nets import RejectingNet


class EMA:
    """A copy in eval mode that follows a net; nothing in it depends on the host."""

    def __init__(self, net: RejectingNet, decay: float) -> None:
        self.net = copy.deepcopy(net).requires_grad_(False).eval()
        self.least = 1 - decay  # the share of the new weights when all is settled
        # batch norm's statistics are averaged as the weights are; counts of looks are copied
        self.held, self.source = _numbers(self.net, True), _numbers(net, True)
        self.counts, self.source_counts = _numbers(self.net, False), _numbers(net, False)
        self.steps = self.held[0].new_zeros((), dtype=torch.int64)  # followed so far

    @torch.no_grad()
    def follow(self) -> None:
        """Take a share of the net as it is now."""
        share = (9 / (10 + self.steps.double())).clamp(min=self.least).to(self.held[0].dtype)
        # not by _foreach_lerp_, which would want the share on the host
        way = list(torch._foreach_sub(self.source, self.held))
        torch._foreach_mul_(way, share)
        torch._foreach_add_(self.held, way)
        if self.counts:
            torch._foreach_copy_(self.counts, self.source_counts)
        self.steps += 1

    def tensors(self) -> dict[str, Tensor]:
        """The averaged weights and statistics and how many steps they have seen, by name."""
        held = {f"average.{name}": value for name, value in self.net.state_dict().items()}
        return held | {"averaged_steps": self.steps}


def _numbers(net: RejectingNet, floating: bool) -> list[Tensor]:
    """The tensors of a net that are floating-point, or those that are not."""
    return [held for held in net.state_dict().values() if held.is_floating_point() == floating]
