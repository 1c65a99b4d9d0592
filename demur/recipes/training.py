"""Recipes of training runs: all settings of a training, learning-rate schedules, named recipes.

Named are the embedded digits, the paper's runs on CIFAR-10, and a user's own images. Other heads,
settings, nets and data are changes of these.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, Any, Literal

from demur.attacks import KL, PGD, Attack, Clean
from demur.attacks.balls import L2, Linf
from demur.data import (
    CIFAR10,
    IDBH,
    Augment,
    CropFlip,
    Dataset,
    Digits,
    NoAugment,
    OwnImages,
    SplitName,
)
from demur.errors import BadInput, shorten, suggestion
from demur.methods import (
    ATRO,
    CARL,
    CCAT,
    EBD,
    PGDAT,
    RR,
    TRADES,
    Framework,
    HardLabels,
    Head,
    Labels,
    LabelSmoothing,
    Method,
    NoHead,
    SNet,
    Standard,
)
from demur.methods.frameworks import CCAT_OFFICIAL, CCAT_REFERENCE, scaled_attack
from demur.nets import NetSpec, ResNet8, ResNet18
from demur.numerics import Precision
from demur.rejectors import REJECTORS, Con, Rejector
from demur.spec import Spec, find_name, later
from demur.spec.field_types import (
    Condition,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    UnitInterval,
)

# an average with decay 1 never changes, and AWP that starts at the end never runs
BelowOne = Annotated[float, Condition(lambda v: 0 <= v < 1, "of at least 0 and below 1")]


@dataclass(frozen=True)
class Schedule(Spec, ABC):
    """A learning rate for every step of a run; `peak` is the largest."""

    peak: Positive = 0.1

    @abstractmethod
    def __call__(self, progress: float) -> float:
        """Learning rate of the step after which `progress` (0 to 1) of all steps are done."""


@dataclass(frozen=True)
class Piecewise(Schedule):
    """Constant learning rate, multiplied by `gamma` at each of `milestones`.

    Args:
        peak: The first learning rate.
        milestones: Shares of the run; the defaults are epochs 100 and 105 of the paper's 110.
        gamma: The factor at each milestone.

    Example:
        >>> from demur import Piecewise
        >>> Piecewise(0.1, milestones=(0.5,))(progress=0.25)
        0.1
    """

    # the step that reaches a milestone has the lower rate
    milestones: tuple[UnitInterval, ...] = (10 / 11, 21 / 22)
    gamma: Positive = 0.1

    def __call__(self, progress: float) -> float:
        return self.peak * self.gamma ** sum(progress >= share for share in self.milestones)


@dataclass(frozen=True)
class OneCycle(Schedule):
    """Linear increase to the peak during the share `warmup` of the run, then linear decay to 0.

    Args:
        peak: The largest learning rate.
        warmup: The share of the run before the peak.

    Example:
        >>> from demur import OneCycle
        >>> OneCycle(0.2, warmup=0.5)(progress=0.25)
        0.1
    """

    warmup: UnitInterval = 0.3

    def __call__(self, progress: float) -> float:
        up = progress / self.warmup if self.warmup > 0 else 1.0
        down = (1 - progress) / (1 - self.warmup) if self.warmup < 1 else 1.0
        return self.peak * max(0.0, min(up, down))


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
        eps_ramp: Two shares of the epochs. No image is attacked up to the first; then eps grows
            linearly and has its full value from the second on, where epochs can be selected.
        epoch_images: With fewer images an epoch takes them several times, this many in all.

    Raises:
        BadInput: If fields contradict each other.

    Example:
        >>> from demur import PGDAT, RR, Digits, Method, OneCycle, Recipe, ResNet8
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
    eps_ramp: tuple[UnitInterval, UnitInterval] = field(
        default=(0.0, 0.0), metadata=later(neutral=(0.0, 0.0))
    )
    epoch_images: NonNegativeInt = field(default=0, metadata=later(neutral=0))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eps_ramp[0] > self.eps_ramp[1]:
            raise BadInput("eps_ramp ends before it begins; write it as (0.2, 0.5)")
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

    def with_eps(self, eps: float) -> "Recipe":
        """Recipe for own images at another Linf radius, in training and in named attacks."""
        assert isinstance(self.data, OwnImages)
        factor, data = eps / self.data.eps, replace(self.data, eps=eps)
        method, attack = self.method.scaled(factor), scaled_attack(self.validation_attack, factor)
        return replace(self, data=data, method=method, validation_attack=attack)

    def passes(self, images: int) -> int:
        """How often an epoch takes each of so many training images."""
        return max(1, round(self.epoch_images / images))

    def strength(self, epoch: int) -> float:
        """Factor of eps in an epoch, counted from 0."""
        (first, last), done = self.eps_ramp, (epoch + 1) / self.epochs
        if done >= last:
            return 1.0
        return 0.0 if done <= first else (done - first) / (last - first)

    @property
    def head_rejector(self) -> tuple[str, Rejector]:
        """Name and spec of the rejector that the head is trained for; Con without a head."""
        return next(iter(self.method.head.rejectors().items()), ("Con", Con()))

    @property
    def tau(self) -> float:
        return self.method.head.tau

    @property
    def has_rectifier(self) -> bool:
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


_CCAT_AS_IN_PAPER = CCAT(rho=1.0, form="reference", attack=CCAT_REFERENCE, bn="train")
_FRAMEWORKS: dict[str, Framework] = {
    "standard": Standard(),
    "pgdat": PGDAT(),
    "trades": TRADES(),
    "ccat": CCAT(),
    "ccat-reference": _CCAT_AS_IN_PAPER,
}


# a slightly larger radius than that of the evaluation, which helps with so few images
_DIGITS_PGD = replace(linf(Digits(), 10), ball=Linf(0.17))
_DIGITS_FRAMEWORKS: dict[str, Framework] = {
    "standard": Standard(),
    "pgdat": PGDAT(_DIGITS_PGD),
    "trades": TRADES(attack=replace(_DIGITS_PGD, start="near", objective=KL())),
    "ccat": CCAT(attack=replace(CCAT_OFFICIAL, ball=_DIGITS_PGD.ball, steps=10, step_size=0.06)),
    "ccat-reference": replace(
        _CCAT_AS_IN_PAPER,
        attack=replace(CCAT_REFERENCE, ball=_DIGITS_PGD.ball, steps=10, step_size=0.04),
    ),
}

_HEADS: dict[str, Head] = {
    "": NoHead(), "-rr": RR(), "-ebd": EBD(), "-snet": SNet(), "-atro": ATRO(), "-carl": CARL(),
}  # fmt: skip
_PAIRS = [  # of the paper's Table 2
    ("standard", ""),
    *product(["pgdat"], _HEADS),
    *product(["trades", "ccat", "ccat-reference"], ["", "-rr"]),
]


def _methods(frameworks: dict[str, Framework]) -> dict[str, Method]:
    return {name + suffix: Method(frameworks[name], _HEADS[suffix]) for name, suffix in _PAIRS}


# CCAT may diverge at a peak of 0.3, and its epochs have two or three times as many forward passes
_DIGITS_SCHEDULES = {"ccat-reference": (0.1, 12), "ccat": (0.1, 18), "": (0.3, 24)}  # peak, epochs


def _digits(name: str, method: Method) -> Recipe:
    known = _DIGITS_SCHEDULES.items()
    peak, epochs = next(found for prefix, found in known if name.startswith(prefix))
    return _with_selection(Recipe(
        Digits(), ResNet8(), method, OneCycle(peak), epochs, validation_attack=linf(Digits(), 10)
    ))  # fmt: skip


def _cifar10(method: Method) -> Recipe:
    """The paper's schedule of 110 epochs, in bf16 instead of fp32."""
    return _with_selection(Recipe(
        CIFAR10(), ResNet18(), method, Piecewise(0.1), epochs=110, augment=CropFlip(),
        validation_attack=linf(CIFAR10(), 10), precision="bf16",
    ))  # fmt: skip


