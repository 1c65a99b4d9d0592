"""Training: crash-safe, resumable, and the same weights however often it was interrupted.

    run = train(recipe("digits-pgdat-rr"), Path("runs/digits-pgdat-rr"))

SGD with momentum; the recipe says which epoch's weights are chosen. Kill it at any moment and call
it again: it goes on after the last epoch that was kept and, on a CPU with the same number of
threads, ends with bit-identical weights. Under torchrun the leading process writes.
"""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from demur import distributed
from demur.attacks import Clean
from demur.data import Images, Splits
from demur.engine import EnginePlan, Tensors, Validator, choose_plan
from demur.errors import BadInput, Diverged
from demur.recipes import Recipe
from demur.runs import Run, provenance
from demur.runs.state import ResumeState, finish, keep, load_state, stored_plan, write_metrics
from demur.spec import digest, show


@dataclass(frozen=True)
class Progress:
    """How far a training has come, for whoever watches."""

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float | None = None
    robust: float | None = None  # accuracy on the images that choose the epoch, if any do
    clean: float | None = None


RUNAWAY = 1e6  # a loss of which nothing can be learned any more
KEEPING = 0.02  # the share of the time that may go into keeping states on disk

Watch = Callable[[Progress], None]
Say = Callable[[str], None]


def no_progress(progress: Progress) -> None:
    """Nobody looks."""


def no_messages(sentence: str) -> None:
    """Nobody listens."""


def train(
    recipe: Recipe,
    folder: Path,
    device: torch.device | None = None,
    data_folder: Path | None = None,
    watch: Watch = no_progress,
    engine: str = "auto",
    sync_bn: bool = False,
    say: Say = no_messages,
) -> Run:
    """The finished run of a recipe in a folder, resumed where an earlier call stopped."""
    here = distributed.current()
    if here.is_leader:
        Run.check(folder, recipe)
    splits = recipe.data.load(data_folder)
    check_trainable(recipe, splits, here.size)
    check_divisible(recipe, here.size, sync_bn)
    base_of(recipe)
    device = device or torch.device("cpu")
    with Run.claim(folder, recipe) if here.is_leader else nullcontext(Run(folder)) as run:
        if not here.broadcast(run.finished):
            plan = choose_plan(engine, recipe, device, here, sync_bn, say)
            plan = here.broadcast(plan.after(stored_plan(run)) if here.is_leader else plan)
            Training(recipe, run, splits, device, plan, watch, say).go()
    here.barrier()
    return run


def check_trainable(recipe: Recipe, splits: Splits, processes: int = 1) -> None:
    """Refuse what would fail after an hour."""
    fit = splits["fit"]
    if recipe.selection_split not in (None, *splits):
        raise BadInput(
            f"{show(recipe.data)} has no {recipe.selection_split} images; use selection=last"
        )
    if len(fit.y.unique()) < 2:
        raise BadInput("the fit split holds one class only; a classifier needs at least two")
    last = len(fit) % recipe.batch_size or recipe.batch_size
    if last == 1 or recipe.batch_size == 1:
        raise BadInput(
            f"batch_size={recipe.batch_size} leaves a batch of one image out of {len(fit)}, and "
            f"batch norm needs two; try batch_size={recipe.batch_size + 1}"
        )
    if last < 2 * processes:
        raise BadInput(
            f"the last batch has {last} images, too few for {processes} processes of two each; "
            "start fewer processes or change batch_size"
        )


def check_divisible(recipe: Recipe, processes: int, sync_bn: bool) -> None:
    """Refuse to share out a batch whose loss is not the mean over its parts."""
    if processes > 1 and not recipe.method.is_mean_over_images and sync_bn:
        raise BadInput(
            f"{show(recipe.method)} counts over a whole batch, and {processes} processes would "
            "each count over their part; leave out --sync-bn if that is meant"
        )


