"""What decides a training run."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from demur.attacks import Attack, Clean
from demur.data import Augment, Dataset, NoAugment, SplitName
from demur.errors import BadInput
from demur.field_types import Condition, NonNegative, NonNegativeInt, PositiveInt, UnitInterval
from demur.methods import EBD, RR, Method, NoHead, Schedule
from demur.nets import NetSpec
from demur.precision import Precision
from demur.rejectors import OUTPUT_REJECTORS, Con, Rejector, fitted_rejectors
from demur.spec import Spec, later

# an average that keeps all of the past never moves, and what starts at the end never starts
BelowOne = Annotated[float, Condition(lambda v: 0 <= v < 1, "of at least 0 and below 1")]


@dataclass(frozen=True)
class Recipe(Spec):
    """A training run: data, net, method, and how long and how fast it learns."""

    data: Dataset
    net: NetSpec
    method: Method
    schedule: Schedule
    epochs: PositiveInt
    batch_size: PositiveInt = 128
    momentum: UnitInterval = 0.9
    weight_decay: NonNegative = 5e-4  # on every parameter, batch norm and biases too
    augment: Augment = NoAugment()
    validation_attack: Attack = (
        Clean()
    )  # the val accuracy that chooses the epoch is under this attack
    seed: NonNegativeInt = 0
    precision: Precision = field(default="fp32", metadata=later(neutral="fp32"))
    selection: Literal["val", "test", "last"] | None = field(default=None, metadata=later(None))
    # what an average of the weights keeps of itself at each step, say 0.995; it is what is judged
    # and saved; 0: no average
    ema: BelowOne = field(default=0.0, metadata=later(neutral=0.0))
    awp: NonNegative = field(default=0.0, metadata=later(neutral=0.0))  # gamma; 0.005 to 0.01
    awp_start: BelowOne = field(default=0.0, metadata=later(neutral=0.0))  # share of epochs before
    # a finished run whose classifier is taken over as it is: only the head learns
    base: str | None = field(default=None, metadata=later(None))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.awp_start and not self.awp:
            raise BadInput("awp_start says when awp begins, and there is none; set awp too")
        if self.base is not None:
            self._check_head_learns()

    def _check_head_learns(self) -> None:
        """Refuse a base where nothing is left to learn or to choose by."""
        head = self.method.head
        if isinstance(head, NoHead | EBD) or (isinstance(head, RR) and head.construction == "con"):
            raise BadInput("with a base only the head learns, and this one has no weights; use RR")
        if self.selection in ("val", "test"):
            raise BadInput("with a base the classifier is right as often in every epoch; use last")

    @property
    def selection_split(self) -> SplitName | None:
        """The split that chooses the epoch; None where the last is taken."""
        if self.base is not None:
            return None
        if self.selection is None:
            return "val" if "val" in self.data.splits else None
        return None if self.selection == "last" else self.selection

    @property
    def head_rejector(self) -> tuple[str, Rejector]:
        """The rejector that the head is made for, with its name; confidence without a head."""
        return next(iter(self.method.head.rejectors().items()), ("Con", Con()))

    @property
    def tau(self) -> float:
        """The temperature that A was trained for."""
        return self.method.head.tau if isinstance(self.method.head, RR) else 1.0

    @property
    def rr_head(self) -> RR | None:
        """The head that learned the true confidence with a second output, if it is one."""
        head = self.method.head
        return head if isinstance(head, RR) and head.construction != "con" else None

    @property
    def has_rectifier(self) -> bool:
        """Whether there is a second output that confidence is multiplied by."""
        return self.rr_head is not None and self.rr_head.construction == "product"

    def rejectors(self) -> dict[str, Rejector]:
        """What the trained net can be scored with: confidence, the head's own, and the rest."""
        own = self.method.head.rejectors()
        return {"Con": Con(), **own, **OUTPUT_REJECTORS, **fitted_rejectors(self.data)}
