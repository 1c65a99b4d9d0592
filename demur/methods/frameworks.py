"""Adversarial training frameworks: how training images are attacked and classified.

A *framework* (the paper's "AT framework") makes adversarial examples and computes the
classification loss; a head adds an auxiliary loss. Both are methods of their own, so that an engine
can run each in its own way.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from demur.attacks import CE, KL, PGD, Attack, Objective, WrongConfidence
from demur.attacks.attack_model import attack_model
from demur.attacks.balls import Linf
from demur.attacks.objectives.classification import divergence
from demur.errors import BadInput
from demur.noise import Stream
from demur.output import Output, log_probabilities
from demur.spec import Spec
from demur.spec.field_types import NonNegative, Positive

BatchNorm = Literal["train", "batch", "eval"]
# CCAT: the authors maximise the largest wrong probability; its log has the same gradient signs
# and order. Paper: 8/255 as for every other framework; the authors train with 0.03
CCAT_OFFICIAL = PGD(
    Linf(8 / 255), steps=40, step_size=0.005, start="mixed", objective=WrongConfidence(),
    momentum=0.9, backtrack=1.5,
)  # fmt: skip
# reference code: steps follow the wrong class, backtracking compares the true one
CCAT_REFERENCE = PGD(
    Linf(8 / 255), steps=20, step_size=1 / 255, start="ray_or_clean", objective=WrongConfidence(),
    momentum=0.9, backtrack=1.5, backtrack_objective=CE(),
)  # fmt: skip


@contextmanager
def attack_mode(net: nn.Module, bn: BatchNorm) -> Iterator[None]:
    """Put `net` into a batch-norm mode with frozen parameters, and restore both on exit.

    "train" normalises by batch statistics, and every forward pass of the attack updates the
    running ones. "batch" normalises by batch statistics and leaves the running ones unchanged.
    "eval" normalises by the running statistics.
    """
    was_training, trainable = net.training, [p for p in net.parameters() if p.requires_grad]
    net.train(bn != "eval")
    for parameter in trainable:
        parameter.requires_grad_(False)  # an attack needs gradients of pixels only
    try:
        with running_stats_frozen(net) if bn == "batch" else nullcontext():
            yield
    finally:
        net.train(was_training)
        for parameter in trainable:
            parameter.requires_grad_(True)


def scaled_attack(attack: Attack, factor: float) -> Attack:
    """Return the attack with its eps and step size times `factor`; one without eps as it is."""
    changes: dict[str, Any] = {}
    if ball := getattr(attack, "ball", None):
        changes["ball"] = replace(ball, eps=factor * ball.eps)
    if step := getattr(attack, "step_size", None):  # None: a share of eps
        changes["step_size"] = factor * step
    return replace(attack, **changes)


def check_keeps_batch(attack: Attack, bn: BatchNorm) -> None:
    """Raise BadInput if `attack` drops images while batch norm uses batch statistics."""
    if bn != "eval" and attack.keep_rule == "success":
        raise BadInput(
            "an attack with keep=success drops images from the batch, which changes the batch "
            f"statistics that bn={bn} normalises by; use bn=eval or keep=max_objective"
        )


@contextmanager
def running_stats_frozen(net: nn.Module) -> Iterator[None]:
    """Set the momentum of every batch norm to 0, so that running statistics do not change."""
    norms = attack_model(net).batch_norms()
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


class LabelledOutput(NamedTuple):
    """Images (N, C, H, W), their labels (N) and the net's output for them."""

    x: Tensor
    y: Tensor
    out: Output
    target: Tensor | None = None  # probabilities (N, K) of soft labels; None: the labels themselves

    def cross_entropy(self) -> Tensor:
        """Cross-entropy of each image with its target or label, N."""
        if self.target is None:
            return CE()(self.out, self.y)
        return -(self.target * log_probabilities(self.out)).sum(-1)


class BatchOutputs(NamedTuple):
    """Outputs for the attacked images, and for the clean ones if a loss needs them."""

    attacked: LabelledOutput
    clean: LabelledOutput | None = None
    # The attacked images before the attack, of CCAT, whose clean images are others.
    unperturbed: Tensor | None = None

    def with_target(self, target: Tensor) -> "BatchOutputs":
        """Return the outputs with target probabilities, N, K, of attacked and clean images."""
        clean = None if self.clean is None else LabelledOutput(*self.clean[:3], target)
        return BatchOutputs(LabelledOutput(*self.attacked[:3], target), clean, self.unperturbed)

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

    aims_at_robust_accuracy: ClassVar[bool] = True  # so that it can select an epoch
    one_loss_per_image: ClassVar[bool] = True  # of `classification_loss`, for attacked images
    takes_soft_labels: ClassVar[bool] = True  # uses the target probabilities of soft labels

    @abstractmethod
    def craft(self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream) -> Tensor:
        """Return adversarial examples, N, C, H, W, on the net in train mode.

        The positions `index` (N) in the data set and the number `stream` of the step seed noise.
        """

    @abstractmethod
    def outputs(
        self, net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, clean: bool
    ) -> BatchOutputs:
        """Outputs that the losses use; `clean` asks for those of the clean images."""

    def classification_loss(self, outputs: BatchOutputs) -> Tensor:
        """Return the loss of each image, N; by default the cross-entropy of the attacked ones."""
        return outputs.attacked.cross_entropy()

    def without_stats_updates(self) -> "Framework":
        """Return a copy whose attack leaves the running statistics of batch norm alone."""
        changes: dict[str, Any] = {"bn": "batch"}
        return replace(self, **changes) if getattr(self, "bn", None) == "train" else self

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

    def with_objective(self, objective: Objective, bn: BatchNorm | None = None) -> "PGDAT":
        if not hasattr(self.attack, "objective"):
            kind = type(self.attack).__name__
            raise BadInput(f"{kind} has no objective that a head can set; use PGD")
        changes: dict[str, Any] = {"objective": objective}
        return replace(self, attack=replace(self.attack, **changes), bn=bn or self.bn)


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
        return clean.cross_entropy() + self.beta * divergence(log_p, log_p_adv)


