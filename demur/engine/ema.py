"""Exponential moving average of a net's weights over training steps.

    ema = EMA(net, decay=0.995)
    ema.update()            # after every step; ema.net is validated and saved

At step t = 0, 1, ... the average moves towards the weights by max(1 - decay, 9 / (10 + t)). The
effective decay thus rises to its full value, and the random initial weights are forgotten soon.
"""

import copy

import torch
from torch import Tensor

from demur.nets import RejectingNet


class EMA:
    """An averaged copy of a net in eval mode; updates never synchronise with the host."""

    def __init__(self, net: RejectingNet, decay: float) -> None:
        self.net = copy.deepcopy(net).requires_grad_(False).eval()
        self.min_rate = 1 - decay
        # running statistics are averaged like weights; num_batches_tracked is copied
        self.averages, self.source = _state_tensors(self.net, True), _state_tensors(net, True)
        self.counts, self.source_counts = (
            _state_tensors(self.net, False),
            _state_tensors(net, False),
        )
        self.steps = self.averages[0].new_zeros((), dtype=torch.int64)

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current weights of the net."""
        rate = (9 / (10 + self.steps.double())).clamp(min=self.min_rate)
        rate = rate.to(self.averages[0].dtype)
        # not torch._foreach_lerp_, which needs its weight on the host
        differences = list(torch._foreach_sub(self.source, self.averages))
        torch._foreach_mul_(differences, rate)
        torch._foreach_add_(self.averages, differences)
        if self.counts:
            torch._foreach_copy_(self.counts, self.source_counts)
        self.steps += 1

    def tensors(self) -> dict[str, Tensor]:
        """Return the averaged weights and statistics and the number of updates, by name."""
        averages = {f"average.{name}": value for name, value in self.net.state_dict().items()}
        return averages | {"averaged_steps": self.steps}


def _state_tensors(net: RejectingNet, floating: bool) -> list[Tensor]:
    """Return the floating-point tensors of a net's state, or the others."""
    return [t for t in net.state_dict().values() if t.is_floating_point() == floating]
