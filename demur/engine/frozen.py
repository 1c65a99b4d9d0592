"""A net as an attack sees it: the same answers, its weights held still in the fast arithmetic.

    crafter = FrozenModel(net, "bf16")
    attack.perturbed(crafter, x, y, index)      # gradients come from compiled code

In eval mode batch norm is folded into scales and shifts; in train mode running statistics are the
net's own and move, with every look or by `remember`. `refresh` follows a net that has learned.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from demur.engine.buckets import BatchBuckets, Bucket
from demur.engine.copies import Compiler, ModelCopy, ObjectiveForward, TrainModeCopy
from demur.engine.folding import FoldedCopy
from demur.engine.fused_resnet import FusedResNet, fused_supported
from demur.engine.graphs import CapturedGraph, first_line
from demur.gradient import Gradient, ObjectiveFunction
from demur.nets import RejectingNet
from demur.output import Output
from demur.precision import Precision, no_autocast, tf32

Want = Literal["gradient", "gradient_only", "value"]


class FrozenModel(nn.Module):
    """What the engine hands to an attack in place of the net."""

    def __init__(
        self,
        net: RejectingNet,
        precision: Precision,
        compiler: Compiler = "inductor",
        fixed: int | None = None,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        super().__init__()
        self.precision, self.compiler, self.say = precision, compiler, say
        # for batches padded to a few sizes, each recorded; None where all batches are alike and
        # recorded by whoever crafts
        self.buckets: BatchBuckets | None = None
        self._source = (net,)  # in a tuple, so that its weights are not this module's
        self._copies: dict[bool, ModelCopy] = {}  # by mode
        self._recordings: dict[tuple[ObjectiveFunction, Want, Bucket], CapturedGraph[Gradient]] = {}
        self._answers: dict[int, CapturedGraph[Output]] = {}  # in full precision, by batch size
        self._unrecorded: set[ObjectiveFunction] = set()  # goals that no compiler or recorder takes
        self._looks: dict[
            tuple[ObjectiveFunction, Want, bool], ObjectiveForward
        ] = {}  # by mode too
        self.train(net.training)
        if fixed is not None:
            self.set_max_batch(fixed)

    @property
    def exact(self) -> bool:
        """Whether `gradient` answers as the net does; where not, `forward` still does."""
        return self.precision in ("fp32", "fp64")

    def forward(self, x: Tensor) -> Output:
        """The net's own answer in full precision; that of the copy while the net is learning."""
        if self._source[0].training:
            return self._copy().answer(x)
        followed = torch.is_grad_enabled() and x.requires_grad
        if self.buckets is None or len(x) > self.buckets.largest or followed or not x.is_cuda:
            return self._exact(x)
        bucket = self.buckets.usual(len(x))
        if bucket not in self._answers:  # untuned: a few looks would not pay for the trials
            quietly = torch.no_grad()(self._exact)
            self._answers[bucket] = CapturedGraph(quietly, pad_batch(x, bucket), tune=False)
        return Output(*(part[: len(x)].clone() for part in self._answers[bucket](x)))

    def _exact(self, x: Tensor) -> Output:
        with tf32("fp32"), no_autocast(x.device):
            out: Output = self._source[0](x)
        return out

    def gradient(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> Gradient:
        """The goal's gradient with respect to each image."""
        return self._sized(objective, "gradient", x, y, *inputs)

    def gradient_only(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> Tensor:
        """The goal's gradient alone."""
        return self._sized(objective, "gradient_only", x, y, *inputs).grad

    def value(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Output]:
        """The goal's value and the output, in the arithmetic of the gradient."""
        found = self._sized(objective, "value", x, y, *inputs)
        return found.value, found.out

    def _sized(
        self, objective: ObjectiveFunction, want: Want, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> Gradient:
        """The gradient, taken in a batch of a compiled size."""
        if self.buckets is None or self.training:  # padding would move the statistics
            return self._gradient(objective, want, x, y, *inputs)
        count, bucket = len(x), self.buckets.bucket_for((objective, want), len(x))
        grad, value, out = self._taken(objective, want, bucket, x, y, *inputs)
        return Gradient(  # copies, since the next replay writes over what this one made
            grad[:count].clone(), value[:count].clone(),
            Output(*(part[:count].clone() for part in out)),
        )  # fmt: skip

    def _taken(
        self,
        objective: ObjectiveFunction,
        want: Want,
        bucket: Bucket,
        x: Tensor,
        y: Tensor,
        *inputs: Tensor,
    ) -> Gradient:
        """The gradient by a recording if there can be one, else as it comes."""
        if objective in self._unrecorded or not x.is_cuda:
            whole = (pad_batch(part, bucket.size) for part in (x, y, *inputs))
            return self._gradient(objective, want, *whole)
        try:
            return self._recording(objective, want, bucket, x, y, *inputs)(x, y, *inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the compiler or the recorder
            self._unrecorded.add(objective)
            self._looks.clear()
            self.say(f"this goal cannot be compiled and is attacked slowly: {first_line(error)}")
            return self._gradient(objective, want, x, y, *inputs)

    def _gradient(
        self, objective: ObjectiveFunction, want: Want, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> Gradient:
        if want == "value":
            with torch.no_grad():
                _, value, out = self._look(objective, want)(x, y, *inputs)
            return Gradient(x[:, :0], value, out)
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            total, value, out = self._look(objective, want)(x, y, *inputs)
            with no_autocast(x.device):
                (grad,) = torch.autograd.grad(total, x)
        return Gradient(grad, value, out)

    def _recording(
        self, objective: ObjectiveFunction, want: Want, bucket: Bucket, *examples: Tensor
    ) -> CapturedGraph[Gradient]:
        """The gradient of a goal for one batch size, recorded when first asked for."""
        assert not self.training, "trying it out would move running statistics"
        key = (objective, want, bucket)
        if key not in self._recordings:
            whole = (pad_batch(part, bucket.size) for part in examples)
            self._recordings.pop(
                (objective, want, bucket._replace(tuned=False)), None
            )  # it holds memory
            objective_forward = partial(self._gradient, objective, want)
            self._recordings[key] = CapturedGraph(objective_forward, *whole, tune=bucket.tuned)
        return self._recordings[key]

    def set_max_batch(self, largest: int) -> None:
        """Expect batches of at most this size; what was recorded for others is dropped."""
        if self.buckets is None or largest != self.buckets.largest:
            # where each size is compiled for itself, no waste pays for another
            self.buckets = BatchBuckets(largest, fits=self.compiler == "none")
            self._answers.clear()
            self.forget()

    def forget(self) -> None:
        """Drop all recordings, which hold memory, as when another attack begins."""
        self._recordings.clear()
        if self.buckets is not None:
            self.buckets.forget()

    def batch_norms(self) -> list[_BatchNorm]:
        """Those of the copy for this mode; a frame may hold their momentum."""
        return [m for m in self._copy().net.modules() if isinstance(m, _BatchNorm)]

    def remember(self) -> None:
        """Let the norms take in what was looked at; whoever crafts says when that is over."""
        for held in self._copies.values():
            if isinstance(held, FusedResNet):
                held.remember()

    def refresh(self) -> None:
        """Take over what the net has learned."""
        for held in self._copies.values():
            held.refresh()

    def _copy(self) -> ModelCopy:
        """The copy to look at in this mode, made when first asked for."""
        train = self.training
        if train not in self._copies:
            (source,) = self._source
            if fused_supported(source, self.precision):
                self._copies[train] = FusedResNet(source, train, self.precision, self.compiler)
            else:
                kind = TrainModeCopy if train else FoldedCopy
                self._copies[train] = kind(source, self.precision)
        return self._copies[train]

    def _look(self, objective: ObjectiveFunction, want: Want) -> ObjectiveForward:
        """One look at images for a goal, compiled when first asked for."""
        key = (objective, want, self.training)
        if key not in self._looks:
            compiler = "none" if objective in self._unrecorded else self.compiler
            self._looks[key] = self._copy().objective_forward(
                objective, compiler, skip_aux=want == "gradient_only"
            )
        return self._looks[key]


def pad_batch(batch: Tensor, bucket: int) -> Tensor:
    """A batch with zeros behind it, up to the room there is."""
    if len(batch) == bucket:
        return batch
    return torch.cat([batch, batch.new_zeros(bucket - len(batch), *batch.shape[1:])])
