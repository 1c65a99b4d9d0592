"""Attacks made of attacks: the members of AutoAttack and RejectAutoAttack in each version; chains.

Each part attacks the images on which no earlier one succeeded. AutoAttack (Croce and Hein 2020)
returns an image without success unchanged, so AUROC and TPR-95 of its result are artefacts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor

from demur import noise, progress
from demur.attacks.apgd import APGD
from demur.attacks.attack import (
    AcceptedError,
    Attack,
    AttackBatch,
    Criterion,
    Misclassified,
    Rejected,
    RuleCriterion,
)
from demur.attacks.attack_model import exact_value
from demur.attacks.balls import L1, Ball
from demur.attacks.decision import HopSkipJump, RayS
from demur.attacks.driver import Best, Found
from demur.attacks.fab import FAB
from demur.attacks.margins import MaxMinMargin, OrthogonalAPGD, within
from demur.attacks.objectives.classification import (
    CE,
    DLR,
    Objective,
    ObjectiveState,
    TargetedDLR,
    wrong_classes,
)
from demur.attacks.objectives.rejector import MarginProduct, MinMargin, RejectionObjective
from demur.attacks.pgd import EOTPGD, success_share
from demur.attacks.square import Square
from demur.errors import BadInput, suggestion
from demur.noise import Stream
from demur.spec import later
from demur.spec.field_types import NonNegativeInt, PositiveInt

# Values of ChainState.broken_by that name no attack.
NOT_BROKEN = -1  # no attack has succeeded yet
BROKEN_CLEAN = -2  # the clean image satisfies the criterion
PASSES = 100  # by which version="rand" judges the example of each of its attacks
Version = Literal["standard", "fast", "plus", "rand", "older", "black-box"]
VERSIONS: dict[Version, tuple[tuple[str, int], ...]] = {  # attacks with restarts
    "standard": (("apgd-ce", 1), ("apgd-t", 1), ("fab-t", 1), ("square", 1)),
    "fast": (("apgd-ce", 1), ("apgd-t", 1), ("square", 1)),
    "plus": (
        ("apgd-ce", 5), ("apgd-dlr", 5), ("fab", 5), ("square", 1), ("apgd-t", 1), ("fab-t", 1),
    ),
    "rand": (("eot-loss", 2), ("eot-margin", 2), ("eot-t", 2)),
    "older": (("apgd-ce", 5), ("apgd-dlr", 5), ("fab", 5), ("square", 1)),
    "black-box": (("square", 1), ("hopskipjump", 1), ("rays", 1)),  # for models without a gradient
}  # fmt: skip
RAND = tuple(name for name, _ in VERSIONS["rand"])
MEMBERS = ("apgd-ce", "apgd-dlr", "apgd-t", "fab", "fab-t", "square", "hopskipjump", "rays")
FAST_STEPS, FAST_QUERIES = 33, 500  # of APGD-T and of Square in version="fast"
L1_RESTARTS, L1_TARGETS = 5, 5  # of Auto-PGD in version="standard" for the L1 ball
RejectVersion = Literal["standard", "fast", "rand", "black-box"]
T = TypeVar("T", bound=str)
FAST = ("product", "balanced", "product-t")  # these find nearly all accepted errors
STANDARD = (*FAST, "closest", "orthogonal", "balanced-t", "square")


def check_version(what: str, name: str, known: Sequence[T]) -> T:
    """Return the known version of this name; raise BadInput if there is none."""
    for version in known:
        if version == name:
            return version
    raise BadInput(f"{what} has no version {name!r}; {suggestion(name, [*map(str, known)])}")


@dataclass
class ChainState(Best):
    """The progress of a chain, one row per image; `value` is that of `rank_by`."""

    broken_by: Tensor  # the position of the attack that succeeded, or a constant above
    tried: Tensor  # the number of attacks that have run on the image
    inputs: ObjectiveState  # of the objective `rank_by`

    def remaining(self, member: int) -> Tensor:
        """Return the rows of the images that the attack at position `member` must still try."""
        return ((self.broken_by == NOT_BROKEN) & (self.tried <= member)).nonzero()[:, 0]

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the state with every tensor changed, such as moved to a device."""
        tensors = {
            f.name: change(getattr(self, f.name)) for f in fields(self) if f.name != "inputs"
        }
        return replace(self, **tensors, inputs=tuple(map(change, self.inputs)))


