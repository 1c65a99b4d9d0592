"""What training changes: the net's weights and the optimiser's momentum.

Where a recipe asks for it, each step is wrapped: `awp.py` moves the weights before the gradient is
taken, `averaging.py` follows them after the step.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from demur.distributed import ProcessGroup
from demur.engine.awp import AWP
from demur.engine.ema import EMA
from demur.nets import RejectingNet
from demur.precision import Precision, weights_dtype
from demur.recipes import Recipe

Tensors = dict[str, Tensor]


class TrainState:
    """A net with SGD and momentum; every tensor keeps its address for the whole run."""

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        channels_last: bool = False,
        precision: Precision | None = None,
        world: ProcessGroup = ProcessGroup(),
    ) -> None:
        self.precision = precision or recipe.precision
        self.dtype, self.world = weights_dtype(self.precision), world
        net = recipe.net.build(recipe.data.domain, recipe.method.head, recipe.seed)
        self.net = net.to(device, self.dtype)
        if recipe.base is not None:
            self.net.freeze()
        if channels_last:
            self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        on_gpu = device.type == "cuda"
        self.rate = torch.tensor(recipe.schedule.peak, device=device)
        self.learning = {n: p for n, p in self.net.named_parameters() if p.requires_grad}
        self.optimiser = torch.optim.SGD(
            self.learning.values(),
            lr=self.rate if on_gpu else recipe.schedule.peak,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            fused=True if on_gpu else None,
        )
        for parameter in self.learning.values():
            self.optimiser.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self.ema = EMA(self.net, recipe.ema) if recipe.ema else None
        self.awp = AWP(self.net, recipe.awp, recipe.awp_start) if recipe.awp else None

    @torch.no_grad()
    def load_base(self, base: RejectingNet) -> None:
        """Begin with the trunk and the classifier of a trained net."""
        nets = [self.net] if self.ema is None else [self.net, self.ema.net]
        for net in nets:
            for part, given in ((net.trunk, base.trunk), (net.classify, base.classify)):
                part.load_state_dict(given.state_dict())

    @property
    def judged(self) -> RejectingNet:
        """The net that is judged and saved: the averaged one where there is one."""
        return self.net if self.ema is None else self.ema.net

    def begin(self, passed: float) -> None:
        """Get ready for an epoch, now that this share of all epochs has passed."""
        self.net.train()
        if self.awp is not None:
            self.awp.begin(passed)

    def set_learning_rate(self, rate: float) -> None:
        """The learning rate of the next step."""
        self.rate.fill_(rate)
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate if self.rate.is_cuda else rate

    def update_weights(self, loss: Callable[[], Tensor]) -> Tensor:
        """The loss, after one step against its gradient over all processes together.

        With AWP it is asked for twice, and the second value comes back: that of the moved weights.
        """
        if self.awp is None:
            found = self._differentiated(loss)
        else:
            with self.awp.looking():
                self._differentiated(loss)
            with self.awp.perturb():
                found = self._differentiated(loss)
        self.optimiser.step()
        if self.ema is not None:
            self.ema.follow()
        return found

    def _differentiated(self, loss: Callable[[], Tensor]) -> Tensor:
        """The loss; the weights hold its gradient, summed over processes."""
        found = loss()
        self.optimiser.zero_grad()
        found.backward(inputs=list(self.learning.values()))
        self.world.all_reduce([p.grad for p in self.net.parameters() if p.grad is not None])
        return found.detach()

    def tensors(self) -> Tensors:
        """Weights, statistics, momentum and their average if there is one, by name."""
        held = {f"net.{name}": value for name, value in self.net.state_dict().items()}
        for name, parameter in self.learning.items():
            held[f"momentum.{name}"] = self.optimiser.state[parameter]["momentum_buffer"]
        return held if self.ema is None else held | self.ema.tensors()

    def statistics(self) -> list[Tensor]:
        """Batch norm's, and their average if there is one."""
        nets = dict.fromkeys([self.net, self.judged])  # one where there is no average
        return [held for net in nets for held in net.buffers()]

    @torch.no_grad()
    def restore(self, tensors: Tensors) -> None:
        """Take over tensors that were kept, in place."""
        for name, own in self.tensors().items():
            own.copy_(tensors[name])
