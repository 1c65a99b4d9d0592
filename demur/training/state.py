"""The tensors that training changes: weights, running statistics, momentum and their EMA.

All tensors keep their addresses, so that a CUDA graph can update them, and a resumed run restores
them in place.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from demur.distributed import ProcessGroup
from demur.nets import RejectingNet
from demur.numerics import Precision, weights_dtype
from demur.recipes import Recipe

ADDED_TO_NORM = 1e-20  # to ||g||, as in the reference code: a zero gradient moves nothing
Tensors = dict[str, Tensor]


class AWP:
    """Perturb the weights of a net for one backward pass; never synchronise with the host.

    Adversarial weight perturbation (Wu et al. 2020). A first backward pass gives the gradient g
    of the loss at the weights w. Every weight tensor with more than one dimension moves by
    gamma ||w|| g / ||g||. The optimiser then applies the gradient taken at the moved weights to
    the original w. Perturbation begins after the fraction `start` of all epochs.
    """

    def __init__(self, net: nn.Module, gamma: float, start: float) -> None:
        self.gamma, self.start = gamma, start
        # as in the paper: biases and the affine parameters of batch norm stay
        self.weights: list[Tensor] = [p for p in net.parameters() if p.ndim > 1]
        self.weights_backup = TensorBackup(self.weights)
        self.statistics_backup = TensorBackup(list(net.buffers()))  # around the first pass
        self.current_gamma = self.weights[0].new_zeros(())

    def begin(self, progress: float) -> None:
        """Set gamma for an epoch that starts after this fraction of all epochs."""
        self.current_gamma.fill_(self.gamma if progress >= self.start else 0.0)

    @contextmanager
    def perturb(self) -> Iterator[None]:
        """Move the weights along their gradients; restore them bit by bit afterwards."""
        # the reference code steps from the moved weights and subtracts the movement afterwards,
        # so weight decay acts on the moved weights and a rounding error remains
        with self.weights_backup.preserve():
            self._move()
            yield

    @torch.no_grad()
    def _move(self) -> None:
        pairs = [(weight, weight.grad) for weight in self.weights if weight.grad is not None]
        weights, grads = [weight for weight, _ in pairs], [grad for _, grad in pairs]
        grad_norms = list(torch._foreach_norm(grads))
        torch._foreach_add_(grad_norms, ADDED_TO_NORM)
        scales = list(torch._foreach_norm(weights))
        torch._foreach_div_(scales, grad_norms)
        torch._foreach_mul_(scales, self.current_gamma)
        torch._foreach_add_(weights, list(torch._foreach_mul(grads, scales)))


class TensorBackup:
    """Copies of tensors that can be written back in place."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors, self.copies = tensors, [tensor.detach().clone() for tensor in tensors]

    @contextmanager
    def preserve(self) -> Iterator[None]:
        """Write the values from before the block back afterwards."""
        with torch.no_grad():
            torch._foreach_copy_(self.copies, self.tensors)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.tensors, self.copies)


class TrainState:
    """A net and its SGD optimiser with momentum; `precision` is by default that of the recipe."""

    def __init__(
        self, recipe: Recipe, device: torch.device, channels_last: bool = False,
        precision: Precision | None = None, world: ProcessGroup = ProcessGroup(),
    ) -> None:  # fmt: skip
        self.precision = precision or recipe.precision
        self.dtype, self.world = weights_dtype(self.precision), world
        net = recipe.net.build(recipe.data.domain, recipe.method.head, recipe.seed)
        self.net = net.to(device, self.dtype)
        if recipe.trains_head_alone:
            self.net.freeze()
        if channels_last:
            self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        on_gpu = device.type == "cuda"
        self.rate = torch.tensor(recipe.schedule.peak, device=device)
        self.trainable = {n: p for n, p in self.net.named_parameters() if p.requires_grad}
        self.optimiser = torch.optim.SGD(
            self.trainable.values(), lr=self.rate if on_gpu else recipe.schedule.peak,
            momentum=recipe.momentum, weight_decay=recipe.weight_decay,
            fused=True if on_gpu else None,
        )  # fmt: skip
        for parameter in self.trainable.values():
            self.optimiser.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self.ema = EMA(self.net, recipe.ema) if recipe.ema else None
        self.awp = AWP(self.net, recipe.awp, recipe.awp_start) if recipe.awp else None

    @torch.no_grad()
    def load_base(self, base: RejectingNet) -> None:
        nets = [self.net] if self.ema is None else [self.net, self.ema.net]
        for net in nets:
            for part, source in ((net.trunk, base.trunk), (net.classify, base.classify)):
                part.load_state_dict(source.state_dict())

    @property
    def eval_net(self) -> RejectingNet:
        """The net that is validated and saved: the EMA if the recipe has one."""
        return self.net if self.ema is None else self.ema.net

    def begin(self, progress: float) -> None:
        """Prepare an epoch that starts after this fraction of all epochs."""
        self.net.train()
        if self.awp is not None:
            self.awp.begin(progress)

    def set_learning_rate(self, rate: float) -> None:
        self.rate.fill_(rate)
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate if self.rate.is_cuda else rate

    def tensors(self) -> Tensors:
        """Return weights, running statistics, momentum and EMA by name."""
        tensors = {f"net.{name}": value for name, value in self.net.state_dict().items()}
        for name, parameter in self.trainable.items():
            tensors[f"momentum.{name}"] = self.optimiser.state[parameter]["momentum_buffer"]
        return tensors if self.ema is None else tensors | self.ema.tensors()

    def buffers(self) -> list[Tensor]:
        nets = dict.fromkeys([self.net, self.eval_net])  # one net without EMA
        return [buffer for net in nets for buffer in net.buffers()]

    @torch.no_grad()
    def restore(self, tensors: Tensors) -> None:
        """Copy saved tensors into this state, in place."""
        for name, own in self.tensors().items():
            own.copy_(tensors[name])


class EMA:
    """Exponential moving average of a net's weights, in eval mode; validated and saved.

    At step t = 0, 1, ... the average moves towards the weights by max(1 - decay, 9 / (10 + t)). The
    effective decay thus rises to its full value, and the random initial weights are forgotten
    soon. Updates never synchronise with the host.
    """

    def __init__(self, net: RejectingNet, decay: float) -> None:
        self.net = copy.deepcopy(net).requires_grad_(False).eval()
        self.min_rate = 1 - decay
        # running statistics are averaged like weights; num_batches_tracked is copied
        self.averages, self.source = _state_tensors(self.net, True), _state_tensors(net, True)
        self.counts = _state_tensors(self.net, False)
        self.source_counts = _state_tensors(net, False)
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