@dataclass(frozen=True)
class Chain(Attack):
    """Attacks in turn; an image leaves the chain after the first success.

    Success is decided by an exact forward pass in fp32. Where no attack succeeds, the example with
    the largest value of `rank_by` is returned, or the clean image if it is None.
    """

    attacks: tuple[Attack, ...]
    criterion: Criterion = Misclassified()
    rank_by: Objective | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.attacks:
            raise BadInput("a chain needs at least one attack: Chain((PGD(Linf(8/255)),))")

    @property
    def parts(self) -> tuple[Attack, ...]:
        return self.attacks

    @property
    def maximised(self) -> Objective | None:
        return self.rank_by if any(part.maximised for part in self.parts) else None

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        chain_state = self.start(batch)
        for member in range(len(self.attacks)):
            self.advance(member, chain_state.remaining(member), batch, chain_state, stream)
        return chain_state.x_adv

    def start(self, batch: AttackBatch) -> ChainState:
        """Return the state before the first attack."""
        objective = self.rank_by or CE()
        inputs = objective.at_step(batch.prepare(objective, batch.x).objective_state, 0, 1)
        value, out = exact_value(batch.model, objective, batch.x, batch.y, *inputs)
        broken_by = torch.where(self.criterion(out, batch.y), BROKEN_CLEAN, NOT_BROKEN)
        return ChainState(batch.x.clone(), value, broken_by, torch.zeros_like(batch.y), inputs)

    def advance(
        self, member: int, rows: Tensor, batch: AttackBatch, chain_state: ChainState, stream: Stream
    ) -> None:
        """Run the attack at position `member` on some rows and update the state in place."""
        if len(rows) == 0:
            return
        selected = batch.select(rows)
        x_adv = self.attacks[member].run(selected, noise.derive_seed(stream, member))
        chain_state.broken_by[self._keep(rows, selected, x_adv, chain_state)] = member
        chain_state.tried[rows] = member + 1
        # CUDA graphs captured for this attack's objective hold memory
        batch.model.drop_graphs()

    def _keep(
        self, rows: Tensor, batch: AttackBatch, x_adv: Tensor, chain_state: ChainState
    ) -> Tensor:
        """Keep the examples of these rows that are better; return the rows that are now broken."""
        inputs = [part[rows] for part in chain_state.inputs]
        value, out = exact_value(batch.model, self.rank_by or CE(), x_adv, batch.y, *inputs)
        success = self.criterion(out, batch.y)
        chain_state.keep_better(rows, Found(x_adv, value, success), by_value=bool(self.rank_by))
        return rows[success]


@dataclass
class MeanState(ChainState):
    """The progress of a `MeanChain`; `value` is the share of successful passes, N."""

    def remaining(self, member: int) -> Tensor:
        return ((self.value < 1) & (self.tried <= member)).nonzero()[:, 0]


@dataclass(frozen=True)
class MeanChain(Chain):
    """Attacks in turn on a randomised model; each image keeps the example that succeeds most often.

    Fresh `passes` judge the example of each attack and the clean image, which is returned where no
    attack does better. An image leaves when all passes that judge its example succeed. In
    `broken_by` it counts as broken if more than half of them do. `rank_by` is not used.
    """

    passes: PositiveInt = PASSES

    @property
    def maximised(self) -> Objective | None:
        return None

    def start(self, batch: AttackBatch) -> MeanState:
        share = success_share(self.criterion, batch, batch.x, self.passes)
        broken_by = torch.where(share > 0.5, BROKEN_CLEAN, NOT_BROKEN)
        return MeanState(batch.x.clone(), share, broken_by, torch.zeros_like(batch.y), ())

    def _keep(
        self, rows: Tensor, batch: AttackBatch, x_adv: Tensor, chain_state: ChainState
    ) -> Tensor:
        share = success_share(self.criterion, batch, x_adv, self.passes)
        better = share > chain_state.value[rows]
        chain_state.set(rows[better], x_adv[better], share[better])
        # Not where the clean image, too, succeeds in most passes: it needs no attack.
        return rows[better & (share > 0.5) & (chain_state.broken_by[rows] != BROKEN_CLEAN)]


