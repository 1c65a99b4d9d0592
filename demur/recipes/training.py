"""What decides a training run."""

from dataclasses import dataclass, field
from typing import Literal

from demur.attacks import Attack, Clean
from demur.data import Augment, Dataset, SplitName, Unchanged
from demur.declared import Count, Natural, NonNegative, Share
from demur.methods import RR, Method, Schedule
from demur.nets import NetSpec
from demur.precision import Precision
from demur.rejectors import READ_OFF, Con, Rejector, learned_from
from demur.spec import Spec, later


@dataclass(frozen=True)
class Recipe(Spec):
    """A training run: data, net, method, and how long and how fast it learns."""

    data: Dataset
    net: NetSpec
    method: Method
    schedule: Schedule
    epochs: Count
    batch_size: Count = 128
    momentum: Share = 0.9
    weight_decay: NonNegative = 5e-4  # on every parameter, batch norm and biases too
    augment: Augment = Unchanged()
    judge: Attack = Clean()  # the val accuracy that chooses the epoch is under this attack
    seed: Natural = 0
    precision: Precision = field(default="fp32", metadata=later(neutral="fp32"))
    choose: Literal["val", "test", "last"] | None = field(default=None, metadata=later(None))

    @property
    def chosen_on(self) -> SplitName | None:
        """The split that chooses the epoch; None where the last is taken."""
        if self.choose is None:
            return "val" if "val" in self.data.splits else None
        return None if self.choose == "last" else self.choose

    @property
    def own(self) -> tuple[str, Rejector]:
        """The rejector that the head is made for, with its name; confidence without a head."""
        return next(iter(self.method.head.rejectors().items()), ("Con", Con()))

    @property
    def tau(self) -> float:
        """The temperature that A was trained for."""
        return self.method.head.tau if isinstance(self.method.head, RR) else 1.0

    @property
    def has_a(self) -> bool:
        """Whether there is a second output that rectifies the confidence."""
        return isinstance(self.method.head, RR)

    def rejectors(self) -> dict[str, Rejector]:
        """What the trained net can be scored with: confidence, the head's own, and the rest."""
        own = self.method.head.rejectors()
        return {"Con": Con(), **own, **READ_OFF, **learned_from(self.data)}
