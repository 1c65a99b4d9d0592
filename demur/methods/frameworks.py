"""Adversarial training frameworks: how training images are attacked and classified.

    PGDAT(PGD(Linf(8/255), steps=10, step_size=2/255))      # Madry et al. 2018, as in the paper
    TRADES(beta=6)                                          # Zhang et al. 2019

A *framework* (the paper's "AT framework") makes adversarial examples and computes the
classification loss; a head adds an auxiliary loss. `craft` and `classification_loss` are separate
methods, so that an engine can run each in its own way.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from demur.attacks import CE, KL, PGD, Attack, Objective
from demur.attacks.objectives import divergence
from demur.balls import Linf
from demur.errors import BadInput
from demur.field_types import NonNegative
from demur.methods.batch_norm_mode import BatchNorm, attack_mode, check_keeps_batch
from demur.noise import Stream
from demur.output import Output, log_probabilities
from demur.spec import Spec


class LabelledOutput(NamedTuple):
    """Images (N, C, H, W), their labels (N) and the net's output for them."""

    x: Tensor
    y: Tensor
    out: Output


class BatchOutputs(NamedTuple):
    """Outputs for the attacked images, and for the clean ones if a loss needs them.

    `unperturbed` holds the attacked images before the attack. Only CCAT sets it: its clean images
    are other images than its attacked ones.
    """

    attacked: LabelledOutput
    clean: LabelledOutput | None = None
    unperturbed: Tensor | None = None

    def clean_outputs(self) -> LabelledOutput:
        """Outputs for the clean images, which must have been computed."""
        assert self.clean is not None, "a head that uses clean outputs must set needs_clean"
        return self.clean


def subset_weights(mask: Tensor) -> Tensor:
    """Weights w with mean(w * v) = mean of v where `mask` is 1; `mask` holds ones and zeros (N)."""
    return mask * len(mask) / mask.sum().clamp_min(1)


@dataclass(frozen=True)
class Framework(Spec, ABC):
    """How training images are attacked, and the classification loss of their outputs.

    Example:
        >>> from dataclasses import dataclass
        >>> from demur import Method, Standard
        >>> @dataclass(frozen=True)
        ... class Brightened(Standard):
        ...     def craft(self, net, x, y, index, stream):
        ...         return (x + 0.1).clamp(max=1)
        >>> method = Method(Brightened())
    """

    @abstractmethod
    def craft(self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream) -> Tensor:
        """Return adversarial examples, N, C, H, W.

        Args:
            net: The net in train mode.
            x: Images, N, C, H, W, in [0, 1].
            y: Labels, N.
            index: Positions of the images in the data set, N; they seed the noise.
            stream: Number of the training step, so that every step draws its own noise.
        """

    @abstractmethod
    def outputs(
        self, net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, clean: bool
    ) -> BatchOutputs:
        """Outputs that the losses use; `clean` asks for those of the clean images."""

    @abstractmethod
    def classification_loss(self, outputs: BatchOutputs) -> Tensor:
        """Return the classification loss of each image, N."""

    @property
    def aims_at_robust_accuracy(self) -> bool:
        """Whether robust accuracy is what training improves, so that it can select an epoch."""
        return True

    def without_stats_updates(self) -> "Framework":
        """Return a copy whose attack leaves the running statistics of batch norm alone."""
        return self

    @property
    def one_loss_per_image(self) -> bool:
        """Whether `classification_loss` has exactly one value for each attacked image."""
        return True

    def with_objective(self, objective: Objective, bn: BatchNorm | None = None) -> "Framework":
        """Copy whose attack maximises `objective`, in batch-norm mode `bn` if given.

        Raises:
            BadInput: If the framework's loss fixes the objective of its attack.
        """
        raise BadInput(
            f"{type(self).__name__} fixes the objective of its attack, and this head needs "
            "another; use PGDAT"
        )


