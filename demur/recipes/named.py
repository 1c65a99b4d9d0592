"""Named recipes: small runs on the embedded digits, and the paper's runs on CIFAR."""

from contextlib import suppress
from dataclasses import replace
from itertools import product

from demur.attacks import KL, PGD
from demur.balls import Linf
from demur.data import CIFAR10, CIFAR100, CropFlip, Dataset, Digits
from demur.errors import BadInput
from demur.methods import (
    ATRO,
    CARL,
    CCAT,
    EBD,
    PGDAT,
    RR,
    TRADES,
    Framework,
    Head,
    Method,
    NoHead,
    OneCycle,
    Piecewise,
    SNet,
    Standard,
)
from demur.methods.ccat import OFFICIAL, REFERENCE
from demur.nets import NetSpec, ResNet8, ResNet18, WideResNet
from demur.recipes.training import Recipe, linf


def _digits(method: Method, peak: float, epochs: int) -> Recipe:
    recipe = Recipe(
        Digits(), ResNet8(), method, OneCycle(peak), epochs, validation_attack=linf(Digits(), 10)
    )
    return _with_selection(recipe)


def _with_selection(recipe: Recipe) -> Recipe:
    """Recipe that selects the last epoch if its framework does not aim at robust accuracy."""
    if recipe.method.framework.aims_at_robust_accuracy:
        return recipe
    return replace(recipe, selection="last")


def _methods(frameworks: dict[str, Framework], heads: dict[str, Head]) -> dict[str, Method]:
    """Methods by name: each framework with each head that it can be combined with."""
    methods = {}
    for (prefix, framework), (suffix, head) in product(frameworks.items(), heads.items()):
        with suppress(BadInput):
            methods[f"{prefix}{suffix}"] = Method(framework, head)
    return methods


def _for_digits(attack: PGD, step_size: float) -> PGD:
    """CCAT's attack for the digits: ten steps."""
    return replace(attack, ball=_DIGITS_PGD.ball, steps=10, step_size=step_size)


_CCAT_REFERENCE = CCAT(rho=1.0, form="reference", attack=REFERENCE, bn="train")
_RR: dict[str, Head] = {"": NoHead(), "-rr": RR()}
_BASELINES: dict[str, Head] = {"-ebd": EBD(), "-snet": SNet(), "-atro": ATRO(), "-carl": CARL()}
_PAPER_GRID: dict[str, Head] = {  # other settings that the paper tried
    "-ebd-6-0": EBD(m_in=6.0, m_out=0.0),
    "-ebd-swapped": EBD(m_in=-5.0, m_out=-23.0, weight=1.0),  # diverges, as in the paper
    **{
        f"-snet-{weight}-{coverage}": SNet(coverage, float(weight))
        for weight, coverage in product((8, 16, 32), (0.7, 0.8, 0.9))
        if (weight, coverage) != (8, 0.7)
    },
}
_GRID_METHODS = _methods({"pgdat": PGDAT()}, _PAPER_GRID)  # on CIFAR-10 only
_METHODS = {
    "standard": Method(Standard(), NoHead()),
    **_methods({"pgdat": PGDAT()}, _RR | _BASELINES),
    **_methods({"trades": TRADES(), "ccat": CCAT(), "ccat-reference": _CCAT_REFERENCE}, _RR),
}

# a slightly larger radius than that of the evaluation, which helps with so few images
_DIGITS_PGD = replace(linf(Digits(), 10), ball=Linf(0.17))
_DIGITS_FRAMEWORKS: dict[str, Framework] = {
    "standard": Standard(),
    "pgdat": PGDAT(_DIGITS_PGD),
    "trades": TRADES(attack=replace(_DIGITS_PGD, start="near", objective=KL())),
    "ccat": CCAT(attack=_for_digits(OFFICIAL, 0.06)),
    "ccat-reference": replace(_CCAT_REFERENCE, attack=_for_digits(REFERENCE, 0.04)),
}
_DIGITS_METHODS = {
    **_methods(_DIGITS_FRAMEWORKS, _RR | _BASELINES),
    "pgdat-ebd-swapped": Method(_DIGITS_FRAMEWORKS["pgdat"], _PAPER_GRID["-ebd-swapped"]),
}

# CCAT may diverge at a peak of 0.3, and its epochs have two or three times as many forward passes
_DIGITS_SCHEDULES = {"ccat-reference": (0.1, 12), "ccat": (0.1, 18), "": (0.3, 24)}  # peak, epochs

_CIFARS: dict[str, Dataset] = {"cifar10": CIFAR10(), "cifar100": CIFAR100()}
_NETS: dict[str, NetSpec] = {"": ResNet18(), "-wrn": WideResNet()}


def _schedule(name: str) -> tuple[float, int]:
    """Peak learning rate and epochs of a method on the digits, by the longest known prefix."""
    return next(found for prefix, found in _DIGITS_SCHEDULES.items() if name.startswith(prefix))


def _cifar(data: Dataset, net: NetSpec, method: Method) -> Recipe:
    """The paper's schedule of 110 epochs, in bf16 instead of fp32."""
    return _with_selection(Recipe(
        data, net, method, Piecewise(0.1), epochs=110, augment=CropFlip(),
        validation_attack=linf(data, 10), precision="bf16",
    ))  # fmt: skip


def _short(recipe: Recipe) -> Recipe:
    """A third of the epochs at equal robustness, with one cycle and averaged weights."""
    # reference code: every forward pass of the attack updates the running statistics, eleven times
    # a batch, so that the last batch alone makes up two thirds of them; bn="batch" avoids this
    framework = recipe.method.framework.without_stats_updates()
    method = replace(recipe.method, framework=framework)
    # selected on held-out images: a later peak or a longer average lowers clean accuracy
    return replace(recipe, method=method, epochs=36, schedule=OneCycle(0.2, warmup=0.15), ema=0.998)


def _best(recipe: Recipe) -> Recipe:
    """The best settings by TPR-95 accuracy and AUROC under attack so far; not the paper's."""
    return replace(
        _short(recipe), epochs=60, schedule=OneCycle(0.2), ema=0.999,
        awp=0.005, awp_start=0.1,  # gamma of AWP's authors for TRADES, after a warm-up
    )  # fmt: skip


_PAPER: dict[str, Recipe] = {
    f"{name}-{label}{tail}": _cifar(data, net, method)
    for name, data in _CIFARS.items()
    for label, method in (_METHODS | (_GRID_METHODS if name == "cifar10" else {})).items()
    for tail, net in _NETS.items()
}

RECIPES: dict[str, Recipe] = {
    **{
        f"digits-{name}": _digits(method, *_schedule(name))
        for name, method in _DIGITS_METHODS.items()
    },
    **_PAPER,
    **{f"{name}-short": _short(recipe) for name, recipe in _PAPER.items()},
    "cifar10-best": _best(_PAPER["cifar10-trades-rr"]),
}
