"""A net with frozen weights for attacks: compiled, captured as CUDA graphs, in low precision.

    model = FrozenModel(net, "bf16")
    attack.perturb(model, x, y, index)      # gradient queries run compiled code

In eval mode batch norm is folded into the weights. In train mode the running statistics are those
of the net, updated by each forward pass. `refresh` copies the weights after a training step.
Gradients equal those of the net up to the rounding of `precision`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from demur.engine.copies import Compiler, FoldedCopy, ModelCopy, ObjectiveForward, TrainModeCopy
from demur.engine.fused_resnet import FusedResNet, fused_supported
from demur.engine.graphs import CapturedGraph
from demur.engine.queries import CapturedQueries, Query, pad_batch
from demur.gradient import ObjectiveFunction
from demur.nets import RejectingNet
from demur.output import Output
from demur.precision import Precision, no_autocast, tf32


class FrozenModel(nn.Module, CapturedQueries):
    """The model that the engine passes to an attack in place of the net.

    Args:
        net: the net to copy; its weights stay outside of this module's parameters.
        precision: precision of the copy.
        compiler: backend of torch.compile, or "none".
        fixed: largest batch size of attacks. Batches are then padded to a few bucket sizes, and
            each size is captured as a CUDA graph. None: all batches have one size, and the caller
            captures the whole step.
        on_message: called with a sentence if an objective cannot be compiled or captured.
    """

    def __init__(
        self,
        net: RejectingNet,
        precision: Precision,
        compiler: Compiler = "inductor",
        fixed: int | None = None,
        on_message: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        super().__init__()
        CapturedQueries.__init__(self, compiler, on_message)
        self.exact = precision in ("fp32", "fp64")  # `forward` is exact in eval mode anyway
        self.precision = precision
        self._source = (net,)  # in a tuple, so that its weights are not this module's
        self._copies: dict[bool, ModelCopy] = {}  # by train mode
        self._output_graphs: dict[int, CapturedGraph[Output]] = {}  # full precision, by batch size
        self.train(net.training)
        if fixed is not None:
            self.set_max_batch(fixed)

    def forward(self, x: Tensor) -> Output:
        """Return the output of the net in full precision, or of the copy during training."""
        if self._source[0].training:
            return self._copy().forward(x)
        needs_graph = torch.is_grad_enabled() and x.requires_grad
        if self.buckets is None or len(x) > self.buckets.largest or needs_graph or not x.is_cuda:
            return self._exact(x)
        bucket = self.buckets.coarse_size(len(x))
        if bucket not in self._output_graphs:  # untuned: too few calls to repay cuDNN benchmark
            without_grad = torch.no_grad()(self._exact)
            padded = pad_batch(x, bucket)
            self._output_graphs[bucket] = CapturedGraph(without_grad, padded, tune=False)
        return Output(*(part[: len(x)].clone() for part in self._output_graphs[bucket](x)))

    def _exact(self, x: Tensor) -> Output:
        with tf32("fp32"), no_autocast(x.device):
            out: Output = self._source[0](x)
        return out

    def set_max_batch(self, largest: int) -> None:
        if self.buckets is None or largest != self.buckets.largest:
            self._output_graphs.clear()
        super().set_max_batch(largest)

    def batch_norms(self) -> list[_BatchNorm]:
        """Return the batch norms of the copy for this mode; callers may set their momentum."""
        return [m for m in self._copy().net.modules() if isinstance(m, _BatchNorm)]

    def refresh(self) -> None:
        """Copy the current weights of the net."""
        for model_copy in self._copies.values():
            model_copy.refresh()

    def _copy(self) -> ModelCopy:
        """Return the copy for the current mode, made on first use."""
        train = self.training
        if train not in self._copies:
            (source,) = self._source
            if fused_supported(source, self.precision):
                self._copies[train] = FusedResNet(source, train, self.precision)
            else:
                kind = TrainModeCopy if train else FoldedCopy
                self._copies[train] = kind(source, self.precision)
        return self._copies[train]

    def _objective_forward(self, objective: ObjectiveFunction, query: Query) -> ObjectiveForward:
        """Return the forward pass of a query, compiled on first use."""
        key = (objective, query, self.training)
        if key not in self._forwards:
            compiler = "none" if objective in self._eager_objectives else self.compiler
            self._forwards[key] = self._copy().objective_forward(
                objective, compiler, skip_aux=query == "gradient_only"
            )
        return self._forwards[key]