def rand_chain(ball: Ball, criterion: Criterion, seed: int, restarts: int = 2) -> MeanChain:
    """Return the chain of version="rand"; its attacks have the names of RAND."""
    margin = EOTPGD(ball, restarts=restarts, criterion=criterion, seed=seed)
    loss = MarginProduct(criterion) if isinstance(criterion, AcceptedError) else CE()
    first = replace(margin, objective=loss)
    targeted = replace(margin, targeted=True)
    if isinstance(criterion, Rejected):  # a rejection has no target
        first, targeted = replace(margin, objective=RejectionObjective(criterion)), margin
    return MeanChain((first, margin, targeted), criterion)


@dataclass(frozen=True)
class Ensemble(Attack, ABC):
    """A named chain of attacks; subclasses implement `chain`."""

    @abstractmethod
    def chain(self) -> Chain:
        """Return the chain that `run` executes."""

    def members(self) -> dict[str, Attack]:
        """Return the attacks by name, in the order in which they run."""
        return dict(zip(RAND, self.parts, strict=True))

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        return self.chain().run(batch, stream)

    @property
    def parts(self) -> tuple[Attack, ...]:
        return self.chain().attacks

    @property
    def maximised(self) -> Objective | None:
        return self.chain().maximised


@dataclass(frozen=True)
class MultiTarget(Attack):
    """A targeted attack towards the wrong classes of each image (Gowal et al. 2019).

    The classes follow each other by decreasing logit. With keep="max_objective" the example with
    the largest cross-entropy over targets and restarts is returned, as in the reference code.

    Args:
        attack: The attack to run for each target. Its own restarts, if any, are compared by its
            own objective.
        targets: The number of targets; None is every wrong class.
        keep: "max_objective" returns the example with the largest `rank_by` over all targets and
            restarts. "success" returns the first success; images leave after it.
        rank_by: The objective that compares examples.
        criterion: The success criterion, used by keep="success".
        restarts: The number of runs towards each target.
    """

    attack: Attack
    targets: PositiveInt | None = None
    keep: Literal["max_objective", "success"] = "max_objective"
    rank_by: Objective = CE()
    criterion: Criterion = Misclassified()
    restarts: PositiveInt = field(default=1, metadata=later(neutral=1))

    @property
    def parts(self) -> tuple[Attack, ...]:
        return (self.attack,)

    @property
    def gradient_queries(self) -> float:
        """Gradient queries per image; one target is counted if the attack takes all of them."""
        return (self.targets or 1) * self.restarts * self.attack.gradient_queries

    @property
    def maximised(self) -> Objective | None:
        return self.rank_by if self.attack.maximised else None

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        ranked = replace(batch, target=None).prepare(self.rank_by, batch.x)
        inputs = self.rank_by.at_step(ranked.objective_state, 0, 1)
        value, out = exact_value(batch.model, self.rank_by, batch.x, batch.y, *inputs)
        targets = wrong_classes(out.logits, batch.y, self.targets)
        if self.keep == "success":
            found = Found(batch.x.clone(), value, self.criterion(out, batch.y))
        else:
            found = Found.nothing(batch)
        attempts = self.restarts * len(targets)
        for number, rows in found.attempts(attempts):
            selected = replace(batch, target=targets[number % len(targets)]).select(rows)
            with progress.part(number, attempts):
                x_adv = self.attack.run(selected, noise.derive_seed(stream, number))
            own = [part[rows] for part in inputs]
            value, out = exact_value(batch.model, self.rank_by, x_adv, selected.y, *own)
            success = self.criterion(out, selected.y) & (self.keep == "success")
            found.add(rows, Found(x_adv, value, success))
        return found.x_adv


