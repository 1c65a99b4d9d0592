"""The recipes people type: the embedded digits, and the paper's runs on CIFAR."""

from dataclasses import replace

from demur.attacks import KL
from demur.balls import Linf
from demur.data import CIFAR10, CIFAR100, CropFlip, Dataset, Digits
from demur.methods import PGDAT, RR, TRADES, Method, OneCycle, Piecewise, Plain, Standard
from demur.nets import NetSpec, ResNet18, Small, WideResNet
from demur.recipes.training import Recipe
from demur.recipes.usual import linf


def _digits(method: Method) -> Recipe:
    return Recipe(Digits(), Small(), method, OneCycle(0.3), epochs=24, judge=linf(Digits(), 10))


# crafted a little beyond the radius of the attacks to come, which so few images need
_DIGITS_PGD = replace(linf(Digits(), 10), ball=Linf(0.17))
_DIGITS_PGDAT = PGDAT(_DIGITS_PGD)
_DIGITS_TRADES = TRADES(attack=replace(_DIGITS_PGD, start="near", goal=KL()))

_METHODS = {
    "standard": Method(Standard(), Plain()),
    "pgdat": Method(PGDAT(), Plain()),
    "pgdat-rr": Method(PGDAT(), RR()),
    "trades": Method(TRADES(), Plain()),
    "trades-rr": Method(TRADES(), RR()),
}
_CIFARS: dict[str, Dataset] = {"cifar10": CIFAR10(), "cifar100": CIFAR100()}
_NETS: dict[str, NetSpec] = {"": ResNet18(), "-wrn": WideResNet()}


def _cifar(data: Dataset, net: NetSpec, method: Method) -> Recipe:
    """The paper's 110 epochs; bf16 is ours."""
    return Recipe(
        data, net, method, Piecewise(0.1), epochs=110, augment=CropFlip(), judge=linf(data, 10),
        precision="bf16",
    )  # fmt: skip


def _short(recipe: Recipe) -> Recipe:
    """A third of the epochs, for almost the same robustness."""
    # reference code: running statistics move with every look of the attack, eleven times a batch,
    # so that two thirds of what a net is tested with come from the very last batch; not here
    frame = recipe.method.frame
    frame = replace(frame, bn="batch") if isinstance(frame, PGDAT) else frame
    method = replace(recipe.method, frame=frame)
    return replace(recipe, method=method, epochs=36, schedule=OneCycle(0.2))


_PAPER: dict[str, Recipe] = {
    f"{data}-{method}{net}": _cifar(_CIFARS[data], _NETS[net], _METHODS[method])
    for data in _CIFARS
    for method in _METHODS
    for net in _NETS
}

RECIPES: dict[str, Recipe] = {
    "digits-standard": _digits(Method(Standard(), Plain())),
    "digits-pgdat": _digits(Method(_DIGITS_PGDAT, Plain())),
    "digits-pgdat-rr": _digits(Method(_DIGITS_PGDAT, RR())),
    "digits-trades": _digits(Method(_DIGITS_TRADES, Plain())),
    "digits-trades-rr": _digits(Method(_DIGITS_TRADES, RR())),
    **_PAPER,
    **{f"{name}-short": _short(recipe) for name, recipe in _PAPER.items()},
}
