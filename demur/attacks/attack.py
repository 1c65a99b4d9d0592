"""What every attack is: a frozen value that turns images into attacked images.

    x_adv = PGD(Linf(8/255), steps=10, step_size=2/255)(model, x, y)

The call leaves the model's weights, gradients and mode and the global generator untouched (batch
norm in train mode moves its running statistics, as any look does). `index` is each image's place
in its data set; noise depends on it, never on the place in the batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from demur.attacks.batch import AttackBatch
from demur.errors import BadInput
from demur.gradient import Model
from demur.images import check_batch
from demur.noise import Stream
from demur.output import as_output
from demur.spec import Spec


@dataclass(frozen=True)
class Attack(Spec, ABC):
    """attack(model, x, y) -> x_adv."""

    def __call__(self, model: Model, x: Tensor, y: Tensor, index: Tensor | None = None) -> Tensor:
        """Attacked images, after checking what was given."""
        check_batch(x, y)
        with torch.no_grad(), _at_rest(model):
            check_batch(x, y, classes=as_output(model(x[:1])).logits.shape[-1])
        index = torch.arange(len(x), device=x.device) if index is None else index
        if index.shape != y.shape:
            raise BadInput(f"index must be one place per image ({len(x)}), not {len(index)}")
        return self.perturb(model, x, y, index)

    def perturb(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        index: Tensor,
        stream: Stream = 0,
        target: Tensor | None = None,
    ) -> Tensor:
        """Attacked images; `stream` gives each training step its own noise.

        `target` is a wrong class for each image, for goals that ask for one.
        """
        return self.run(AttackBatch(model, x, y, index, target), stream)

    @abstractmethod
    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        """What the attack makes of its victims."""


@dataclass(frozen=True)
class Clean(Attack):
    """No attack: the images as they are."""

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        """The images themselves."""
        return batch.x


@contextmanager
def _at_rest(model: Model) -> Iterator[None]:
    """The model in eval mode for a look that moves no batch norm, then as each part of it was."""
    parts = list(model.modules()) if isinstance(model, nn.Module) else []
    learning = [part for part in parts if part.training]
    for part in learning:
        part.training = False
    try:
        yield
    finally:
        for part in learning:
            part.training = True
