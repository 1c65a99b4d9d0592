"""Training: crash-safe, resumable, and the same weights however often it was interrupted.

    run = train(recipe("digits-pgdat-rr"), Path("runs/digits-pgdat-rr"))

SGD with momentum; the epoch is chosen on the val split by accuracy under the recipe's judge. Kill
it at any moment and call it again: it goes on after the last whole epoch and, on a CPU with the
same number of threads, ends with bit-identical weights.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from demur import noise
from demur.attacks import Attack, Clean
from demur.data import Images, Splits
from demur.errors import BadInput
from demur.methods import crafting
from demur.output import prediction
from demur.recipes import Recipe
from demur.runs import Run, provenance
from demur.runs.state import Tensors, advanced, finish, load_state
from demur.spec import digest, show

ORDER, AUGMENT, CRAFT = 1, 2, 3  # purposes of random numbers
JUDGE_BATCH = 256


@dataclass(frozen=True)
class Progress:
    """How far a training has come, for whoever watches."""

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float | None = None
    val_robust: float | None = None
    val_clean: float | None = None


Watch = Callable[[Progress], None]


def unwatched(progress: Progress) -> None:
    """Nobody looks."""


def train(
    recipe: Recipe,
    folder: Path,
    device: torch.device | None = None,
    data_folder: Path | None = None,
    watch: Watch = unwatched,
) -> Run:
    """The finished run of a recipe in a folder, resumed where an earlier call stopped."""
    Run.check(folder, recipe)
    splits = recipe.data.load(data_folder)
    check_trainable(recipe, splits)
    with Run.claim(folder, recipe) as run:
        if not run.finished:
            Training(recipe, run, splits, device or torch.device("cpu"), watch).go()
    return run


def check_trainable(recipe: Recipe, splits: Splits) -> None:
    """Refuse what would fail after an hour."""
    fit = splits["fit"]
    if len(fit.y.unique()) < 2:
        raise BadInput("the fit split holds one class only; a classifier needs at least two")
    if len(fit) % recipe.batch_size == 1 or recipe.batch_size == 1:
        raise BadInput(
            f"batch_size={recipe.batch_size} leaves a batch of one image out of {len(fit)}, and "
            f"batch norm needs two; try batch_size={recipe.batch_size + 1}"
        )


class Training:
    """One run under way: the net, its optimiser, and the loop over epochs."""

    def __init__(
        self, recipe: Recipe, run: Run, splits: Splits, device: torch.device, watch: Watch
    ) -> None:
        self.recipe, self.run, self.watch = recipe, run, watch
        self.fit, self.val = splits["fit"].to(device), splits["val"].to(device)
        self.batches = -(-len(self.fit) // recipe.batch_size)
        self.net = recipe.net.build(recipe.data.domain, recipe.method.head, recipe.seed).to(device)
        self.optimiser = torch.optim.SGD(
            self.net.parameters(),
            lr=recipe.schedule.peak,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
        )

    def go(self) -> None:
        """Train from the last whole epoch to the end and choose the weights."""
        state, tensors = load_state(self.run)
        if tensors:
            self._restore(tensors)
        seen = Progress(state.epoch, self.recipe.epochs, 0, self.batches)
        while state.epoch < self.recipe.epochs:
            began = time.monotonic()
            loss = self._epoch(state.epoch, seen)
            robust = accuracy_under(self.recipe.judge, self.net, self.val)
            clean = accuracy_under(Clean(), self.net, self.val)
            line = {
                "loss": loss,
                "val_robust": robust,
                "val_clean": clean,
                "lr": self.recipe.schedule((state.epoch + 1) / self.recipe.epochs),
                "seconds": round(time.monotonic() - began, 3),
            }
            state = advanced(self.run, state, self._tensors(), self.net.state_dict(), robust, line)
            seen = Progress(state.epoch, self.recipe.epochs, 0, self.batches, loss, robust, clean)
            self.watch(seen)
        finish(self.run, state, self._about())

    def _about(self) -> dict[str, Any]:
        """How the chosen weights came to be."""
        return {
            "why": f"largest val accuracy under {show(self.recipe.judge)}",
            "recipe_digest": digest(self.recipe),
            "fit_data": self.fit.digest(),
            "val_data": self.val.digest(),
            "seed": self.recipe.seed,
            **provenance(self.fit.y.device),
        }

    def _epoch(self, epoch: int, seen: Progress) -> float:
        """One pass over the fit split; the mean loss."""
        recipe = self.recipe
        self.net.train()
        order = noise.permutation(noise.derived(recipe.seed, ORDER), len(self.fit), epoch)
        losses = []
        for i, chosen in enumerate(order.to(self.fit.y.device).split(recipe.batch_size)):
            step = epoch * self.batches + i
            losses.append(self._step(chosen, step))
            self.watch(
                Progress(
                    epoch, recipe.epochs, i + 1, self.batches,
                    seen.loss, seen.val_robust, seen.val_clean,
                )
            )  # fmt: skip
        self._check_finite(torch.stack(losses), epoch)
        return float(torch.stack(losses).mean())

    def _step(self, chosen: Tensor, step: int) -> Tensor:
        recipe = self.recipe
        x, y = self.fit.batch(chosen)
        index = self.fit.index[chosen]
        x = recipe.augment(x, noise.derived(recipe.seed, AUGMENT), index, step)
        rate = recipe.schedule((step + 1) / (recipe.epochs * self.batches))
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        stream = noise.derived(recipe.seed, CRAFT, step)
        loss = recipe.method.loss(self.net, x, y, index, stream)
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        return loss.detach()

    def _check_finite(self, losses: Tensor, epoch: int) -> None:
        """Stop on a loss that is no number; the state of the last whole epoch stays."""
        bad = (~losses.isfinite()).nonzero()
        sound = all(bool(p.isfinite().all()) for p in self.net.parameters())
        if len(bad) or not sound:
            step = int(bad[0]) if len(bad) else self.batches - 1
            raise BadInput(
                f"the loss is no longer a number at epoch {epoch + 1}, step {step + 1} of "
                f"{self.batches}; the state after epoch {epoch} is kept; "
                "lower the learning rate, for example schedule.peak=0.05"
            )

    def _tensors(self) -> Tensors:
        """Weights and momentum, by name."""
        held = {f"net.{name}": value for name, value in self.net.state_dict().items()}
        for name, parameter in self.net.named_parameters():
            momentum = self.optimiser.state[parameter].get("momentum_buffer")
            if momentum is not None:
                held[f"momentum.{name}"] = momentum
        return held

    def _restore(self, tensors: Tensors) -> None:
        part = {kind: _under(tensors, kind) for kind in ("net.", "momentum.")}
        self.net.load_state_dict(part["net."])
        for name, parameter in self.net.named_parameters():
            if name in part["momentum."]:
                buffer = part["momentum."][name].to(parameter.device)
                self.optimiser.state[parameter]["momentum_buffer"] = buffer


def accuracy_under(attack: Attack, net: nn.Module, images: Images) -> float:
    """The share of images answered rightly under an attack, in eval mode."""
    right = 0
    with crafting(net, "eval"):
        for chosen in images.slices(JUDGE_BATCH):
            x, y = images.batch(chosen)
            x_adv = attack.perturbed(net, x, y, images.index[chosen])
            with torch.no_grad():
                right += int((prediction(net(x_adv)) == y).sum())
    return right / len(images)


def _under(tensors: Tensors, prefix: str) -> Tensors:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
