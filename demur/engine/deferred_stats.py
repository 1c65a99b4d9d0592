"""What a head's norms remember of the looks of an attack, taken in together when it is over.

    memory = DeferredBatchNormStats(aux, "inductor")
    memory.see(feature)     # of a look in which the norms themselves remembered nothing
    memory.take_in()

In train mode a norm goes by its batch and never by what it remembers, so that may wait: ten looks
cost the head little more than one.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from demur.engine.copies import Compiler, compile_function
from demur.precision import no_autocast


class DeferredBatchNormStats:
    """The looks that the norms of an auxiliary module have not taken in yet."""

    def __init__(self, aux: nn.Module, compiler: Compiler) -> None:
        self.aux = aux
        self.norms = {n: m for n, m in aux.named_modules() if isinstance(m, _BatchNorm)}
        self.seen: list[Tensor] = []
        self._moved = compile_function(self._move, compiler)

    def see(self, feature: Tensor) -> None:
        """Keep the last pooled feature of a look, unless no norm would remember it."""
        if any(norm.momentum != 0 for norm in self.norms.values()):
            if self.seen and self.seen[0].shape != feature.shape:
                self.take_in()
            self.seen.append(feature)

    def forget(self) -> None:
        """Drop the looks that were not taken in."""
        self.seen = []

    @torch.no_grad()
    def take_in(self) -> None:
        """Move the running statistics as the looks would have done, one after another."""
        if self.seen:
            seen, self.seen = self.seen, []
            with no_autocast(seen[0].device):
                self._moved(*seen)

    def _move(self, *features: Tensor) -> None:
        looks, feature = len(features), features[0]
        nothing = {n: b.new_zeros(looks, *b.shape) for n, b in self.aux.named_buffers()}

        def remembered(buffers: dict[str, Tensor], seen: Tensor) -> dict[str, Tensor]:
            functional_call(self.aux, buffers, ([seen],))
            return buffers

        by_look = vmap(remembered)(nothing, torch.stack(features))
        for name, norm in self.norms.items():
            assert norm.momentum is not None
            kept = 1 - norm.momentum  # by each later look
            left = kept ** torch.arange(looks - 1, -1, -1, device=feature.device)[:, None]
            for part in ("running_mean", "running_var"):
                added = (left.to(feature.dtype) * by_look[f"{name}.{part}"]).sum(0)
                norm.get_buffer(part).mul_(kept**looks).add_(added)
            norm.get_buffer("num_batches_tracked").add_(looks)