# ------------------------------------------------ AutoAttack, and the ensemble for rejectors


def decision_attacks(ball: Ball, criterion: Criterion, seed: int) -> dict[str, Attack]:
    """Return the attacks for this ball that read decisions only, by name."""
    return {
        cls.__name__.lower(): cls(ball, criterion=criterion, seed=seed)
        for cls in (HopSkipJump, RayS)
        if isinstance(ball, cls.norms)
    }


@dataclass(frozen=True)
class AutoAttackEnsemble(Ensemble):
    """The attacks of an AutoAttack version in turn, each on the images without success so far.

    Version "fast" has a third of the steps of targeted APGD, no FAB and 500 queries of Square.
    Version "black-box", for models without a gradient, is Square and the attacks that read
    decisions only. Version "rand", for randomised models, departs from the authors' code, which
    stops at the first wrong prediction and so returns images of which another pass is often right:
    it is a `MeanChain` of `EOTPGD` on the cross-entropy and on `SuccessProbability`, untargeted and
    targeted. It makes about 1,900 passes per image, theirs 4,000. Targeted attacks aim at `targets`
    wrong classes, by decreasing logit.
    """

    ball: Ball
    version: Version = "standard"
    targets: PositiveInt = 9
    seed: NonNegativeInt = 0

    def chain(self) -> Chain:
        if self.version == "rand":
            return rand_chain(self.ball, Misclassified(), self.seed)
        return Chain(tuple(self.members().values()))

    def members(self) -> dict[str, Attack]:
        if self.version == "rand":
            return super().members()
        return {
            name: self.member(name, restarts)
            for name, restarts in VERSIONS[self.version]
            if name != "rays" or isinstance(self.ball, RayS.norms)
        }

    def member(self, name: str, restarts: int = 1) -> Attack:
        """Return one attack by the name it has in the authors' code."""
        ball, seed = self.ball, self.seed
        apgd = APGD(ball, restarts=restarts, objective=CE(), seed=seed)
        fab = FAB(ball, restarts=restarts, seed=seed)
        sparse = isinstance(ball, L1) and self.version == "standard"
        is_fast = self.version == "fast"
        match name:
            case "apgd-ce":
                return replace(apgd, restarts=L1_RESTARTS) if sparse else apgd
            case "apgd-dlr":
                return replace(apgd, objective=DLR())
            case "apgd-t":
                targeted = replace(apgd, objective=TargetedDLR())
                targeted = replace(targeted, steps=FAST_STEPS) if is_fast else targeted
                return self._multi_target(targeted, L1_TARGETS if sparse else self.targets)
            case "fab":
                return fab
            case "fab-t":
                return self._multi_target(fab, self.targets)
            case "square" | "hopskipjump" | "rays":
                kinds = {"square": Square, "hopskipjump": HopSkipJump, "rays": RayS}
                fewer: Any = {"queries": FAST_QUERIES} if is_fast and name == "square" else {}
                attack: Attack = kinds[name](ball, seed=seed, **fewer)
                return attack
        raise BadInput(f"AutoAttack has no attack {name!r}; {suggestion(name, MEMBERS)}")

    def _multi_target(self, attack: Attack, targets: int) -> MultiTarget:
        return MultiTarget(attack, targets=min(targets, self.targets), keep="success")


