"""A net with frozen weights for attacks: compiled, captured as CUDA graphs, in low precision.

The running statistics are those of the net; in train mode each forward pass updates them. `refresh`
copies the weights after a training step.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from demur.attacks.attack_model import AttackModel, Gradient, ObjectiveFunction
from demur.engine.copies import Compiler, ModelCopy, ObjectiveForward, Query, input_gradient
from demur.engine.fused_resnet import FusedResNet, fused_supported
from demur.engine.graphs import CapturedGraph, QueryGraphs, pad_batch
from demur.nets import RejectingNet
from demur.numerics import Precision, no_autocast, tf32
from demur.output import Output


@dataclass(frozen=True)
class StackedObjectives:
    """Several objectives of the same inputs as one function with values N, M."""

    objectives: tuple[ObjectiveFunction, ...]

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        values = [objective(out, y, *inputs) for objective in self.objectives]
        if torch.is_grad_enabled() and not all(value.requires_grad for value in values):
            raise RuntimeError("an objective does not require grad")  # else it would be 0
        return torch.stack(values, 1)


class CopyModel(AttackModel):
    """An AttackModel whose queries run on a copy; `graphs` are their captured graphs."""

    graphs: QueryGraphs

    @abstractmethod
    def query(self, objective: ObjectiveFunction, query: Query, *tensors: Tensor) -> Gradient:
        """Return the result of a query; it has an empty gradient for query="value"."""

    def gradient(self, objective: ObjectiveFunction, *tensors: Tensor) -> Gradient:
        return self.query(objective, "gradient", *tensors)

    def gradients(
        self, objectives: Sequence[ObjectiveFunction], *tensors: Tensor
    ) -> list[Gradient]:
        found = self.query(StackedObjectives(tuple(objectives)), "gradients", *tensors)
        pairs = zip(found.grad.unbind(1), found.value.unbind(1), strict=True)
        return [Gradient(grad, value, found.out) for grad, value in pairs]

    def gradient_only(self, objective: ObjectiveFunction, *tensors: Tensor) -> Tensor:
        return self.query(objective, "gradient_only", *tensors).grad

    def value(self, objective: ObjectiveFunction, *tensors: Tensor) -> tuple[Tensor, Output]:
        result = self.query(objective, "value", *tensors)
        return result.value, result.out

    def drop_graphs(self) -> None:
        self.graphs.drop_if_memory_is_short()


class FrozenModel(nn.Module, CopyModel):
    """The model that the engine passes to an attack in place of the net.

    Without `fixed` all batches have one size, and the caller captures the whole step. With it, the
    largest batch size of attacks, batches are padded to a few bucket sizes, and each size is
    captured as a CUDA graph. `on_message` is called with a sentence if an objective cannot be
    compiled or captured.
    """

    def __init__(
        self, net: RejectingNet, precision: Precision, compiler: Compiler = "inductor",
        fixed: int | None = None, on_message: Callable[[str], None] = lambda sentence: None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.exact = precision in ("fp32", "fp64")  # `forward` is exact in eval mode anyway
        self.precision, self.compiler = precision, compiler
        # with torch.compile each size is compiled separately, which padding never repays
        self.graphs = QueryGraphs(on_message, tune_later=compiler == "none")
        self._source = (net,)  # in a tuple, so that its weights are not this module's
        self._copies: dict[bool, ModelCopy] = {}  # by train mode
        self._forwards: dict[
            tuple[ObjectiveFunction, Query, bool, Compiler], ObjectiveForward
        ] = {}  # by train mode and compiler, too
        self._output_graphs: dict[int, CapturedGraph[Output]] = {}  # full precision, by batch size
        self.train(net.training)
        if fixed is not None:
            self.set_max_batch(fixed)

    def forward(self, x: Tensor) -> Output:
        """Return the output of the net in full precision, or of the copy during training."""
        if self._source[0].training:
            return self._copy().forward(x)
        needs_graph = torch.is_grad_enabled() and x.requires_grad
        buckets = self.graphs.buckets
        if buckets is None or len(x) > buckets.largest or needs_graph or not x.is_cuda:
            return self._exact(x)
        bucket = buckets.coarse_size(len(x))
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
        if self.graphs.buckets is None or largest != self.graphs.buckets.largest:
            self._output_graphs.clear()
        self.graphs.set_max_batch(largest)

    def batch_norms(self) -> list[_BatchNorm]:
        """Return the batch norms of the copy for this mode; callers may set their momentum."""
        return [m for m in self._copy().net.modules() if isinstance(m, _BatchNorm)]

    def refresh(self) -> None:
        for model_copy in self._copies.values():
            model_copy.refresh()

    def query(self, objective: ObjectiveFunction, query: Query, *tensors: Tensor) -> Gradient:
        if self.training:  # padding would change the batch statistics, and so would the warm-up
            return self._compute(objective, query, *tensors)
        return self.graphs(self._compute, objective, query, *tensors)

    def gradients(
        self, objectives: Sequence[ObjectiveFunction], *tensors: Tensor
    ) -> list[Gradient]:
        if self.compiler != "none" or self.training:  # compiled code has one backward pass only
            return AttackModel.gradients(self, objectives, *tensors)
        return super().gradients(objectives, *tensors)

    def _compute(
        self, objective: ObjectiveFunction, query: Query, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> Gradient:
        differentiate = query != "value"
        with torch.set_grad_enabled(differentiate):
            x = x.detach().requires_grad_(differentiate)
            total, value, out = self._objective_forward(objective, query)(x, y, *inputs)
            return Gradient(input_gradient(total, x, query), value, out)

    def _copy(self) -> ModelCopy:
        """Return the copy for the current mode, made on first use."""
        train = self.training
        if train not in self._copies:
            (source,) = self._source
            kind = FusedResNet if fused_supported(source, self.precision) else ModelCopy
            self._copies[train] = kind(source, train, self.precision)
        return self._copies[train]

    def _objective_forward(self, objective: ObjectiveFunction, query: Query) -> ObjectiveForward:
        """Return the forward pass of a query, compiled on first use."""
        compiler: Compiler = "none" if objective in self.graphs.eager else self.compiler
        key = (objective, query, self.training, compiler)
        if key not in self._forwards:
            self._forwards[key] = self._copy().objective_forward(
                objective, compiler, skip_aux=query == "gradient_only"
            )
        return self._forwards[key]
