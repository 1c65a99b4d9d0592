"""The base class of objectives, and those of the class logits: any wrong class, or a target.

An attack calls `prepare` once per restart, `at_step` once per step. State tensors have one row per
image, so that images can leave. `MultiTarget` provides the class of targeted objectives.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from demur.attacks.attack_model import AttackModel
from demur.errors import BadInput
from demur.output import Output, as_output, label_entry, log_probabilities, mask_label
from demur.rejectors.certainty import log_tcon
from demur.spec import Spec
from demur.spec.field_types import NonNegative, Positive, PositiveInt

ObjectiveState = tuple[Tensor, ...]
ANY = -1  # in place of a target: the wrong class with the largest logit
GAP_OFFSET = 1e-12  # added to the gap of logits that divides, as in the reference code


class AttackStart(NamedTuple):
    """What an objective may use when an attack starts."""

    model: AttackModel
    x: Tensor  # clean images, N, C, H, W
    x_start: Tensor  # first iterates, shape of x
    y: Tensor  # true labels, N
    target: Tensor | None  # a wrong class for each image, N, in a targeted attack

    def output(self, x: Tensor) -> Output:
        """Return the model's output without gradients."""
        with torch.no_grad():
            return as_output(self.model(x)).detached()

    def target_or_any(self) -> Tensor:
        """Return the target classes, or ANY for each image without them."""
        return torch.full_like(self.y, ANY) if self.target is None else self.target


@dataclass(frozen=True)
class Objective(Spec, ABC):
    """The function of a model's output that an attack maximises, one value per image.

    Objectives can be added and scaled: `CE() + 0.5 * DLR()`. An objective guides the search; the
    success criterion of the attack decides whether an image counts as adversarial.

    Example:
        >>> import torch
        >>> from dataclasses import dataclass
        >>> from demur import Objective, Output
        >>> @dataclass(frozen=True)
        ... class WrongLogits(Objective):
        ...     def __call__(self, out: Output, y: torch.Tensor, *inputs: torch.Tensor):
        ...         return out.logits.sum(-1) - out.logits.gather(1, y[:, None])[:, 0]
        >>> objective = WrongLogits() + 0.1 * WrongLogits()
    """

    seeks_misclassification: ClassVar[bool] = False  # whether its maximum is an error, no more
    own_inputs: ClassVar[int] = 0  # tensors in its state

    @abstractmethod
    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """Return one value per image, N; `inputs` are the tensors that `at_step` returns."""

    @property
    def parts(self) -> tuple["Objective", ...]:
        """The objectives whose states this one holds, one after the other."""
        return ()

    @property
    def n_inputs(self) -> int:
        """The number of tensors in the state and in `inputs`."""
        return self.own_inputs + sum(part.n_inputs for part in self.parts)

    def prepare(self, start_point: AttackStart) -> ObjectiveState:
        """Return the state for one restart: tensors with one row per image."""
        return tuple(tensor for part in self.parts for tensor in part.prepare(start_point))

    def at_step(self, objective_state: ObjectiveState, step: int, steps: int) -> ObjectiveState:
        """Return the `inputs` of `__call__` for a step out of `steps`."""
        if not self.parts:
            return objective_state
        own = (part.at_step(state, step, steps) for part, state in self.by_part(objective_state))
        return tuple(tensor for state in own for tensor in state)

    def by_part(self, tensors: ObjectiveState) -> list[tuple["Objective", ObjectiveState]]:
        """Return each part with its own of the tensors."""
        pairs, start = [], 0
        for part in self.parts:
            pairs.append((part, tensors[start : start + part.n_inputs]))
            start += part.n_inputs
        return pairs

    def __add__(self, other: "Objective") -> "Sum":
        return Sum((*_terms(self), *_terms(other)))

    def __mul__(self, factor: float) -> "Scaled":
        return Scaled(factor, self)

    __rmul__ = __mul__


@dataclass(frozen=True)
class Sum(Objective):
    """The sum of several objectives; its state is the concatenation of theirs."""

    objectives: tuple[Objective, ...]

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return torch.stack([part(out, y, *own) for part, own in self.by_part(inputs)]).sum(0)

    @property
    def parts(self) -> tuple[Objective, ...]:
        return self.objectives


@dataclass(frozen=True)
class Scaled(Objective):
    """An objective times a factor; a negative factor makes the attack minimise it."""

    factor: float
    objective: Objective

    @property
    def parts(self) -> tuple[Objective, ...]:
        return (self.objective,)

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return self.factor * self.objective(out, y, *inputs)


def _terms(objective: Objective) -> tuple[Objective, ...]:
    return objective.objectives if isinstance(objective, Sum) else (objective,)


# ------------------------------------------------ objectives of the class logits


@dataclass(frozen=True)
class CE(Objective):
    """Cross-entropy of the true label, -log T-Con."""

    seeks_misclassification: ClassVar[bool] = True

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return -log_tcon(out, y)


