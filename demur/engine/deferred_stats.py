"""Update the running statistics of a head's batch norm once, after the attack.

    stats.add(feature)      # after each forward pass with frozen running statistics
    stats.update()

In train mode batch norm normalises by batch statistics, so the running statistics can be updated
later, for all forward passes at once. With momentum m and k passes of statistics s_i the result
is (1 - m)^k r + sum_i (1 - m)^(k - i) m s_i: that of k single updates.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from demur.engine.copies import Compiler, compile_function
from demur.precision import no_autocast


class DeferredBatchNormStats:
    """Features of forward passes that the running statistics of `aux` do not include yet."""

    def __init__(self, aux: nn.Module, compiler: Compiler) -> None:
        self.aux = aux
        self.norms = {n: m for n, m in aux.named_modules() if isinstance(m, _BatchNorm)}
        self.pending: list[Tensor] = []
        self._update_compiled = compile_function(self._update, compiler)

    def add(self, feature: Tensor) -> None:
        """Store the last pooled feature (N, D) of a forward pass, unless momentum is 0."""
        if any(norm.momentum != 0 for norm in self.norms.values()):
            if self.pending and self.pending[0].shape != feature.shape:
                self.update()
            self.pending.append(feature)

    def clear(self) -> None:
        """Drop the pending forward passes."""
        self.pending = []

    @torch.no_grad()
    def update(self) -> None:
        """Update the running statistics for all pending forward passes, in their order."""
        if self.pending:
            pending, self.pending = self.pending, []
            with no_autocast(pending[0].device):
                self._update_compiled(*pending)

    def _update(self, *features: Tensor) -> None:
        passes, feature = len(features), features[0]
        zeros = {n: b.new_zeros(passes, *b.shape) for n, b in self.aux.named_buffers()}

        def updated_buffers(buffers: dict[str, Tensor], feature: Tensor) -> dict[str, Tensor]:
            functional_call(self.aux, buffers, ([feature],))
            return buffers

        # from zero, one pass leaves momentum * batch statistics in each buffer
        by_pass = vmap(updated_buffers)(zeros, torch.stack(features))
        for name, norm in self.norms.items():
            assert norm.momentum is not None
            decay = 1 - norm.momentum
            decays = decay ** torch.arange(passes - 1, -1, -1, device=feature.device)[:, None]
            for part in ("running_mean", "running_var"):
                added = (decays.to(feature.dtype) * by_pass[f"{name}.{part}"]).sum(0)
                norm.get_buffer(part).mul_(decay**passes).add_(added)
            norm.get_buffer("num_batches_tracked").add_(passes)
