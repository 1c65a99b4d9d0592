"""The recipe of a training run: everything that determines its result."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from demur.attacks import PGD, Attack, Clean
from demur.attacks.balls import L2, Linf
from demur.data import Augment, Dataset, NoAugment, SplitName
from demur.errors import BadInput, shorten, suggestion
from demur.methods import HardLabels, Labels, Method, Schedule
from demur.nets import NetSpec
from demur.numerics import Precision
from demur.rejectors import REJECTORS, Con, Rejector
from demur.spec import Spec, find_name, later
from demur.spec.field_types import Condition, NonNegative, NonNegativeInt, PositiveInt, UnitInterval

# an average with decay 1 never changes, and AWP that starts at the end never runs
BelowOne = Annotated[float, Condition(lambda v: 0 <= v < 1, "of at least 0 and below 1")]


@dataclass(frozen=True)
class Recipe(Spec):
    """A training run: data, net, method, schedule and optimiser settings.

    Args:
        data: The data set.
        net: The architecture.
        method: The framework and the head.
        schedule: Learning rate of SGD as a function of progress.
        epochs: Number of epochs.
        batch_size: Images per step, over all processes.
        momentum: Momentum of SGD.
        weight_decay: L2 penalty on every parameter, batch norm and biases included.
        augment: Augmentation of training images.
        validation_attack: Attack under which the accuracy for checkpoint selection is measured.
        seed: Seed of the initial weights, the order of the images and all noise.
        precision: Arithmetic of the training step.
        selection: Split whose accuracy selects the checkpoint: "val", "test" (as some papers
            do), or "last" for the last epoch. None is "val" where the data set has that split.
        ema: Decay of an exponential moving average of the weights, such as 0.995. The average is
            validated and saved. 0 disables it.
        awp: Size gamma of adversarial weight perturbation, 0.005 to 0.01. 0 disables it.
        awp_start: Share of the epochs before AWP starts.
        labels: Targets of the classification loss: the labels, smoothed ones, or those of ADR.
        base: Path of a finished run whose classifier is frozen and reused; only the head is
            trained.

    Raises:
        BadInput: If fields contradict each other.

    Example:
        >>> from demur import PGDAT, RR, Digits, Method, Recipe, ResNet8
        >>> from demur.methods import OneCycle
        >>> made = Recipe(Digits(), ResNet8(), Method(PGDAT(), RR()), OneCycle(0.3), epochs=24)
    """

    data: Dataset
    net: NetSpec
    method: Method
    schedule: Schedule
    epochs: PositiveInt
    batch_size: PositiveInt = 128
    momentum: UnitInterval = 0.9
    weight_decay: NonNegative = 5e-4
    augment: Augment = NoAugment()
    validation_attack: Attack = Clean()
    seed: NonNegativeInt = 0
    precision: Precision = field(default="fp32", metadata=later(neutral="fp32"))
    selection: Literal["val", "test", "last"] | None = field(default=None, metadata=later(None))
    ema: BelowOne = field(default=0.0, metadata=later(neutral=0.0))
    awp: NonNegative = field(default=0.0, metadata=later(neutral=0.0))
    awp_start: BelowOne = field(default=0.0, metadata=later(neutral=0.0))
    base: str | None = field(default=None, metadata=later(None))
    labels: Labels = field(default=HardLabels(), metadata=later(neutral=HardLabels()))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.awp_start and not self.awp:
            raise BadInput("awp_start has no effect without awp; set awp too")
        if self.labels.needs_teacher and not self.ema:
            raise BadInput("ADR needs the averaged net as its teacher; set ema, such as ema=0.995")
        if self.labels != HardLabels() and not self.method.framework.takes_soft_labels:
            framework = type(self.method.framework).__name__
            raise BadInput(f"{framework} makes its own targets; leave out labels, or use TRADES")
        if self.base is not None and self.net.trains_head_alone:
            raise BadInput("a base and a frozen net both bring weights; leave out one of them")
        if self.trains_head_alone:
            self._check_head_alone("a base" if self.base is not None else "a frozen net")

    def _check_head_alone(self, what: str) -> None:
        """Raise BadInput if frozen weights leave nothing to train or no checkpoint to select."""
        if not self.method.head.has_weights:
            raise BadInput(
                f"{what} trains the head alone, and this head has no weights; use head=RR()"
            )
        if self.selection in ("val", "test"):
            raise BadInput(f"{what} has the same accuracy in every epoch; use selection=last")

    @property
    def trains_head_alone(self) -> bool:
        """Whether the classifier is frozen: that of another run, or of the user's own function."""
        return self.base is not None or self.net.trains_head_alone

    @property
    def selection_split(self) -> SplitName | None:
        """Split whose accuracy selects the checkpoint; None selects the last epoch."""
        if self.trains_head_alone:
            return None
        if self.selection is None:
            return "val" if "val" in self.data.splits else None
        return None if self.selection == "last" else self.selection

    @property
    def head_rejector(self) -> tuple[str, Rejector]:
        """Name and spec of the rejector that the head is trained for; Con without a head."""
        return next(iter(self.method.head.rejectors().items()), ("Con", Con()))

    @property
    def tau(self) -> float:
        """Temperature that A is trained with."""
        return self.method.head.tau

    @property
    def has_rectifier(self) -> bool:
        """Whether the net has R-Con = con * A."""
        return self.method.head.has_rectifier

    def rejectors(self) -> dict[str, Rejector]:
        """Rejectors of the trained net by name: Con, the head's, and those for every net."""
        of_head = self.method.head.rejectors()
        baselines = [cls.baselines(self.data) for cls in REJECTORS]
        return {"Con": Con(), **of_head, **{k: v for group in baselines for k, v in group.items()}}

    def find_rejector(self, name: str) -> str:
        """Return the displayed name of a rejector: R-Con, RCon and rcon are one name.

        Raises BadInput if the trained net has no such rejector.
        """
        known = self.rejectors()
        found = find_name(name, known)
        if found is None:
            raise BadInput(f"the run has no rejector {shorten(name)!r}; {suggestion(name, known)}")
        return found


def linf(data: Dataset, steps: int) -> PGD:
    """PGD in the usual Linf ball of a data set."""
    return PGD(Linf(data.threat.linf), steps=steps, step_size=data.threat.linf_step)


def l2(data: Dataset, steps: int) -> PGD:
    """PGD in the usual L2 ball of a data set."""
    return PGD(L2(data.threat.l2), steps=steps, step_size=data.threat.l2_step)
