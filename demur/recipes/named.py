"""The recipes people type: the embedded digits, and the paper's runs on CIFAR."""

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
from demur.nets import NetSpec, ResNet18, Small, WideResNet
from demur.recipes.threats import linf
from demur.recipes.training import Recipe


def _digits(method: Method) -> Recipe:
    framework = method.framework
    peak = 0.1 if isinstance(framework, CCAT) else 0.3  # at which CCAT may not settle
    # an epoch of CCAT looks at each image two or three times as often
    epochs = (
        {"official": 18, "reference": 12}[framework.form] if isinstance(framework, CCAT) else 24
    )
    made = Recipe(
        Digits(), Small(), method, OneCycle(peak), epochs, validation_attack=linf(Digits(), 10)
    )
    return _chosen(made)


def _chosen(recipe: Recipe) -> Recipe:
    """The recipe as it is; with CCAT the last epoch, since the judge is after wrong answers alone.

    CCAT gives them with little confidence.
    """
    return (
        replace(recipe, selection="last") if isinstance(recipe.method.framework, CCAT) else recipe
    )


def _methods(frameworks: dict[str, Framework], heads: dict[str, Head]) -> dict[str, Method]:
    """Each frame with each head that it goes with."""
    made = {}
    for (first, framework), (last, head) in product(frameworks.items(), heads.items()):
        with suppress(BadInput):
            made[f"{first}{last}"] = Method(framework, head)
    return made


def _few(attack: PGD, step: float) -> PGD:
    """CCAT's attack for the digits: ten steps."""
    return replace(attack, ball=_DIGITS_PGD.ball, steps=10, step_size=step)


_REFERENCE = CCAT(rho=1.0, form="reference", attack=REFERENCE, bn="train")
_RR: dict[str, Head] = {"": NoHead(), "-rr": RR()}
_BASELINES: dict[str, Head] = {"-ebd": EBD(), "-snet": SNet(), "-atro": ATRO(), "-carl": CARL()}
_TRIED: dict[str, Head] = {  # by the paper, beside its choice
    "-ebd-6-0": EBD(m_in=6.0, m_out=0.0),
    "-ebd-swapped": EBD(m_in=-5.0, m_out=-23.0, weight=1.0),  # runs away, as in the paper
    **{
        f"-snet-{weight}-{coverage}": SNet(coverage, float(weight))
        for weight, coverage in product((8, 16, 32), (0.7, 0.8, 0.9))
        if (weight, coverage) != (8, 0.7)
    },
}
_GRID = _methods({"pgdat": PGDAT()}, _TRIED)  # on CIFAR-10 alone
_METHODS = {
    "standard": Method(Standard(), NoHead()),
    **_methods({"pgdat": PGDAT()}, _RR | _BASELINES),
    **_methods({"trades": TRADES(), "ccat": CCAT(), "ccat-reference": _REFERENCE}, _RR),
}

# crafted a little beyond the radius of the attacks to come, which so few images need
_DIGITS_PGD = replace(linf(Digits(), 10), ball=Linf(0.17))
_DIGITS_FRAMES: dict[str, Framework] = {
    "standard": Standard(),
    "pgdat": PGDAT(_DIGITS_PGD),
    "trades": TRADES(attack=replace(_DIGITS_PGD, start="near", objective=KL())),
    "ccat": CCAT(attack=_few(OFFICIAL, 0.06)),
    "ccat-reference": replace(_REFERENCE, attack=_few(REFERENCE, 0.04)),
}
_DIGITS_METHODS = {
    **_methods(_DIGITS_FRAMES, _RR | _BASELINES),
    "pgdat-ebd-swapped": Method(_DIGITS_FRAMES["pgdat"], _TRIED["-ebd-swapped"]),
}

_CIFARS: dict[str, Dataset] = {"cifar10": CIFAR10(), "cifar100": CIFAR100()}
_NETS: dict[str, NetSpec] = {"": ResNet18(), "-wrn": WideResNet()}


def _cifar(data: Dataset, net: NetSpec, method: Method) -> Recipe:
    """The paper's 110 epochs; bf16 is ours."""
    return _chosen(Recipe(
        data, net, method, Piecewise(0.1), epochs=110, augment=CropFlip(), validation_attack=linf(data, 10),
        precision="bf16",
    ))  # fmt: skip


def _short(recipe: Recipe) -> Recipe:
    """A third of the epochs, for as much robustness: what a shorter run lacks averaging gives."""
    # reference code: running statistics move with every look of the attack, eleven times a batch,
    # so that two thirds of what a net is tested with come from the very last batch; not here
    framework = recipe.method.framework
    if isinstance(framework, PGDAT | CCAT) and framework.bn == "train":
        framework = replace(framework, bn="batch")
    method = replace(recipe.method, framework=framework)
    # chosen on held-out images: later peaks and longer averages cost clean accuracy
    return replace(recipe, method=method, epochs=36, schedule=OneCycle(0.2, warmup=0.15), ema=0.998)


def _best(recipe: Recipe) -> Recipe:
    """The best by TPR-95 accuracy and AUROC under attack so far: not the paper's."""
    return replace(
        _short(recipe), epochs=60, schedule=OneCycle(0.2), ema=0.999,
        awp=0.005, awp_start=0.1,  # as by AWP's authors for TRADES, after some warming up
    )  # fmt: skip


_PAPER: dict[str, Recipe] = {
    f"{name}-{label}{tail}": _cifar(data, net, method)
    for name, data in _CIFARS.items()
    for label, method in (_METHODS | (_GRID if name == "cifar10" else {})).items()
    for tail, net in _NETS.items()
}

RECIPES: dict[str, Recipe] = {
    **{f"digits-{name}": _digits(method) for name, method in _DIGITS_METHODS.items()},
    **_PAPER,
    **{f"{name}-short": _short(recipe) for name, recipe in _PAPER.items()},
    "cifar10-best": _best(_PAPER["cifar10-trades-rr"]),
}