@dataclass(frozen=True)
class UntargetedMargin(Objective):
    """The largest wrong logit minus the true logit: positive exactly where misclassified."""

    seeks_misclassification: ClassVar[bool] = True

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return best_wrong(out.logits, y) - label_entry(out.logits, y)


@dataclass(frozen=True)
class DLR(Objective):
    """Difference of logits ratio: the margin divided by z_1 - z_3, with sorted logits z.

    With two classes there is no z_3 and the margin is not divided.
    """

    seeks_misclassification: ClassVar[bool] = True

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        margin = best_wrong(out.logits, y) - label_entry(out.logits, y)
        if out.logits.shape[-1] < 3:
            return margin
        first, _, third = out.logits.topk(3).values.unbind(-1)
        return margin / (first - third + GAP_OFFSET)


@dataclass(frozen=True)
class WrongConfidence(Objective):
    """The log of the largest wrong probability: the paper's L_Con."""

    seeks_misclassification: ClassVar[bool] = True

    tau: Positive = 1.0

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return best_wrong(log_probabilities(out, self.tau), y)


def best_wrong(table: Tensor, y: Tensor) -> Tensor:
    """Return the largest entry of each row of an N, K table, without the true label."""
    return mask_label(table, y).amax(-1)


def wrong_classes(logits: Tensor, y: Tensor, count: int | None = None) -> Tensor:
    """Return the wrong classes of each image by decreasing logit, at most `count`: targets, N."""
    classes = logits.shape[-1]
    is_true = one_hot(y, classes).bool()
    ranked = logits.masked_fill(is_true, -torch.inf).argsort(-1, descending=True)
    return ranked[:, : min(count or classes, classes - 1)].t()


@dataclass(frozen=True)
class Targeted(Objective, ABC):
    """Base class of objectives with a target class per image."""

    seeks_misclassification: ClassVar[bool] = True
    own_inputs: ClassVar[int] = 1

    def prepare(self, start_point: AttackStart) -> ObjectiveState:
        if start_point.target is None:
            raise BadInput(
                "a targeted objective needs target classes; wrap the attack in MultiTarget"
            )
        return (start_point.target,)


@dataclass(frozen=True)
class TargetedMargin(Targeted):
    """The target logit minus the true logit."""

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return label_entry(out.logits, inputs[0]) - label_entry(out.logits, y)


@dataclass(frozen=True)
class TargetedDLR(Targeted):
    """The targeted margin divided by z_1 - (z_3 + z_4) / 2, with sorted logits z.

    With three classes the divisor is z_1 - z_3; with two classes the margin is not divided.
    """

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        margin = label_entry(out.logits, inputs[0]) - label_entry(out.logits, y)
        classes = out.logits.shape[-1]
        if classes < 3:
            return margin
        first, _, *rest = out.logits.topk(min(classes, 4)).values.unbind(-1)
        return margin / (first - sum(rest[1:], rest[0]) / len(rest) + GAP_OFFSET)


@dataclass(frozen=True)
class TargetedConfidence(Targeted):
    """The log probability of the target: the paper's L_Con for one class."""

    tau: Positive = 1.0

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return label_entry(log_probabilities(out, self.tau), inputs[0])


@dataclass(frozen=True)
class GAMA(Objective):
    """GAMA: max wrong probability - true probability + w_t * ||p(x_start) - p(x_adv)||^2.

    The distance gives a gradient where the margin alone has none.

    Args:
        weight: w_0, the weight of the distance at the first step.
        fade: The number of steps over which w_t falls linearly to 0.
    """

    seeks_misclassification: ClassVar[bool] = True
    own_inputs: ClassVar[int] = 2

    weight: NonNegative = 50.0
    fade: PositiveInt = 25

    def prepare(self, start_point: AttackStart) -> ObjectiveState:
        start = log_probabilities(start_point.output(start_point.x_start)).exp()
        return start, start.new_zeros(len(start))  # the zeros become w_t in at_step

    def at_step(self, objective_state: ObjectiveState, step: int, steps: int) -> ObjectiveState:
        start, zeros = objective_state
        return start, zeros + self.weight * max(0.0, 1 - step / self.fade)

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        start, weight = inputs
        now = log_probabilities(out).exp()
        return best_wrong(now, y) - label_entry(now, y) + weight * ((start - now) ** 2).sum(-1)


@dataclass(frozen=True)
class KL(Objective):
    """TRADES' objective: KL(p(x) || p(x_adv)), with the clean prediction p(x) fixed."""

    own_inputs: ClassVar[int] = 1

    def prepare(self, start_point: AttackStart) -> ObjectiveState:
        return (log_probabilities(start_point.output(start_point.x)),)

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return divergence(inputs[0], log_probabilities(out))


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q) per row, from log probabilities of shape N, K."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)