def _with_selection(recipe: Recipe) -> Recipe:
    """Recipe that selects the last epoch if its framework does not aim at robust accuracy."""
    if recipe.method.framework.aims_at_robust_accuracy:
        return recipe
    return replace(recipe, selection="last")


def _short(recipe: Recipe) -> Recipe:
    """A third of the epochs at equal robustness, with one cycle and averaged weights."""
    # reference code: every forward pass updates the running statistics, twelve times a batch (ten
    # steps, the loss after the attack and the training loss), so that the last batch alone makes
    # up 72% of them; bn="batch" avoids this
    framework = recipe.method.framework.without_stats_updates()
    method = replace(recipe.method, framework=framework)
    # selected on held-out images: a later peak or a longer average lowers clean accuracy
    return replace(recipe, method=method, epochs=36, schedule=OneCycle(0.2, warmup=0.15), ema=0.998)


def _averaged(recipe: Recipe) -> Recipe:
    """Averaged and adversarially perturbed weights, 60 epochs; not the paper's."""
    return replace(
        _short(recipe), epochs=60, schedule=OneCycle(0.2), ema=0.999,
        awp=0.005, awp_start=0.1,  # gamma of AWP's authors for TRADES, after a warm-up
    )  # fmt: skip


def _best(recipe: Recipe) -> Recipe:
    """The most accurate net under AutoAttack so far: fewer attack steps pay for more epochs."""
    attack = PGD(Linf(8 / 255), steps=5, step_size=3 / 255, start="near", objective=KL())
    framework = TRADES(attack=attack)
    return replace(
        _averaged(recipe), method=replace(recipe.method, framework=framework), epochs=170,
        schedule=OneCycle(0.2, warmup=0.1), augment=IDBH(erase=0.5), labels=LabelSmoothing(),
    )  # fmt: skip


