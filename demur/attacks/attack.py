"""Success criteria, and the base class of all attacks.

Calling an attack changes neither the images nor the model (weights, buffers, gradients, mode) nor
torch's global random state. `perturb`, which training calls, checks nothing; there batch norm in
train mode updates its running statistics.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from demur.attacks.attack_model import (
    AttackModel,
    Model,
    attack_model,
    checked,
    on_outputs,
    outside_inference_mode,
)
from demur.attacks.balls import Ball, in_pixel_range
from demur.attacks.objectives.classification import AttackStart, Objective, ObjectiveState
from demur.errors import BadInput
from demur.noise import Stream
from demur.numerics import deferred_checks, raise_deferred
from demur.output import Output, as_output, check_logits, prediction
from demur.rejectors.rule import OperatingPoint, Rejector, Rule, Score, Unresolved, as_score
from demur.spec import Spec, required_fields


@dataclass(frozen=True)
class Criterion(Spec, ABC):
    """A success criterion: a predicate of the model's output and the true label.

    Attacks stop at an image once the criterion holds there. The objective is what an attack
    maximises; the criterion decides whether it has succeeded.
    """

    @abstractmethod
    def __call__(self, out: Output, y: Tensor) -> Tensor:
        """Return on which images the attack has succeeded, N, bool."""


@dataclass(frozen=True)
class Misclassified(Criterion):
    """Success is a wrong prediction, whether or not a rejector accepts it. It takes no arguments.

    Example:
        >>> import torch
        >>> from demur import PGD, Linf, Misclassified
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> attack = PGD(Linf(8 / 255), keep="success", criterion=Misclassified())
        >>> x_adv = attack(model, torch.rand(4, 1, 8, 8), torch.arange(4))
    """

    def __call__(self, out: Output, y: Tensor) -> Tensor:
        return is_wrong(out, y)


@dataclass(frozen=True)
class RuleCriterion(Criterion):
    """A criterion that depends on a rejector's decision; see `AcceptedError`."""

    rejector: Rejector | Score
    threshold: float | OperatingPoint

    @property
    def accept_rule(self) -> Rule:
        """The accept rule; raises Unresolved while the threshold is an operating point."""
        if isinstance(self.threshold, float):
            return as_score(self.rejector).rule(self.threshold)
        raise Unresolved(
            f"{self} has an operating point as threshold; call demur.resolve_thresholds first"
        )


@dataclass(frozen=True)
class AcceptedError(RuleCriterion):
    """Success is a wrong prediction that the rejector accepts.

    Args:
        rejector: The rejector or its score, for instance Con() or RCon().
        threshold: A number (accepted is score >= threshold) or an operating point such as
            TPR(0.95), which `resolve_thresholds` turns into a number.

    Example:
        >>> import torch
        >>> from demur import AcceptedError, Con, Output
        >>> logits, none = torch.tensor([[0.0, 3.0], [0.0, 0.1]]), torch.zeros(2, 0)
        >>> AcceptedError(Con(), 0.9)(Output(logits, none, none), y=torch.tensor([0, 0]))
        tensor([ True, False])
    """

    def __call__(self, out: Output, y: Tensor) -> Tensor:
        return is_wrong(out, y) & self.accept_rule.accepted(out)


@dataclass(frozen=True)
class FalseRejection(RuleCriterion):
    """Success is a correct prediction that the rejector rejects."""

    def __call__(self, out: Output, y: Tensor) -> Tensor:
        return ~is_wrong(out, y) & ~self.accept_rule.accepted(out)


@dataclass(frozen=True)
class Rejected(RuleCriterion):
    """Success is a rejected input, whether or not the prediction is correct."""

    def __call__(self, out: Output, y: Tensor) -> Tensor:
        return ~self.accept_rule.accepted(out)


def is_wrong(out: Output, y: Tensor) -> Tensor:
    """Return on which images the prediction is wrong, N; raise BadInput for logits of NaN."""
    out = as_output(out, rows=len(y))
    check_logits(out)
    return prediction(out) != y