@dataclass(frozen=True)
class CCAT(Framework):
    """CCAT: the target of an attacked image is the closer to uniform the larger its perturbation.

    The net then has low confidence under attack, also beyond the training radius.

        gamma = 1 - (1 - min(1, ||delta|| / eps))^rho
        target = (1 - gamma) * one_hot(y) + gamma / C
        loss = CE(f(x), y) and CE(f(x_adv), target)

    Args:
        rho: How fast the target moves from the label to the uniform distribution.
        form: "official" attacks the second half of a batch and classifies both halves in one
            forward pass. "reference" classifies the whole clean batch, then the whole attacked
            one, and adds both losses of each image.
        attack: The attack on training images; its ball gives the norm and eps.
        bn: Batch-norm mode during the attack, as in PGDAT.

    Example:
        >>> from demur import CCAT, RR, Method
        >>> method = Method(CCAT(rho=10.0), RR())
    """

    aims_at_robust_accuracy = False  # but at a low confidence under attack
    one_loss_per_image = False  # clean images have losses too
    takes_soft_labels = False
    rho: Positive = 10.0
    form: Literal["official", "reference"] = "official"
    attack: PGD = CCAT_OFFICIAL
    bn: BatchNorm = "eval"  # reference code: train

    def __post_init__(self) -> None:
        super().__post_init__()
        check_keeps_batch(self.attack, self.bn)

    def craft(self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream) -> Tensor:
        start = len(x) // 2 if self.form == "official" else 0
        with attack_mode(net, self.bn):
            attacked = self.attack.perturb(net, x[start:], y[start:], index[start:], stream)
            return torch.cat([x[:start], attacked])

    def outputs(
        self, net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, clean: bool
    ) -> BatchOutputs:
        if self.form == "reference":  # the clean forward pass comes first
            clean_outputs = LabelledOutput(x, y, net(x))
            return BatchOutputs(LabelledOutput(x_adv, y, net(x_adv)), clean_outputs, unperturbed=x)
        # The middle image of an odd batch is in both halves: they weigh the same, none is empty.
        start, half = len(x) // 2, (len(x) + 1) // 2
        out: Output = net(torch.cat([x[:half], x_adv[start:]]))
        return BatchOutputs(
            LabelledOutput(x_adv[start:], y[start:], Output(*(part[half:] for part in out))),
            LabelledOutput(x[:half], y[:half], Output(*(part[:half] for part in out))),
            unperturbed=x[start:],
        )

    def classification_loss(self, outputs: BatchOutputs) -> Tensor:
        """Losses whose mean is the loss: one per clean and per attacked image, or their sums."""
        clean, attacked = outputs.clean_outputs(), outputs.attacked
        target = self.target(outputs)
        clean_loss = CE()(clean.out, clean.y)
        attacked_loss: Tensor = -(target * log_probabilities(attacked.out)).sum(-1)
        if self.form == "official":
            return torch.cat([clean_loss, attacked_loss])
        # reference code: a KL divergence, smaller by the target's entropy, which has no gradient
        entropy: Tensor = torch.special.entr(target).sum(-1)
        return clean_loss + attacked_loss - entropy

    def target(self, outputs: BatchOutputs) -> Tensor:
        """Target probabilities of the attacked images, N, C."""
        assert outputs.unperturbed is not None
        gamma = self.transition((outputs.attacked.x - outputs.unperturbed).detach())[:, None]
        classes = outputs.attacked.out.logits.shape[-1]
        return (1 - gamma) * one_hot(outputs.attacked.y, classes) + gamma / classes

    def transition(self, delta: Tensor) -> Tensor:
        """gamma of each perturbation, N: 0 for none, 1 from the radius on."""
        ball = self.attack.ball
        relative_size = (ball.norm(delta) / max(ball.eps, 1e-12)).clamp(max=1)
        return 1 - (1 - relative_size) ** self.rho
