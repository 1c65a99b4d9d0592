"""The fast engine: a whole training step captured once as a CUDA graph and replayed.

The step reads and writes fixed device addresses, so an epoch has no host-device synchronisation.
It draws the noise and takes the gradients of the plain step, so both end with the same weights up
to rounding (benchmarks/engine_check.py). The last, partial batch takes the plain step.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from demur.data import Images
from demur.engine import (
    Compiler,
    FrozenModel,
    FusedTrainingNet,
    capture,
    compile_function,
    fused_supported,
)
from demur.errors import BadInput, first_line
from demur.numerics import fusing, use_precision
from demur.progress import ignore
from demur.recipes import Recipe
from demur.training.state import TrainState
from demur.training.step import PlainSteps, TrainingStep


class FastSteps(PlainSteps):
    """Compiled training steps, replayed from a CUDA graph on a GPU."""

    def __init__(
        self,
        recipe: Recipe,
        train_state: TrainState,
        fit: Images,
        compiler: Compiler = "inductor",
        on_message: Callable[[str], None] = ignore,
    ) -> None:
        super().__init__(recipe, train_state, fit)
        device, self.compiler, self.on_message = fit.y.device, compiler, on_message
        self.frozen_model = FrozenModel(train_state.net, train_state.precision, compiler)
        self.fast_step = TrainingStep(
            recipe, train_state, fit, self.frozen_model, self._compiled_loss()
        )
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)  # next step of the epoch
        self.first_step_on_device = torch.zeros(1, dtype=torch.int64, device=device)
        self.rates_on_device = torch.zeros(self.batches, device=device)
        positions = torch.arange(recipe.batch_size, device=device)
        self.shard_positions = train_state.world.shard(positions)  # this rank's part of a batch
        if self.stream is not None:
            # a captured step reads its batch from fixed addresses, filled before each replay
            self.fast_step.fit = _empty_batch(fit, len(self.shard_positions))
        self.graph: torch.cuda.CUDAGraph | None = None
        self.capture_failed = False

    def _compiled_loss(self) -> Callable[..., Tensor]:
        """Return the batch loss, compiled, with a fused net if the net supports that."""
        method, net = self.recipe.method, self.train_state.net
        if method.head.needs_input_gradient:
            # torch.compile has no double backward; a CUDA graph captures the eager one
            return method.batch_loss
        if not fused_supported(net, self.train_state.precision):
            return compile_function(method.batch_loss, self.compiler)
        fused_net = FusedTrainingNet(net, self.train_state.precision, self.compiler)
        reduce_loss = compile_function(method.reduce_loss, self.compiler)

        def batch_loss(
            net: nn.Module,
            x: Tensor,
            x_adv: Tensor,
            y: Tensor,
            head_only_mask: Tensor | None,
            target: Tensor | None,
        ) -> Tensor:
            return reduce_loss(method.outputs(fused_net, x, x_adv, y, target), head_only_mask)

        return batch_loss

    def begin(self, epoch: int) -> None:
        super().begin(epoch)
        self.cursor.zero_()
        self.first_step_on_device.fill_(self.first_step)
        self.rates_on_device.copy_(self.rates)
        ready = self.strength == 1 and len(self.order) >= self.recipe.batch_size
        if self.order.is_cuda and self.graph is None and ready and not self.capture_failed:
            self._try_capture()

    def __call__(self, i: int) -> None:
        partial = (i + 1) * self.recipe.batch_size > len(self.order)
        if self.capture_failed or partial or self.strength < 1:  # a captured step has the full eps
            super().__call__(i)
            return
        if self.stream is not None:
            batch = self.stream.next()
            for name in ("pixels", "y", "index"):  # into the tensors that a captured step reads
                target: Tensor = getattr(self.fast_step.fit, name)
                target.copy_(getattr(batch, name), non_blocking=True)
        if self.graph is None:
            self.train_state.set_learning_rate(float(self.rates[i]))
            self._step()
        else:
            self.graph.replay()

    def _step(self) -> None:
        """Take the step at the cursor; read all inputs from the device."""
        chosen = self.order[self.cursor * self.recipe.batch_size + self.shard_positions]
        if self.stream is not None:
            chosen = torch.arange(len(chosen), device=chosen.device)
        self.train_state.rate.copy_(self.rates_on_device.gather(0, self.cursor)[0])
        with fusing(self.compiler == "inductor"):
            # the precision under which the attack will use the copy
            with use_precision(self.train_state.precision, chosen.device):
                self.frozen_model.refresh()
            share = len(self.shard_positions) / self.recipe.batch_size
            loss = self.fast_step(chosen, self.first_step_on_device + self.cursor, share)
        self.losses.index_copy_(0, self.cursor, loss[None])
        self.cursor += 1

    def _try_capture(self) -> None:
        """Capture the step; if that fails in any process, use the plain step in all of them.

        The plain step needs less memory, so it may fit where the capture does not.
        """
        reason = ""
        try:
            self._capture()
        except Exception as error:  # from torch.compile or the capture, also out of memory
            reason = first_line(error)
        if reason:
            self.train_state.optimiser.zero_grad()  # gradients may lie in the memory of the graph
            if self.order.is_cuda:
                torch.cuda.empty_cache()
        failures = torch.tensor([float(bool(reason))], device=self.order.device)
        self.train_state.world.all_reduce([failures])
        if bool(failures):
            self.graph, self.capture_failed = None, True
            self.on_message(f"cannot capture the fast training step, using the plain one: {reason}")

    def _capture(self) -> None:
        """Capture the step and undo the changes of the warm-up."""
        attack = getattr(self.recipe.method.framework, "attack", None)
        if attack is not None and attack.keep_rule == "success":
            raise BadInput("an attack with keep=success changes its batch size while it runs")
        before = {name: value.clone() for name, value in self.train_state.tensors().items()}
        try:
            self.graph, _ = capture(self._step, prepare=self.cursor.zero_)
        finally:
            if self.order.is_cuda:
                torch.cuda.synchronize()
            self.train_state.restore(before)
            self.cursor.zero_()
            self.losses.zero_()


def _empty_batch(fit: Images, count: int) -> Images:
    """Return a batch of `count` images on the device of the labels, to be filled."""
    device = fit.y.device
    pixels = torch.zeros(count, *fit.pixels.shape[1:], dtype=torch.uint8, device=device)
    numbers = torch.zeros(count, dtype=torch.int64, device=device)
    return Images(pixels, numbers, numbers.clone(), fit.levels)
