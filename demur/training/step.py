"""One training step of a recipe: augment, attack, compute the loss, update the weights; its cost.

The loss is that of the method (`methods/method.py`); with the RR head it contains Eq. 7. The fast
engine captures a whole step once as a CUDA graph, which reads and writes fixed device addresses, so
an epoch has no host-device synchronisation. It draws the noise and takes the gradients of the plain
step, so both end with the same weights up to rounding (benchmarks/engine_check.py). The last,
partial batch takes the plain step.
"""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from demur import noise
from demur.data import BatchStream, Images, MappedImages
from demur.engine import (
    Compiler,
    FrozenModel,
    FusedTrainingNet,
    capture,
    compile_function,
    fused_supported,
)
from demur.errors import BadInput, first_line
from demur.methods import Method
from demur.nets import ResNet8
from demur.noise import Stream
from demur.numerics import autocast, fusing, tf32, use_precision
from demur.progress import ignore
from demur.recipes import Recipe
from demur.training.state import TrainState

ORDER, AUGMENT, CRAFT = 1, 2, 3  # random streams of batch order, augmentation and attack


class TrainingStep:
    """Update a TrainState by one step and return the loss.

    The noise depends only on (seed, image, step), so every engine draws the same. Attacks query
    `model`, by default the net itself; `batch_loss` is a faster version of the method's own.
    """

    def __init__(
        self, recipe: Recipe, train_state: TrainState, fit: Images, model: nn.Module | None = None,
        batch_loss: Callable[..., Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.recipe, self.train_state, self.fit = recipe, train_state, fit
        self.method: Method | None = recipe.method
        self.model = model or train_state.net
        self.batch_loss = batch_loss or recipe.method.batch_loss
        images = len(fit) * recipe.passes(len(fit))
        self.total_steps = recipe.epochs * -(-images // recipe.batch_size)

    def __call__(self, chosen: Tensor, step: Stream, share: float = 1.0) -> Tensor:
        """Train on the chosen images; return their mean loss times `share`.

        `share` is the fraction of the whole batch in this process, so that losses and gradients
        sum over processes to those of the whole batch.
        """
        recipe, train_state = self.recipe, self.train_state
        x, y = self.fit.batch(chosen)
        index = self.fit.index[chosen]
        seed = noise.derive_seed(recipe.seed, AUGMENT)
        x = recipe.augment(x.to(train_state.dtype), seed, index, step)
        stream = noise.derive_seed(recipe.seed, CRAFT, step)
        with tf32(train_state.precision):
            with autocast(train_state.precision, x.device):
                x_adv = self.method.craft(self.model, x, y, index, stream) if self.method else x

            head_only_mask = recipe.method.head_only_mask(index)
            target = self._soft_labels(x, y, step)

            def loss() -> Tensor:
                with autocast(train_state.precision, x.device):
                    return share * self.batch_loss(
                        train_state.net, x, x_adv, y, head_only_mask, target
                    )

            return self._update_weights(loss)

    @torch.no_grad()
    def _soft_labels(self, x: Tensor, y: Tensor, step: Stream) -> Tensor | None:
        """Return the target probabilities of soft labels, N, K; None for hard labels."""
        recipe, train_state = self.recipe, self.train_state
        teacher = None
        if recipe.labels.needs_teacher and train_state.ema is not None:
            with autocast(train_state.precision, x.device):
                teacher = train_state.ema.net(x)
        progress = step / self.total_steps
        return recipe.labels.targets(y, recipe.data.domain.classes, progress, teacher)

    def _update_weights(self, loss: Callable[[], Tensor]) -> Tensor:
        """Take one optimiser step on the gradient over all processes; return the loss.

        AWP evaluates the loss twice; the second value, at the perturbed weights, is returned.
        """
        awp, ema = self.train_state.awp, self.train_state.ema
        if awp is None:
            value = self._backward(loss)
        else:
            with awp.statistics_backup.preserve():
                self._backward(loss)
            with awp.perturb():
                value = self._backward(loss)
        self.train_state.optimiser.step()
        if ema is not None:
            ema.update()
        return value

    def _backward(self, loss: Callable[[], Tensor]) -> Tensor:
        train_state, value = self.train_state, loss()
        train_state.optimiser.zero_grad()
        value.backward(inputs=list(train_state.trainable.values()))
        grads = [p.grad for p in train_state.net.parameters() if p.grad is not None]
        train_state.world.all_reduce(grads)
        return value.detach()


class PlainSteps:
    """The training steps of an epoch; eager, the reference for `FastSteps`.

    Under torchrun each rank trains on its shard of every batch, and `losses` holds its shares of
    the losses of an epoch's steps: all-reduce them to get the means of the batches.
    """

    def __init__(self, recipe: Recipe, train_state: TrainState, fit: Images) -> None:
        self.recipe, self.train_state, self.fit = recipe, train_state, fit
        self.passes = recipe.passes(len(fit))
        self.batches = -(-len(fit) * self.passes // recipe.batch_size)
        device = fit.y.device
        self.order = torch.zeros(len(fit) * self.passes, dtype=torch.int64, device=device)
        self.rates = torch.zeros(self.batches)
        self.losses = torch.zeros(self.batches, dtype=train_state.dtype, device=device)
        self.first_step = 0  # steps of the run before this epoch
        self.plain_step = TrainingStep(recipe, train_state, fit)
        # images that do not fit on the device come from worker processes, batch by batch
        self.stream = BatchStream(fit) if isinstance(fit, MappedImages) else None

    def begin(self, epoch: int) -> None:
        """Draw the batch order of an epoch and set its learning rates."""
        seed = noise.derive_seed(self.recipe.seed, ORDER)
        orders = range(epoch * self.passes, (epoch + 1) * self.passes)
        self.order.copy_(torch.cat([noise.permutation(seed, len(self.fit), k) for k in orders]))
        self.strength, method = self.recipe.strength(epoch), self.recipe.method
        self.plain_step.method = method.scaled(self.strength) if self.strength else None
        self.first_step = epoch * self.batches
        total = self.recipe.epochs * self.batches
        steps = range(self.first_step + 1, self.first_step + self.batches + 1)
        self.rates = torch.tensor([self.recipe.schedule(step / total) for step in steps])
        self.train_state.begin(epoch / self.recipe.epochs)
        if self.stream is not None:
            self.stream.begin([self._shard(i)[0] for i in range(self.batches)])

    def __call__(self, i: int) -> None:
        self.train_state.set_learning_rate(float(self.rates[i]))
        shard, share = self._shard(i)
        if self.stream is not None:
            self.plain_step.fit = self.stream.next()
            shard = torch.arange(len(shard), device=shard.device)
        self.losses[i] = self.plain_step(shard, self.first_step + i, share)

    def _shard(self, i: int) -> tuple[Tensor, float]:
        """Positions of this rank's images of batch i, and their share of the batch."""
        size = self.recipe.batch_size
        batch = self.order[i * size : (i + 1) * size]
        shard = self.train_state.world.shard(batch)
        return shard, len(shard) / len(batch)


class FastSteps(PlainSteps):
    """Compiled training steps, replayed from a CUDA graph on a GPU."""

    def __init__(
        self, recipe: Recipe, train_state: TrainState, fit: Images,
        compiler: Compiler = "inductor", on_message: Callable[[str], None] = ignore,
    ) -> None:  # fmt: skip
        super().__init__(recipe, train_state, fit)
        device, self.compiler, self.on_message = fit.y.device, compiler, on_message
        self.frozen_model = FrozenModel(train_state.net, train_state.precision, compiler)
        loss = self._compiled_loss()
        self.fast_step = TrainingStep(recipe, train_state, fit, self.frozen_model, loss)
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
            net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, head_only_mask: Tensor | None,
            target: Tensor | None,
        ) -> Tensor:  # fmt: skip
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


# From benchmarks/small_data.py: photographs of five classes of CIFAR-10, 32 pixels, one seed, 1,000
# test images, PGD-10
MEASURED_IMAGES = 305  # training images
MEASURED = {  # clean and attacked accuracy in percent, by recipe
    "images-standard-small": (52.5, 38.9),  # attacked at 2/255
    "images-pgdat-rr-small eps=2/255": (56.1, 45.2),
    "images-pgdat-rr-small eps=4/255": (56.4, 40.2),
    "images-pgdat-rr-small eps=8/255": (53.2, 30.4),
}
TIMED_IMAGES = 8  # images of the step whose time is measured


def expectations(recipe: Recipe, fit: Images, device: torch.device) -> Iterator[str]:
    """Yield sentences about accuracy and, on a CPU, time of a training on own images."""
    if isinstance(recipe.net, ResNet8):
        near = MEASURED_IMAGES / 2 <= len(fit) <= 2 * MEASURED_IMAGES
        said = "expect" if near else f"no accuracy is known; {MEASURED_IMAGES} gave"
        figures = [f"{x:.0f}% and {y:.0f}% ({name})" for name, (x, y) in MEASURED.items()]
        yield (
            f"on {len(fit)} training images {said} clean and attacked accuracies of about "
            f"{', '.join(figures)}: measured on {MEASURED_IMAGES} photographs of five classes, "
            "chance 20%"
        )
    if device.type == "cpu":
        minutes = max(1, round(_seconds(recipe, fit, device) / 60))
        yield f"training takes about {minutes} min on this machine"


def _seconds(recipe: Recipe, fit: Images, device: torch.device) -> float:
    step, count = TrainingStep(recipe, TrainState(recipe, device), fit.to(device)), TIMED_IMAGES
    chosen = torch.arange(count, device=device) % len(fit)
    step.train_state.begin(0)
    step(chosen, 0)  # warms up
    start = time.monotonic()
    step(chosen, 1)
    attacked = sum(recipe.strength(epoch) > 0 for epoch in range(recipe.epochs))
    images = len(fit) * recipe.passes(len(fit)) * attacked
    return (time.monotonic() - start) * images / count
