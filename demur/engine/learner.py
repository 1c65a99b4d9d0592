"""What training changes: the net's weights and the optimiser's momentum."""

import torch
from torch import Tensor

from demur.precision import Precision, weights_dtype
from demur.recipes import Recipe
from demur.world import World

Tensors = dict[str, Tensor]


class Learner:
    """A net with SGD and momentum; every tensor keeps its address for the whole run."""

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        channels_last: bool = False,
        precision: Precision | None = None,
        world: World = World(),
    ) -> None:
        self.precision = precision or recipe.precision
        self.dtype, self.world = weights_dtype(self.precision), world
        net = recipe.net.build(recipe.data.domain, recipe.method.head, recipe.seed)
        self.net = net.to(device, self.dtype)
        if channels_last:
            self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        on_gpu = device.type == "cuda"
        self.rate = torch.tensor(recipe.schedule.peak, device=device)
        self.optimiser = torch.optim.SGD(
            self.net.parameters(),
            lr=self.rate if on_gpu else recipe.schedule.peak,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            fused=True if on_gpu else None,
        )
        for parameter in self.net.parameters():
            self.optimiser.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next step."""
        self.rate.fill_(rate)
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate if self.rate.is_cuda else rate

    def learn_from(self, loss: Tensor) -> None:
        """Change the weights against the gradient of the losses of all processes together."""
        self.optimiser.zero_grad()
        loss.backward()
        self.world.add_up([p.grad for p in self.net.parameters() if p.grad is not None])
        self.optimiser.step()

    def tensors(self) -> Tensors:
        """Weights, statistics and momentum, by name."""
        held = {f"net.{name}": value for name, value in self.net.state_dict().items()}
        for name, parameter in self.net.named_parameters():
            held[f"momentum.{name}"] = self.optimiser.state[parameter]["momentum_buffer"]
        return held

    @torch.no_grad()
    def restore(self, tensors: Tensors) -> None:
        """Take over tensors that were kept, in place."""
        for name, own in self.tensors().items():
            own.copy_(tensors[name])
