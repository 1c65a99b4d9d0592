"""The fast engine: a whole training step recorded once as a CUDA graph and replayed.

Attack, loss, optimiser and batch choice lie on the device with fixed addresses, so an epoch is a
row of replays with no word from the host. Gradients while crafting come from compiled code that
never computes a weight gradient. The last, partial batch takes the plain step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from demur.data import Images
from demur.engine.copies import Compiler, compile_function
from demur.engine.frozen import FrozenModel
from demur.engine.fused_resnet import FusedTrainingNet, fused_supported
from demur.engine.graphs import capture, first_line
from demur.engine.steps import PlainSteps
from demur.engine.train_state import TrainState
from demur.engine.training_step import TrainingStep
from demur.errors import BadInput
from demur.fused import fusing
from demur.precision import use_precision
from demur.recipes import Recipe


class FastSteps(PlainSteps):
    """Compiled steps, recorded as a graph on a GPU."""

    def __init__(
        self,
        recipe: Recipe,
        train_state: TrainState,
        fit: Images,
        compiler: Compiler = "inductor",
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        super().__init__(recipe, train_state, fit)
        device, self.compiler, self.say = fit.y.device, compiler, say
        self.frozen_model = FrozenModel(train_state.net, train_state.precision, compiler)
        self.fast_step = TrainingStep(recipe, train_state, fit, self.frozen_model, self._taught())
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)  # the step to come
        self.opening = torch.zeros(1, dtype=torch.int64, device=device)  # `first`, on the device
        self.rates_there = torch.zeros(self.batches, device=device)
        everyone = torch.arange(recipe.batch_size, device=device)
        self.within = train_state.world.shard(everyone)  # places of a batch that are this process's
        self.graph: torch.cuda.CUDAGraph | None = None
        self.refused = False  # whether the step could not be compiled or recorded

    def _taught(self) -> Callable[..., Tensor]:
        """The loss of crafted images, compiled; a net that can be made quick is."""
        method, net = self.recipe.method, self.train_state.net
        if method.head.needs_input_gradient:
            return method.batch_loss  # no compiler differentiates twice; a recorder does not mind
        if not fused_supported(net, self.train_state.precision):
            return compile_function(method.batch_loss, self.compiler)
        fused = FusedTrainingNet(net, self.train_state.precision, self.compiler)
        reduced = compile_function(method.reduce_loss, self.compiler)

        def batch_loss(
            net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, head_only_mask: Tensor | None
        ) -> Tensor:
            return reduced(method.outputs(fused, x, x_adv, y), head_only_mask)

        return batch_loss

    def begin(self, epoch: int) -> None:
        """Draw the order of an epoch and its learning rates."""
        super().begin(epoch)
        self.cursor.zero_()
        self.opening.fill_(self.first)
        self.rates_there.copy_(self.rates)
        whole_batches = len(self.fit) >= self.recipe.batch_size
        if self.order.is_cuda and self.graph is None and whole_batches and not self.refused:
            self._try_to_record()

    def __call__(self, i: int) -> None:
        """Take step i of the epoch."""
        if self.refused or (i + 1) * self.recipe.batch_size > len(self.fit):
            super().__call__(i)
        elif self.graph is None:
            self.train_state.set_learning_rate(float(self.rates[i]))
            self._step()
        else:
            self.graph.replay()

    def _step(self) -> None:
        """The step at the cursor; nothing in it depends on the host."""
        chosen = self.order[self.cursor * self.recipe.batch_size + self.within]
        self.train_state.rate.copy_(self.rates_there.gather(0, self.cursor)[0])
        with fusing(self.compiler == "inductor"):
            with use_precision(
                self.train_state.precision, chosen.device
            ):  # as where the copy is made
                self.frozen_model.refresh()
            share = len(self.within) / self.recipe.batch_size
            loss = self.fast_step(chosen, self.opening + self.cursor, share)
        self.losses.index_copy_(0, self.cursor, loss[None])
        self.cursor += 1

    def _try_to_record(self) -> None:
        """Record the step, or go on with the plain one, which always works, in every process."""
        reason = ""
        try:
            self._record()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the compiler or the recorder
            reason = first_line(error)
        refusals = torch.tensor([float(bool(reason))], device=self.order.device)
        self.train_state.world.all_reduce([refusals])
        if bool(refusals):
            self.graph, self.refused = None, True
            self.say(f"the fast step cannot be had here, going on with the plain one: {reason}")

    def _record(self) -> None:
        """Record the step; what the warm-up changed is put back."""
        attack = getattr(self.recipe.method.framework, "attack", None)
        if getattr(attack, "keep", None) == "success":
            raise BadInput("an attack with keep=success drops images as it goes")
        with self._unchanged():
            self.graph, _ = capture(self._step, prepare=self.cursor.zero_)

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        before = {name: value.clone() for name, value in self.train_state.tensors().items()}
        try:
            yield
        finally:
            if self.order.is_cuda:
                torch.cuda.synchronize()
            self.train_state.restore(before)
            self.cursor.zero_()
            self.losses.zero_()
