"""Training of a recipe: crash-safe and resumable.

A training that was killed resumes after the last saved epoch when `train` is called again. On a
CPU with the same number of threads it ends with bit-identical weights. Under torchrun only rank 0
writes files.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from demur import distributed
from demur.attacks import Attack, Clean
from demur.data import Images, Splits
from demur.engine import EnginePlan, FrozenModel, choose_plan
from demur.engine.plan import MessageCallback
from demur.errors import BadInput, Diverged
from demur.files.checked_files import content_digest, write_text
from demur.methods import attack_mode
from demur.numerics import tf32, use_precision
from demur.output import prediction
from demur.progress import ignore
from demur.recipes import Recipe
from demur.runs import Run, provenance
from demur.runs.run import (
    LISTING,
    ResumeState,
    load_state,
    save_state,
    stored_plan,
    write_checkpoint,
    write_metrics,
)
from demur.spec import digest, show
from demur.training.logs import Logs, MakeLog
from demur.training.state import Tensors, TrainState
from demur.training.step import FastSteps, PlainSteps

BATCH = 250


@dataclass(frozen=True)
class Progress:
    """The progress of a training, passed to `on_progress` after every step and every epoch."""

    epoch: int  # finished epochs
    epochs: int
    step: int  # finished steps of the current epoch
    steps: int  # per epoch
    loss: float | None = None  # mean loss of the last epoch
    robust: float | None = None  # accuracy on the selection split under the validation attack
    clean: float | None = None  # accuracy on the selection split without attack


MAX_LOSS = 1e6  # a larger loss means that training has diverged
SAVE_TIME_SHARE = 0.02  # of the training time

ProgressCallback = Callable[[Progress], None]


def train(
    recipe: Recipe, folder: Path, device: torch.device | None = None,
    data_folder: Path | None = None, on_progress: ProgressCallback = ignore, engine: str = "auto",
    on_message: MessageCallback = ignore, logs: Sequence[str | MakeLog] = (),
) -> Run:  # fmt: skip
    """Train a recipe in a folder, or resume the training that an earlier call started there.

    A finished run is returned unchanged. Under torchrun all processes call this function.

    Args:
        recipe: data, net, method, schedule and seed.
        folder: the run folder.
        device: where to train; None: the CPU.
        data_folder: where the data set is; None: the usual places.
        on_progress: called with a Progress after every step and every epoch.
        engine: "auto", "plain" (eager, the reference) or "fast" (CUDA graphs).
        on_message: called with sentences about the data and the choice of the engine.
        logs: "csv", "tensorboard", "mlflow", "wandb" or functions; see `demur.training.logs`.

    Returns:
        The finished run.

    Raises:
        BadInput: the recipe cannot be trained on these images or by so many processes, or the
            folder belongs to another recipe or is damaged.
        Diverged: the loss is too large or not finite; the last saved epoch stays in the folder.

    Example:
        >>> from pathlib import Path
        >>> from demur import recipe, train
        >>> short = recipe("digits-pgdat-rr", ["epochs=1", "width=4", "attack.steps=1"])
        >>> train(short, Path("runs/short")).has_weights
        True
    """
    world = distributed.current()
    recipe = replace(recipe, data=recipe.data.prepared(on_message=on_message))
    if world.is_leader:
        Run.check(folder, recipe)
    splits = recipe.data.load(data_folder)
    check_trainable(recipe, splits, world.size)
    base_of(recipe)
    opened = Logs(logs, folder, on_message)  # raises before anything is written
    device = device or torch.device("cpu")
    with Run.claim(folder, recipe) if world.is_leader else nullcontext(Run(folder)) as run:
        if not world.broadcast(run.has_weights):
            plan = choose_plan(engine, recipe, device, on_message)
            plan = world.broadcast(plan.resumed(stored_plan(run)) if world.is_leader else plan)
            if world.is_leader and (listing := recipe.data.listing(data_folder)) is not None:
                write_text(run.path / LISTING, listing)
            Training(recipe, run, splits, device, plan, on_progress, on_message, opened).train()
    world.barrier()
    return run


def check_trainable(recipe: Recipe, splits: Splits, processes: int = 1) -> None:
    """Raise BadInput if training would fail later: splits, classes and batch sizes.

    Batch norm needs at least two images in every batch of every process.
    """
    fit = splits["fit"]
    if recipe.selection_split not in (None, *splits):
        raise BadInput(
            f"{show(recipe.data)} has no {recipe.selection_split} images; use selection=last"
        )
    recipe.net.check(recipe.data.domain)
    if len(fit.y.unique()) < 2:
        raise BadInput("the fit split has one class only; a classifier needs at least two")
    last = len(fit) * recipe.passes(len(fit)) % recipe.batch_size or recipe.batch_size
    if last == 1 or recipe.batch_size == 1:
        raise BadInput(
            f"batch_size={recipe.batch_size} leaves a batch of one image out of {len(fit)}, and "
            f"batch norm needs two; try batch_size={recipe.batch_size + 1}"
        )
    if last < 2 * processes:
        raise BadInput(
            f"the last batch has {last} images, too few for {processes} processes with two each; "
            "start fewer processes or change batch_size"
        )


class Training:
    """The training of one run: its state, its steps and the loop over epochs."""

    def __init__(
        self, recipe: Recipe, run: Run, splits: Splits, device: torch.device, plan: EnginePlan,
        on_progress: ProgressCallback, on_message: MessageCallback, logs: Logs | None = None,
    ) -> None:  # fmt: skip
        self.recipe, self.run, self.plan = recipe, run, plan
        self.on_progress, self.logs = on_progress, logs or Logs((), run.path)
        self.world = distributed.current()
        self.data = {name: images.digest() for name, images in splits.items()}
        self.fit = splits["fit"].to(device)
        split = recipe.selection_split  # None if the last epoch is selected
        self.selection_images = None if split is None else splits[split].to(device)
        state = TrainState(recipe, device, plan.channels_last, plan.precision, self.world)
        self.base = base_of(recipe)
        if self.base is not None:
            state.load_base(self.base.net(torch.device("cpu")))
        if plan.engine == "fast" and device.type == "cuda":
            self.steps: PlainSteps = FastSteps(recipe, state, self.fit, on_message=on_message)
        else:
            self.steps = PlainSteps(recipe, state, self.fit)
        self.train_state, self.validator = state, Validator(state, plan.engine)
        self.best: Tensors = {}  # weights of the best epoch so far
        self.saved_epoch = 0
        self.next_save = 0.0  # on the monotonic clock

    def train(self) -> None:
        """Train from the last saved epoch to the end and write the selected weights."""
        state = self._resume()
        progress = Progress(state.epoch, self.recipe.epochs, 0, self.steps.batches)
        while state.epoch < self.recipe.epochs:
            start = time.monotonic()
            loss = self._epoch(state.epoch, progress)
            robust, clean = self._validate()
            line: dict[str, float | None] = {"loss": loss}
            if (split := self.recipe.selection_split) is not None:
                line |= {f"{split}_robust": robust, f"{split}_clean": clean}
            line["lr"] = self.recipe.schedule((state.epoch + 1) / self.recipe.epochs)
            line["seconds"] = round(time.monotonic() - start, 3)
            # an epoch with a smaller eps is not one that the recipe is for
            final = self.recipe.strength(state.epoch) == 1
            state = state.after(robust if final else None, line)
            self._save(state)
            progress = replace(
                progress, epoch=state.epoch, step=0, loss=loss, robust=robust, clean=clean
            )
            self.on_progress(progress)
        if self.world.is_leader:
            last = self.train_state.eval_net.state_dict()
            write_checkpoint(self.run, state, self.best, last, self._metadata())
        self.logs.close()

    def _resume(self) -> ResumeState:
        """Load the saved state on rank 0 and broadcast it with its tensors to all ranks."""
        state = ResumeState()
        if self.world.is_leader:
            own, best = self.train_state.tensors(), self.train_state.eval_net.state_dict()
            state, tensors, self.best = load_state(self.run, own, best)
            if tensors:
                self._check_same_base(tensors)
                self.train_state.restore(tensors)
        self.world.broadcast_tensors(list(self.train_state.tensors().values()))
        state = self.world.broadcast(state)
        self.saved_epoch = state.epoch
        return state

    def _check_same_base(self, saved: Tensors) -> None:
        trunk = {} if self.base is None else self.train_state.net.trunk.state_dict()
        pairs = [(value.cpu(), saved[f"net.trunk.{name}"].cpu()) for name, value in trunk.items()]
        if not all(torch.equal(*pair) for pair in pairs):
            raise BadInput(
                f"{self.recipe.base} is not the run that {self.run.name} began with; train "
                "again in another folder"
            )

    def _save(self, state: ResumeState) -> None:
        """Copy the weights of a best epoch; save the state unless that was done recently; log."""
        if not self.world.is_leader:
            return
        if state.is_best:
            self.best = {k: v.clone() for k, v in self.train_state.eval_net.state_dict().items()}
        write_metrics(self.run, state)
        start = time.monotonic()
        if start >= self.next_save and state.epoch < self.recipe.epochs:
            save_state(self.run, state, self.train_state.tensors(), self.best, vars(self.plan))
            self.saved_epoch, end = state.epoch, time.monotonic()
            self.next_save = end + (end - start) / SAVE_TIME_SHARE
        self.logs.write(state.lines)

    def _validate(self) -> tuple[float | None, float | None]:
        if self.selection_images is None:
            return None, None
        attack, images = self.recipe.validation_attack, self.selection_images
        clean = self.validator.accuracy(Clean(), images)
        return clean if attack == Clean() else self.validator.accuracy(attack, images), clean

    def _metadata(self) -> dict[str, Any]:
        split, attack = self.recipe.selection_split, show(self.recipe.validation_attack)
        reason = "the last epoch" if split is None else f"largest {split} accuracy under {attack}"
        reason = reason.replace("under Clean()", "on clean images")
        listing = self.run.path / LISTING  # of a user's own images
        return {
            "reason": reason,
            "selection_split": split,
            "recipe_digest": digest(self.recipe),
            "fit_data": self.data["fit"],
            "data": self.data,
            **({"data_listing": content_digest(listing.read_bytes())} if listing.exists() else {}),
            "selection_data": None if split is None else self.data[split],
            "seed": self.recipe.seed,
            "processes": self.world.size,
            **({} if self.base is None else {"base_weights": self.base.checkpoint["weights"]}),
            **vars(self.plan),
            **provenance(self.fit.y.device),
        }

    def _epoch(self, epoch: int, before: Progress) -> float:
        self.steps.begin(epoch)
        for i in range(self.steps.batches):
            self.steps(i)
            self.on_progress(replace(before, step=i + 1))
        self.world.all_reduce([self.steps.losses])
        # each rank has updated its own running statistics
        self.world.broadcast_tensors(self.train_state.buffers())
        self._check_finite(self.steps.losses, epoch)
        return float(self.steps.losses.mean())

    def _check_finite(self, losses: Tensor, epoch: int) -> None:
        """Raise Diverged if a loss is too large or a weight is not finite."""
        bad = (~(losses.abs() < MAX_LOSS)).nonzero()  # true for NaN too
        finite = all(bool(p.isfinite().all()) for p in self.train_state.net.parameters())
        if len(bad) or not finite:
            step = int(bad[0]) if len(bad) else self.steps.batches - 1
            loss = float(losses[step])
            problem = f"has grown to {loss:.1e}" if math.isfinite(loss) else "is not finite"
            raise Diverged(
                f"the loss {problem} at epoch {epoch + 1}, step {step + 1} of "
                f"{self.steps.batches}; the state after epoch {self.saved_epoch} is kept; "
                "lower the learning rate, for example schedule.peak=0.05"
            )


def base_of(recipe: Recipe) -> Run | None:
    """Return the finished run whose classifier the recipe reuses, or None.

    Raises BadInput if that run is not finished or has another net or data set.
    """
    if recipe.base is None:
        return None
    run = Run.open(recipe.base)
    _ = run.checkpoint  # raises if the run is not finished
    if run.recipe.net != recipe.net or run.recipe.data != recipe.data:
        raise BadInput(
            f"{recipe.base} is a {show(run.recipe.net)} trained on {show(run.recipe.data)}; a base "
            f"must be a {show(recipe.net)} trained on {show(recipe.data)}, so that it "
            "has seen no held-out image"
        )
    return run


class Validator:
    """Accuracy of the net that a TrainState would save, in eval mode.

    The fast engine attacks a FrozenModel in the precision of the training. Predictions for the
    adversarial examples always come from the net itself in fp32, whichever engine made them.
    """

    def __init__(self, train_state: TrainState, engine: str) -> None:
        self.train_state = train_state
        net = train_state.eval_net
        fast = engine == "fast" and next(net.parameters()).is_cuda
        self.frozen_model = FrozenModel(net, train_state.precision, fixed=BATCH) if fast else None

    def accuracy(self, attack: Attack, images: Images) -> float:
        """Return the fraction of images that are classified correctly under the attack.

        The batches are divided between the processes.
        """
        net, world = self.train_state.eval_net, self.train_state.world
        model: nn.Module = net
        if self.frozen_model is not None:
            self.frozen_model.refresh()
            model = self.frozen_model.eval()
        correct = torch.zeros((), dtype=torch.int64, device=images.y.device)
        with attack_mode(net, "eval"):
            for piece in list(images.slices(BATCH))[world.rank :: world.size]:
                x, y = images.batch(piece)
                x = x.to(self.train_state.dtype)
                with use_precision(self.train_state.precision, x.device):
                    x_adv = attack.perturb(model, x, y, images.index[piece])
                with torch.no_grad(), tf32("fp32"):
                    correct += (prediction(net(x_adv)) == y).sum()
        world.all_reduce([correct])
        return int(correct) / len(images)