@dataclass(frozen=True)
class Standard(Framework):
    """Training without attacks: cross-entropy on clean images.

        loss = CE(f(x), y)

    Example:
        >>> from demur import Method, Standard
        >>> method = Method(Standard())
    """

    def craft(self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream) -> Tensor:
        return x

    def outputs(
        self, net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, clean: bool
    ) -> BatchOutputs:
        # a head's loss on attacked images falls on the clean ones
        labelled = LabelledOutput(x, y, net(x))
        return BatchOutputs(labelled, labelled)

    def classification_loss(self, outputs: BatchOutputs) -> Tensor:
        return CE()(outputs.attacked.out, outputs.attacked.y)

    def with_objective(self, objective: Objective, bn: BatchNorm | None = None) -> "Standard":
        return self


@dataclass(frozen=True)
class PGDAT(Framework):
    """PGD adversarial training (Madry et al. 2018): cross-entropy on adversarial examples.

        loss = CE(f(x_adv), y)

    Args:
        attack: The attack on training images; by default PGD-10 with eps = 8/255.
        bn: Batch-norm mode during the attack. "train": batch statistics, and every forward pass
            updates the running statistics. "batch": batch statistics, and only the forward pass
            of the loss updates the running ones. "eval": running statistics.

    Example:
        >>> from demur import PGD, PGDAT, Linf
        >>> framework = PGDAT(PGD(Linf(8 / 255), steps=10, step_size=2 / 255), bn="batch")
    """

    attack: Attack = PGD(Linf(8 / 255), steps=10, step_size=2 / 255)
    bn: BatchNorm = "train"  # reference code: train mode, so the attack updates running statistics

    def __post_init__(self) -> None:
        super().__post_init__()
        check_keeps_batch(self.attack, self.bn)

    def craft(self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream) -> Tensor:
        with attack_mode(net, self.bn):
            return self.attack.perturb(net, x, y, index, stream)

    def outputs(
        self, net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, clean: bool
    ) -> BatchOutputs:
        attacked = LabelledOutput(x_adv, y, net(x_adv))
        return BatchOutputs(attacked, LabelledOutput(x, y, net(x)) if clean else None)

    def classification_loss(self, outputs: BatchOutputs) -> Tensor:
        return CE()(outputs.attacked.out, outputs.attacked.y)

    def without_stats_updates(self) -> "PGDAT":
        return replace(self, bn="batch") if self.bn == "train" else self

    def with_objective(self, objective: Objective, bn: BatchNorm | None = None) -> "PGDAT":
        return replace(self, attack=_set_objective(self.attack, objective), bn=bn or self.bn)


@dataclass(frozen=True)
class TRADES(Framework):
    """TRADES (Zhang et al. 2019): clean cross-entropy plus a divergence under attack.

        loss = CE(f(x), y) + beta * KL(f(x) || f(x_adv))

    The attack maximises the same KL, in eval mode. The loss passes gradients to both outputs.

    Args:
        beta: Weight of the divergence.
        attack: The attack on training images.

    Example:
        >>> from demur import RR, TRADES, Method
        >>> method = Method(TRADES(beta=6.0), RR())
    """

    beta: NonNegative = 6.0
    attack: Attack = PGD(Linf(8 / 255), steps=10, step_size=2 / 255, start="near", objective=KL())

    def craft(self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream) -> Tensor:
        with attack_mode(net, "eval"):
            return self.attack.perturb(net, x, y, index, stream)

    def outputs(
        self, net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, clean: bool
    ) -> BatchOutputs:
        # two forward passes, so that each batch has its own batch-norm statistics
        attacked = LabelledOutput(x_adv, y, net(x_adv))
        return BatchOutputs(attacked, LabelledOutput(x, y, net(x)))

    def classification_loss(self, outputs: BatchOutputs) -> Tensor:
        clean = outputs.clean_outputs()
        log_p, log_p_adv = (log_probabilities(part.out) for part in (clean, outputs.attacked))
        return CE()(clean.out, clean.y) + self.beta * divergence(log_p, log_p_adv)


def _set_objective(attack: Attack, objective: Objective) -> Attack:
    """Copy of the attack with another objective."""
    if not hasattr(attack, "objective"):
        raise BadInput(f"{type(attack).__name__} has no objective that a head can set; use PGD")
    changes: dict[str, Any] = {"objective": objective}
    return replace(attack, **changes)