@dataclass(frozen=True)
class RejectAutoAttackEnsemble(Ensemble):
    """Attacks that look for wrong and accepted predictions; see `demur.RejectAutoAttack`.

    Only a wrong and accepted prediction is a success, and every other image is attacked. "fast"
    runs Auto-PGD on `MarginProduct`, untargeted and targeted, and `MaxMinMargin`. "standard" adds
    Auto-PGD with orthogonal gradients, FAB, targeted `MaxMinMargin` and Square. "rand", for
    randomised models, is a `MeanChain` of `EOTPGD` on `MarginProduct` and on `SuccessProbability`,
    untargeted and targeted. "black-box" is Square and the attacks that read decisions only.

    `attacks_to_run` names attacks to run instead, in this order, of any version. `most_queries`
    is the most gradient queries per image; three forward passes count as one. An attack that does
    not fit has fewer targets or passes, or is left out.
    """

    VERSION: ClassVar[int] = 3  # version 2 had another order and more restarts

    ball: Ball
    criterion: AcceptedError
    version: RejectVersion = "standard"
    targets: PositiveInt = 9
    seed: NonNegativeInt = 0
    attacks_to_run: tuple[str, ...] = field(default=(), metadata={"since": 3})
    most_queries: PositiveInt | None = field(default=None, metadata={"since": 3})

    def chain(self) -> Chain:
        members = tuple(self.members().values())
        if self.version == "rand":
            return MeanChain(members, self.criterion)
        return Chain(members, criterion=self.criterion, rank_by=MinMargin(self.criterion))

    def members(self) -> dict[str, Attack]:
        known, names = self._known(), self.attacks_to_run
        if not names and self.version != "rand":
            blind = "square", *decision_attacks(self.ball, self.criterion, self.seed)
            names = {"fast": FAST, "black-box": blind, "standard": STANDARD}[self.version]
        for name in names or known:
            if name not in known:
                raise BadInput(
                    f"RejectAutoAttack has no attack {name!r}; {suggestion(name, known)}"
                )
        return within({name: known[name] for name in names or known}, self.most_queries)

    def _known(self) -> dict[str, Attack]:
        """Return the attacks by name: those of "rand", or of all other versions."""
        if self.version == "rand":
            chain = rand_chain(self.ball, self.criterion, self.seed)
            return dict(zip(RAND, chain.attacks, strict=True))
        criterion, ball, seed = self.criterion, self.ball, self.seed
        margin = MinMargin(criterion)
        product = APGD(ball, objective=MarginProduct(criterion), criterion=criterion, seed=seed)
        balanced = MaxMinMargin(ball, criterion, steps=50, restarts=2, seed=seed)
        return {
            "product": product,
            "balanced": balanced,
            "product-t": self._multi_target(product),
            "closest": FAB(ball, objective=margin, criterion=criterion, seed=seed),
            "orthogonal": OrthogonalAPGD(ball, objective=margin, criterion=criterion, seed=seed),
            "balanced-t": replace(
                self._multi_target(replace(balanced, restarts=1)), targets=min(3, self.targets)
            ),
            "square": Square(ball, objective=margin, criterion=criterion, seed=seed),
            **decision_attacks(ball, criterion, seed),
        }

    def _multi_target(self, attack: Attack) -> MultiTarget:
        margin = MinMargin(self.criterion)
        return MultiTarget(
            attack, targets=self.targets, keep="success", rank_by=margin, criterion=self.criterion
        )


@dataclass(frozen=True)
class ForceRejectionEnsemble(Ensemble):
    """Auto-PGD with `restarts`, and Square, on the accept margin until the model rejects."""

    ball: Ball
    criterion: Rejected
    restarts: PositiveInt = 1
    seed: NonNegativeInt = 0

    @classmethod
    def example(cls, ball: Ball, criterion: RuleCriterion) -> Attack:
        return cls(ball, Rejected(criterion.rejector, criterion.threshold))

    def chain(self) -> Chain:
        objective = RejectionObjective(self.criterion)
        shared: dict[str, Any] = {
            "objective": objective, "criterion": self.criterion, "seed": self.seed,
        }  # fmt: skip
        apgd = APGD(self.ball, restarts=self.restarts, **shared)
        return Chain((apgd, Square(self.ball, **shared)), self.criterion, rank_by=objective)