def _images(method: Method) -> Recipe:
    """A ResNet-18 on a user's own images; every change of statistics is the loss's own."""
    method = replace(method, framework=method.framework.without_stats_updates())
    attack = Clean() if isinstance(method.framework, Standard) else linf(OwnImages(), 10)
    return Recipe(
        OwnImages(), ResNet18(), method, OneCycle(0.1), epochs=60, augment=CropFlip(),
        validation_attack=attack, precision="bf16",
    )  # fmt: skip


def _small(recipe: Recipe) -> Recipe:
    """A net, batches, steps and an eps for a few hundred images on a CPU."""
    framework: Any = recipe.method.framework
    if hasattr(framework, "attack"):
        framework = replace(framework, attack=replace(framework.attack, steps=3, step_size=4 / 255))
    return replace(
        recipe, net=ResNet8(), method=replace(recipe.method, framework=framework), batch_size=32,
        epochs=30, epoch_images=640, eps_ramp=(0.2, 0.5), ema=0.99, precision="fp32",
        schedule=OneCycle(0.03), augment=CropFlip(pad=0),
    ).with_eps(2 / 255)  # fmt: skip


_IMAGES = {
    f"images-{name}": _images(_methods(_FRAMEWORKS)[name])
    for name in ("standard", "pgdat-rr", "trades-rr")
}
_PAPER = {f"cifar10-{name}": _cifar10(method) for name, method in _methods(_FRAMEWORKS).items()}
RECIPES: dict[str, Recipe] = {
    **{f"digits-{name}": _digits(name, one) for name, one in _methods(_DIGITS_FRAMEWORKS).items()},
    **_PAPER,
    **{f"{name}-short": _short(recipe) for name, recipe in _PAPER.items()},
    "cifar10-trades-rr-awp": _averaged(_PAPER["cifar10-trades-rr"]),
    "cifar10-best": _best(_PAPER["cifar10-trades-rr"]),
    **_IMAGES,
    **{f"{name}-small": _small(recipe) for name, recipe in _IMAGES.items()},
}