class Training:
    """One run under way: the learner, its steps, and the loop over epochs."""

    def __init__(
        self,
        recipe: Recipe,
        run: Run,
        splits: Splits,
        device: torch.device,
        plan: EnginePlan,
        watch: Watch,
        say: Say,
    ) -> None:
        self.recipe, self.run, self.watch, self.plan = recipe, run, watch, plan
        self.world = distributed.current()
        self.fit = splits["fit"].to(device)
        self.choosing = _choosing(recipe, splits, device)
        self.train_state = plan.train_state(recipe, device, self.world)
        self.base = base_of(recipe)
        if self.base is not None:
            self.train_state.load_base(self.base.net(torch.device("cpu")))
        self.steps = plan.steps(recipe, self.train_state, self.fit, say)
        self.validator = Validator(self.train_state, plan.engine)
        self.best: Tensors = {}  # the weights chosen so far
        self.kept = 0  # the epoch whose state is on disk
        self.next_keep = 0.0  # when keeping another will be worth its time

    def go(self) -> None:
        """Train from the last whole epoch to the end and choose the weights."""
        state = self._resumed()
        seen = Progress(state.epoch, self.recipe.epochs, 0, self.steps.batches)
        while state.epoch < self.recipe.epochs:
            began = time.monotonic()
            loss = self._epoch(state.epoch, seen)
            robust, clean = self._judged()
            on = self.recipe.selection_split
            judged = {} if on is None else {f"{on}_robust": robust, f"{on}_clean": clean}
            line = {
                "loss": loss,
                **judged,
                "lr": self.recipe.schedule((state.epoch + 1) / self.recipe.epochs),
                "seconds": round(time.monotonic() - began, 3),
            }
            state = state.after(robust, line)
            self._keep(state)
            seen = Progress(
                state.epoch, self.recipe.epochs, 0, self.steps.batches, loss, robust, clean
            )
            self.watch(seen)
        if self.world.is_leader:
            last = self.train_state.judged.state_dict()
            finish(self.run, state, self.best, last, self._about())

    def _resumed(self) -> ResumeState:
        """The state of the leading process, with its tensors in every process's learner."""
        state = ResumeState()
        if self.world.is_leader:
            state, tensors, self.best = load_state(self.run)
            if tensors:
                self._check_same_base(tensors)
                self.train_state.restore(tensors)
        self.world.broadcast_tensors(list(self.train_state.tensors().values()))
        state = self.world.broadcast(state)
        self.kept = state.epoch
        return state

    def _check_same_base(self, kept: Tensors) -> None:
        """Refuse to go on with a base that is not the one this run began with."""
        held = {} if self.base is None else self.train_state.net.trunk.state_dict()
        pairs = [(value.cpu(), kept[f"net.trunk.{name}"].cpu()) for name, value in held.items()]
        if not all(torch.equal(*pair) for pair in pairs):
            raise BadInput(
                f"{self.recipe.base} is not the run that {self.run.name} began with; train it "
                "again in another folder"
            )

    def _keep(self, state: ResumeState) -> None:
        """Remember the best weights, and put the state on disk unless that was just done."""
        if not self.world.is_leader:
            return
        if state.is_best:
            self.best = {k: v.clone() for k, v in self.train_state.judged.state_dict().items()}
        write_metrics(self.run, state)
        began = time.monotonic()
        if began >= self.next_keep and state.epoch < self.recipe.epochs:
            keep(self.run, state, self.train_state.tensors(), self.best, self.plan.words())
            self.kept, ended = state.epoch, time.monotonic()
            self.next_keep = ended + (ended - began) / KEEPING

    def _judged(self) -> tuple[float | None, float | None]:
        """Accuracy of the images that choose the epoch, under the judge and as they are."""
        if self.choosing is None:
            return None, None
        return (
            self.validator.accuracy(self.recipe.validation_attack, self.choosing),
            self.validator.accuracy(Clean(), self.choosing),
        )

    def _about(self) -> dict[str, Any]:
        """How the chosen weights came to be."""
        on, judge = self.recipe.selection_split, show(self.recipe.validation_attack)
        return {
            "reason": "the last epoch" if on is None else f"largest {on} accuracy under {judge}",
            "selection_split": on,
            "recipe_digest": digest(self.recipe),
            "fit_data": self.fit.digest(),
            "selection_data": None if self.choosing is None else self.choosing.digest(),
            "seed": self.recipe.seed,
            "processes": self.world.size,
            **({} if self.base is None else {"base_weights": self.base.checkpoint["weights"]}),
            **self.plan.words(),
            **provenance(self.fit.y.device),
        }

    def _epoch(self, epoch: int, seen: Progress) -> float:
        """One pass over the fit split; the mean loss."""
        self.steps.begin(epoch)
        for i in range(self.steps.batches):
            self.steps(i)
            self.watch(
                Progress(
                    epoch, self.recipe.epochs, i + 1, self.steps.batches,
                    seen.loss, seen.robust, seen.clean,
                )
            )  # fmt: skip
        self.world.all_reduce([self.steps.losses])
        self.world.broadcast_tensors(
            self.train_state.statistics()
        )  # those of each process's own have parted
        self._check_sound(self.steps.losses, epoch)
        return float(self.steps.losses.mean())

    def _check_sound(self, losses: Tensor, epoch: int) -> None:
        """Stop on a loss that has run away; the state of the last whole epoch stays."""
        bad = (~(losses.abs() < RUNAWAY)).nonzero()  # what is no number is not smaller either
        sound = all(bool(p.isfinite().all()) for p in self.train_state.net.parameters())
        if len(bad) or not sound:
            step = int(bad[0]) if len(bad) else self.steps.batches - 1
            worst = float(losses[step])
            words = f"has grown to {worst:.1e}" if math.isfinite(worst) else "is no longer a number"
            raise Diverged(
                f"the loss {words} at epoch {epoch + 1}, step {step + 1} of "
                f"{self.steps.batches}; the state after epoch {self.kept} is kept; "
                "lower the learning rate, for example schedule.peak=0.05"
            )


def base_of(recipe: Recipe) -> Run | None:
    """The finished run whose classifier is taken over, if there is one."""
    if recipe.base is None:
        return None
    run = Run.open(recipe.base)
    _ = run.checkpoint  # an unfinished run is refused
    if run.recipe.net != recipe.net or run.recipe.data != recipe.data:
        raise BadInput(
            f"{recipe.base} is a {show(run.recipe.net)} trained on {show(run.recipe.data)}; a base "
            f"must be a {show(recipe.net)} trained on {show(recipe.data)}, so that nothing that "
            "was held out is known to it"
        )
    return run


def _choosing(recipe: Recipe, splits: Splits, device: torch.device) -> Images | None:
    """The images that choose the epoch, if any do."""
    return None if recipe.selection_split is None else splits[recipe.selection_split].to(device)