T = TypeVar("T")


@dataclass(frozen=True)
class AttackBatch:
    """The images under attack with the model, the labels and the indices."""

    model: AttackModel
    x: Tensor  # clean images, N, C, H, W, in [0, 1]
    y: Tensor  # true labels, N
    index: Tensor  # position of each image in its data set, N; it determines the image's noise
    target: Tensor | None  # a wrong class for each image, N, or None for an untargeted attack
    stream: Stream = 0  # selects independent noise, for instance for each restart
    objective_state: ObjectiveState = ()  # for these images, see `prepare`

    def select(self, rows: Tensor) -> "AttackBatch":
        """Return the batch of the given rows (indices or a boolean mask)."""
        return replace(
            self, x=self.x[rows], y=self.y[rows], index=self.index[rows],
            target=None if self.target is None else self.target[rows],
            objective_state=tuple(part[rows] for part in self.objective_state),
        )  # fmt: skip

    def prepare(self, objective: Objective, x_start: Tensor) -> "AttackBatch":
        """Return the batch with the state of an objective for an attack that starts at x_start."""
        start = AttackStart(self.model, self.x, x_start, self.y, self.target)
        return replace(self, objective_state=objective.prepare(start))


@dataclass(frozen=True)
class Attack(Spec, ABC):
    """A search for adversarial examples: `attack(model, x, y)` returns x_adv.

    Most attacks are configured by a ball (where x_adv may lie), an *objective* (the function of the
    model's output that they maximise, one value per image) and a *success criterion* (when an
    image counts as adversarial, for instance `Misclassified` or `AcceptedError`). A *gradient
    query* is one forward and one backward pass of the model.

    Subclasses implement `run`.

    Example:
        >>> import torch
        >>> from dataclasses import dataclass
        >>> from demur import Attack, Linf
        >>> from demur.attacks import AttackBatch
        >>> @dataclass(frozen=True)
        ... class Darken(Attack):
        ...     ball: Linf
        ...
        ...     def run(self, batch: AttackBatch, stream: int) -> torch.Tensor:
        ...         return self.ball.project(batch.x, batch.x - self.ball.eps)
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> x_adv = Darken(Linf(0.1))(model, torch.rand(4, 1, 8, 8), torch.arange(4))
    """

    # Fields of which a larger value makes an attack stronger.
    budget_fields: ClassVar[tuple[str, ...]] = (
        "steps", "restarts", "queries", "searches", "targets", "eot_iter",
    )  # fmt: skip

    def __call__(self, model: Model, x: Tensor, y: Tensor, index: Tensor | None = None) -> Tensor:
        """Return adversarial examples, shape of x.

        The dtype is the widest of float32, the images and the model: an image rounded to 16 bits
        may lie outside its ball.

        Args:
            model: Returns logits (N, K) or an `Output`.
            x: Images, N, C, H, W, in [0, 1].
            y: True labels, N, int64.
            index: Position of each image in its data set, N; 0 ... N-1 by default. It determines
                the noise of an image.

        Raises:
            BadInput: The images, labels or indices are not as described, the model returns NaN or
                a wrong number of rows, or the result lies outside the ball or the pixel range.
        """
        with checked(model, x, y) as (checked_model, images, labels):
            index = torch.arange(len(images), device=images.device) if index is None else index
            if index.shape != labels.shape:
                raise BadInput(
                    f"index must hold one integer per image ({len(images)}), not shape "
                    f"{tuple(index.shape)}"
                )
            x_adv = self.perturb(checked_model, images, labels, outside_inference_mode(index))
            raise_deferred()
            self.check_result(images, x_adv)
        return x_adv

    def perturb(
        self, model: Model, x: Tensor, y: Tensor, index: Tensor, stream: Stream = 0,
        target: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return adversarial examples without checks; arguments as in `__call__`.

        `stream` selects independent noise, and `target` is a wrong class for each image, N.
        """
        with deferred_checks():
            attack, model = on_outputs(self, model)
            batch = AttackBatch(attack_model(model), x.detach(), y, index, target)
            return attack.run(batch, stream)

    def check_result(self, x: Tensor, x_adv: Tensor) -> None:
        """Raise BadInput unless every x_adv is an image that the attack may return for x."""
        if x_adv.shape != x.shape:
            raise BadInput(
                f"{type(self).__name__} returned images of shape {tuple(x_adv.shape)} for "
                f"{tuple(x.shape)}; return one adversarial example per image"
            )
        if outside := len(x) - int(self.inside(x, x_adv).sum()):
            raise BadInput(
                f"{type(self).__name__} returned {outside} of {len(x)} images outside its ball or "
                "the pixel range [0, 1]; project its iterates with ball.project"
            )

    def inside(self, x: Tensor, x_adv: Tensor) -> Tensor:
        """Return whether each x_adv lies in [0, 1] and in a ball of the attack around x, N."""
        contained = [ball.contains(x, x_adv) for ball in self.balls()]
        return torch.stack(contained).any(0) if contained else in_pixel_range(x_adv)

    def balls(self) -> set[Ball]:
        """Return the balls of the attack and its parts; empty if it may return any image."""
        if self._field("any_distance", False):
            return set()
        parts = [getattr(self, f.name) for f in fields(self)]
        if own := {part for part in parts if isinstance(part, Ball)}:
            return own
        parts += [member for part in parts if isinstance(part, tuple) for member in part]
        inner = [part.balls() for part in parts if isinstance(part, Attack)]
        return set().union(*inner) if all(inner) else set()

    @abstractmethod
    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        """Return adversarial examples for the batch, shape of `batch.x`."""

    @classmethod
    def example(cls, ball: Ball, criterion: RuleCriterion) -> "Attack":
        """Return the attack with default settings; `demur attack` runs it by its name.

        By default the required fields `ball` and `criterion` are filled in.
        """
        parts: dict[str, Any] = {"ball": ball, "criterion": criterion}
        return cls(**{name: parts[name] for name in required_fields(cls)})

    @property
    def parts(self) -> tuple["Attack", ...]:
        """The attacks that this one consists of."""
        return ()

    # ------------------------------------------------ what fields that only some attacks have say

    def _field(self, name: str, default: T) -> T:
        """Return the value of a field, or the default if the attack has no such field."""
        value: T = vars(self).get(name, default)
        return value

    @property
    def success_criterion(self) -> Criterion:
        """The success criterion: the field `criterion`, else a misclassification."""
        return self._field("criterion", Misclassified())

    @property
    def search_objective(self) -> Objective | None:
        """The objective that guides the search: the field `objective`."""
        return self._field("objective", None)

    @property
    def maximised(self) -> Objective | None:
        """The objective that also rises on images without success; None if there is none."""
        return self.search_objective

    @property
    def gradient_queries(self) -> float:
        """Gradient queries per image: the fields `steps` and `restarts`, and those of the parts."""
        own = self._field("steps", 0) * self._field("restarts", 1)
        return float(own + sum(part.gradient_queries for part in self.parts))

    @property
    def forward_queries(self) -> int:
        """Forward passes per image of an attack without gradients: the field `queries`."""
        return self._field("queries", 0)

    @property
    def keep_rule(self) -> str | None:
        """Which iterate is returned, "success" or "max_objective": the field `keep`."""
        return self._field("keep", None)

    @property
    def seeks_misclassification(self) -> bool:
        """Whether the attack seeks wrong predictions alone, accepted or not."""
        objective: Objective | None = self._field("objective", None)
        return (
            isinstance(self.success_criterion, Misclassified)
            and (objective is None or objective.seeks_misclassification)
            and all(part.seeks_misclassification for part in self.parts)
        )


@dataclass(frozen=True)
class Clean(Attack):
    """No attack: return the images unchanged."""

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        return batch.x.clone()

    @property
    def seeks_misclassification(self) -> bool:
        return False
