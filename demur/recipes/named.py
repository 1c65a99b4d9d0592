"""Named recipes: the embedded digits, the paper's runs on CIFAR-10, and a user's own images.

Other heads, settings, nets and data are changes of these:
recipe("cifar10-pgdat-snet", ["head.weight=16", "net=WideResNet()", "data=CIFAR100()"])
"""

import re
import shlex
from collections.abc import Iterable
from dataclasses import replace

from demur.attacks import KL, PGD
from demur.attacks.balls import Linf
from demur.data import CIFAR10, CropFlip, Digits, OwnImages
from demur.errors import suggestion
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
from demur.methods.frameworks import CCAT_OFFICIAL, CCAT_REFERENCE
from demur.nets import ResNet8, ResNet18
from demur.recipes.training import Recipe, linf

_CCAT_AS_IN_PAPER = CCAT(rho=1.0, form="reference", attack=CCAT_REFERENCE, bn="train")
_FRAMEWORKS: dict[str, Framework] = {
    "standard": Standard(),
    "pgdat": PGDAT(),
    "trades": TRADES(),
    "ccat": CCAT(),
    "ccat-reference": _CCAT_AS_IN_PAPER,
}


def _for_digits(attack: PGD, step_size: float) -> PGD:
    """CCAT's attack for the digits: ten steps."""
    return replace(attack, ball=_DIGITS_PGD.ball, steps=10, step_size=step_size)


# a slightly larger radius than that of the evaluation, which helps with so few images
_DIGITS_PGD = replace(linf(Digits(), 10), ball=Linf(0.17))
_DIGITS_FRAMEWORKS: dict[str, Framework] = {
    "standard": Standard(),
    "pgdat": PGDAT(_DIGITS_PGD),
    "trades": TRADES(attack=replace(_DIGITS_PGD, start="near", objective=KL())),
    "ccat": CCAT(attack=_for_digits(CCAT_OFFICIAL, 0.06)),
    "ccat-reference": replace(_CCAT_AS_IN_PAPER, attack=_for_digits(CCAT_REFERENCE, 0.04)),
}

_HEADS: dict[str, Head] = {
    "": NoHead(), "-rr": RR(), "-ebd": EBD(), "-snet": SNet(), "-atro": ATRO(), "-carl": CARL(),
}  # fmt: skip
_PAIRS = [  # of the paper's Table 2
    ("standard", ""),
    *(("pgdat", suffix) for suffix in _HEADS),
    *((framework, suffix) for framework in ("trades", "ccat", "ccat-reference")
      for suffix in ("", "-rr")),
]  # fmt: skip


def _methods(frameworks: dict[str, Framework]) -> dict[str, Method]:
    """The paper's methods by name, with these frameworks."""
    return {name + suffix: Method(frameworks[name], _HEADS[suffix]) for name, suffix in _PAIRS}


# CCAT may diverge at a peak of 0.3, and its epochs have two or three times as many forward passes
_DIGITS_SCHEDULES = {"ccat-reference": (0.1, 12), "ccat": (0.1, 18), "": (0.3, 24)}  # peak, epochs


def _schedule(name: str) -> tuple[float, int]:
    """Peak learning rate and epochs of a method on the digits, by the longest known prefix."""
    return next(found for prefix, found in _DIGITS_SCHEDULES.items() if name.startswith(prefix))


def _digits(method: Method, peak: float, epochs: int) -> Recipe:
    recipe = Recipe(
        Digits(), ResNet8(), method, OneCycle(peak), epochs, validation_attack=linf(Digits(), 10)
    )
    return _with_selection(recipe)


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


def _best(recipe: Recipe) -> Recipe:
    """The best settings by TPR-95 accuracy and AUROC under attack so far; not the paper's."""
    return replace(
        _short(recipe), epochs=60, schedule=OneCycle(0.2), ema=0.999,
        awp=0.005, awp_start=0.1,  # gamma of AWP's authors for TRADES, after a warm-up
    )  # fmt: skip


def _images(method: Method) -> Recipe:
    """A ResNet-18 on a user's own images; every change of statistics is the loss's own."""
    method = replace(method, framework=method.framework.without_stats_updates())
    return _with_selection(Recipe(
        OwnImages(), ResNet18(), method, OneCycle(0.1), epochs=60, augment=CropFlip(),
        validation_attack=linf(OwnImages(), 10), precision="bf16",
    ))  # fmt: skip


def _small(recipe: Recipe) -> Recipe:
    """A net and batches for a few hundred images on a CPU."""
    return replace(recipe, net=ResNet8(), batch_size=32, epochs=30, precision="fp32")


_IMAGES = {
    f"images-{name}": _images(_methods(_FRAMEWORKS)[name])
    for name in ("standard", "pgdat-rr", "trades-rr")
}
_PAPER = {f"cifar10-{name}": _cifar10(method) for name, method in _methods(_FRAMEWORKS).items()}
RECIPES: dict[str, Recipe] = {
    **{
        f"digits-{name}": _digits(method, *_schedule(name))
        for name, method in _methods(_DIGITS_FRAMEWORKS).items()
    },
    **_PAPER,
    **{f"{name}-short": _short(recipe) for name, recipe in _PAPER.items()},
    "cifar10-best": _best(_PAPER["cifar10-trades-rr"]),
    **_IMAGES,
    "images-pgdat-rr-small": _small(_IMAGES["images-pgdat-rr"]),
}

_CHANGES = (  # parts of a name that no recipe has, and what to type instead
    (r"^cifar100-", "cifar10-", "data=CIFAR100()"),
    (r"-wrn", "", "net=WideResNet()"),
    (r"-snet-(\d+)-(0\.\d)", "-snet", r"head.weight=\1 head.coverage=\2"),
    (r"-ebd-6-0", "-ebd", "head.m_in=6 head.m_out=0"),
    (r"-ebd-swapped", "-ebd", "head.m_in=-5 head.m_out=-23 head.weight=1"),
    *((rf"(?<!pgdat){suffix}", "", f"head={type(head).__name__}()")
      for suffix, head in _HEADS.items() if suffix),
)  # fmt: skip


def spelled_out(name: str) -> list[str]:
    """A recipe and its changes for a name such as cifar10-pgdat-rr-wrn; empty for any other."""
    changes: list[str] = []
    for pattern, shorter, change in _CHANGES:
        found = None if name in RECIPES else re.search(pattern, name)
        if found:
            name = name[: found.start()] + shorter + name[found.end() :]
            changes += found.expand(change).split()
    return [name, *changes] if changes and name in RECIPES else []


def hint_for(name: str, others: Iterable[str] = ()) -> str:
    """End of an error message for an unknown recipe; `others` are more names that are known."""
    words = spelled_out(name)
    return f"write {shlex.join(words)}" if words else suggestion(name, [*RECIPES, *others])
