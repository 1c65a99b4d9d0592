"""A net with frozen weights for attacks: compiled, captured as CUDA graphs, in low precision.

    model = FrozenModel(net, "bf16")
    attack.perturb(model, x, y, index)      # gradient queries run compiled code

In eval mode batch norm is folded into the weights. In train mode the running statistics are those
of the net, updated by each forward pass. `refresh` copies the weights after a training step.
Gradients equal those of the net up to the rounding of `precision`.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from demur.attacks.attack_model import AttackModel, Gradient, ObjectiveFunction
from demur.engine.copies import Compiler, FoldedCopy, ModelCopy, ObjectiveForward, TrainModeCopy
from demur.engine.fused_resnet import FusedResNet, fused_supported
from demur.engine.graphs import BatchBuckets, Bucket, CapturedGraph
from demur.errors import first_line
from demur.nets import RejectingNet
from demur.numerics import Precision, no_autocast, tf32
from demur.output import Output

Query = Literal["gradient", "gradients", "gradient_only", "value"]


@dataclass(frozen=True)
class StackedObjectives:
    """Several objectives of the same inputs as one function with values N, M."""

    objectives: tuple[ObjectiveFunction, ...]

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        values = [objective(out, y, *inputs) for objective in self.objectives]
        if torch.is_grad_enabled() and not all(value.requires_grad for value in values):
            raise RuntimeError("an objective does not require grad")  # else it would be 0
        return torch.stack(values, 1)


class CapturedQueries(AttackModel):
    """An AttackModel whose queries run on a copy; subclasses supply the copy's forward pass.

    On a GPU a batch is padded to its bucket and the CUDA graph of (objective, query, bucket) is
    replayed; an objective that cannot be captured runs eagerly. On a CPU a query runs as it is.

    Args:
        compiler: backend of torch.compile, or "none".
        on_message: called with a sentence if an objective cannot be compiled or captured.
    """

    training = False

    def __init__(self, compiler: Compiler, on_message: Callable[[str], None]) -> None:
        self.compiler, self.on_message = compiler, on_message
        self.buckets: BatchBuckets | None = None
        self._graphs: dict[tuple[ObjectiveFunction, Query, Bucket], CapturedGraph[Gradient]] = {}
        self._eager_objectives: set[ObjectiveFunction] = set()  # neither compiled nor captured
        self._forwards: dict[tuple[ObjectiveFunction, Query, bool], ObjectiveForward] = {}

    @abstractmethod
    def _objective_forward(self, objective: ObjectiveFunction, query: Query) -> ObjectiveForward:
        """Return the forward pass of a query; see `ModelCopy.objective_forward`."""

    def gradient(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> Gradient:
        return self._bucketed_query(objective, "gradient", x, y, *inputs)

    def gradients(
        self, objectives: Sequence[ObjectiveFunction], x: Tensor, y: Tensor, *inputs: Tensor
    ) -> list[Gradient]:
        if self.compiler != "none" or self.training:  # compiled code has one backward pass only
            return super().gradients(objectives, x, y, *inputs)
        found = self._bucketed_query(
            StackedObjectives(tuple(objectives)), "gradients", x, y, *inputs
        )
        pairs = zip(found.grad.unbind(1), found.value.unbind(1), strict=True)
        return [Gradient(grad, value, found.out) for grad, value in pairs]

    def gradient_only(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> Tensor:
        return self._bucketed_query(objective, "gradient_only", x, y, *inputs).grad

    def value(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Output]:
        result = self._bucketed_query(objective, "value", x, y, *inputs)
        return result.value, result.out

    def _bucketed_query(
        self, objective: ObjectiveFunction, query: Query, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> Gradient:
        """Pad the batch to its bucket size, run the query and drop the padding."""
        if self.buckets is None or self.training:  # padding would change the batch statistics
            return self._query(objective, query, x, y, *inputs)
        count, bucket = len(x), self.buckets.bucket_for((objective, query), len(x))
        grad, value, out = self._padded_query(objective, query, bucket, x, y, *inputs)
        return Gradient(  # copies, since the next replay overwrites its results
            grad[:count].clone(), value[:count].clone(),
            Output(*(part[:count].clone() for part in out)),
        )  # fmt: skip

    def _padded_query(
        self,
        objective: ObjectiveFunction,
        query: Query,
        bucket: Bucket,
        x: Tensor,
        y: Tensor,
        *inputs: Tensor,
    ) -> Gradient:
        """Replay the CUDA graph of the query; run it eagerly if there is none."""
        if objective in self._eager_objectives or not x.is_cuda:
            padded = (pad_batch(part, bucket.size) for part in (x, y, *inputs))
            return self._query(objective, query, *padded)
        try:
            return self._graph_for(objective, query, bucket, x, y, *inputs)(x, y, *inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # from torch.compile or the capture
            self._eager_objectives.add(objective)
            self._forwards.clear()
            self.on_message(
                f"cannot compile this objective, attacking it eagerly: {first_line(error)}"
            )
            return self._query(objective, query, x, y, *inputs)

    def _query(
        self, objective: ObjectiveFunction, query: Query, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> Gradient:
        if query == "value":
            with torch.no_grad():
                _, value, out = self._objective_forward(objective, query)(x, y, *inputs)
            return Gradient(x[:, :0], value, out)
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            total, value, out = self._objective_forward(objective, query)(x, y, *inputs)
            with no_autocast(x.device):
                if query == "gradients":
                    sums = total.unbind()
                    grads = [torch.autograd.grad(part, x, retain_graph=True)[0] for part in sums]
                    grad = torch.stack(grads, 1)
                else:
                    (grad,) = torch.autograd.grad(total, x)
        return Gradient(grad, value, out)

    def _graph_for(
        self, objective: ObjectiveFunction, query: Query, bucket: Bucket, *examples: Tensor
    ) -> CapturedGraph[Gradient]:
        """Return the CUDA graph of a query for one bucket, captured on first use."""
        assert not self.training, "the warm-up would update the running statistics"
        key = (objective, query, bucket)
        if key not in self._graphs:
            padded = (pad_batch(part, bucket.size) for part in examples)
            untuned = (objective, query, bucket._replace(tuned=False))
            self._graphs.pop(untuned, None)  # frees its memory
            function = partial(self._query, objective, query)
            self._graphs[key] = CapturedGraph(function, *padded, tune=bucket.tuned)
        return self._graphs[key]

    def set_max_batch(self, largest: int) -> None:
        """Set the largest batch size; a new size drops all captured graphs."""
        if self.buckets is None or largest != self.buckets.largest:
            # with torch.compile each size is compiled separately, which padding never repays
            self.buckets = BatchBuckets(largest, tune_later=self.compiler == "none")
            self._clear_graphs()

    def drop_graphs(self) -> None:
        """Drop the captured queries if they fill half of the memory: later batches use them."""
        if self._graphs:
            free, total = torch.cuda.mem_get_info()
            if free < total / 2:
                self._clear_graphs()

    def _clear_graphs(self) -> None:
        self._graphs.clear()
        if self.buckets is not None:
            self.buckets.reset()


def pad_batch(batch: Tensor, bucket: int) -> Tensor:
    """Append zeros to a batch up to `bucket` rows."""
    if len(batch) == bucket:
        return batch
    return torch.cat([batch, batch.new_zeros(bucket - len(batch), *batch.shape[1:])])


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
