"""The base class of attack objectives.

    state = objective.prepare(start_point)                  # once per restart of an attack
    inputs = objective.at_step(state, step, steps)          # once per step
    value = objective(out, y, *inputs)                      # one value per image, maximised

Most objectives have no state. State tensors have one row per image, so that images can leave.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from demur.attacks.attack_model import AttackModel
from demur.attacks.criteria import RuleCriterion
from demur.errors import BadInput
from demur.output import Output, as_output
from demur.spec import Spec, required_fields

ObjectiveState = tuple[Tensor, ...]


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

    def required_target(self) -> Tensor:
        """Return the target classes; raise BadInput without them."""
        if self.target is None:
            raise BadInput(
                "a targeted objective needs target classes; wrap the attack in MultiTarget"
            )
        return self.target


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

    @abstractmethod
    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """Return one value per image, N.

        Args:
            out: The output of the model.
            y: True labels, N.
            *inputs: The tensors that `at_step` returns, `n_inputs` of them.
        """

    @classmethod
    def example(cls, criterion: RuleCriterion, objective: "Objective") -> "Objective":
        """Return an objective of this class, made of a criterion and another objective.

        By default the required fields `criterion`, `rejector` and `objective` are filled in.
        """
        parts = {
            "criterion": criterion, "rejector": criterion.rejector, "objective": objective,
        }  # fmt: skip
        return cls(**{name: parts[name] for name in required_fields(cls)})

    @property
    def n_inputs(self) -> int:
        """The number of tensors in the state and in `inputs`."""
        return 0

    def prepare(self, start_point: AttackStart) -> ObjectiveState:
        """Return the state for one restart: tensors with one row per image."""
        return ()

    def at_step(self, objective_state: ObjectiveState, step: int, steps: int) -> ObjectiveState:
        """Return the `inputs` of `__call__` for a step out of `steps`."""
        return objective_state

    def __add__(self, other: "Objective") -> "Sum":
        return Sum((*_terms(self), *_terms(other)))

    def __mul__(self, factor: float) -> "Scaled":
        return Scaled(factor, self)

    __rmul__ = __mul__


@dataclass(frozen=True)
class WrappedObjective(Objective, ABC):
    """An objective that depends on one inner objective and shares its state."""

    @property
    @abstractmethod
    def inner(self) -> Objective:
        """The inner objective."""

    @property
    def n_inputs(self) -> int:
        return self.inner.n_inputs

    def prepare(self, start_point: AttackStart) -> ObjectiveState:
        return self.inner.prepare(start_point)

    def at_step(self, objective_state: ObjectiveState, step: int, steps: int) -> ObjectiveState:
        return self.inner.at_step(objective_state, step, steps)


@dataclass(frozen=True)
class Sum(Objective):
    """The sum of several objectives; its state is the concatenation of theirs."""

    objectives: tuple[Objective, ...]

    @classmethod
    def example(cls, criterion: RuleCriterion, objective: Objective) -> Objective:
        return cls((objective, objective))

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        pairs = zip(self.objectives, self._split(inputs), strict=True)
        return torch.stack([objective(out, y, *own) for objective, own in pairs]).sum(0)

    @property
    def n_inputs(self) -> int:
        return sum(objective.n_inputs for objective in self.objectives)

    def prepare(self, start_point: AttackStart) -> ObjectiveState:
        return tuple(
            tensor for objective in self.objectives for tensor in objective.prepare(start_point)
        )

    def at_step(self, objective_state: ObjectiveState, step: int, steps: int) -> ObjectiveState:
        pairs = zip(self.objectives, self._split(objective_state), strict=True)
        return tuple(
            tensor for objective, own in pairs for tensor in objective.at_step(own, step, steps)
        )

    def _split(self, tensors: ObjectiveState) -> list[ObjectiveState]:
        """Return the tensors of each objective."""
        parts, start = [], 0
        for objective in self.objectives:
            parts.append(tensors[start : start + objective.n_inputs])
            start += objective.n_inputs
        return parts


@dataclass(frozen=True)
class Scaled(WrappedObjective):
    """An objective times a factor; a negative factor makes the attack minimise it."""

    factor: float
    objective: Objective

    @classmethod
    def example(cls, criterion: RuleCriterion, objective: Objective) -> Objective:
        return cls(-2.0, objective)

    @property
    def inner(self) -> Objective:
        return self.objective

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return self.factor * self.objective(out, y, *inputs)


def _terms(objective: Objective) -> tuple[Objective, ...]:
    return objective.objectives if isinstance(objective, Sum) else (objective,)
