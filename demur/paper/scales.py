"""The scales at which the paper's tables and figures are computed.

    SCALES["smoke"].recipe("pgdat-rr", ("data=CIFAR100()",))     # digits in place of CIFAR-100
    SCALES["short"].choose(("pgd-100:restarts=10", "pgd-100"))   # pgd-100

A scale says which recipe trains a net, how strong an attack is, and on how many test images.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from demur.data import CIFAR10, CIFAR100, Digits
from demur.errors import BadInput, suggestion
from demur.recipes import RECIPES, Recipe, attack, with_changes
from demur.rejectors import LID, Rejector, paper_grid
from demur.spec import Spec, show

# the paper uses no EMA; the stored runs were trained with a longer warm-up
COMPARED_CHANGES = ["ema=0", "schedule.warmup=0.3"]
LARGE_NET, LARGE_DATA = "net=WideResNet()", "data=CIFAR100()"
MOST_SEARCHES = 3  # of C&W at the scale smoke
ALL_IMAGES = 10_000  # test images of CIFAR-10 and CIFAR-100


@dataclass(frozen=True)
class Scale:
    """The paper's own settings; subclasses take less time."""

    name: str = "paper"
    about: str = "CIFAR, 110 epochs, best epoch by PGD-10 on test and the last one, 10,000 images"

    def recipe(self, entry: str, changes: Sequence[str]) -> Recipe | None:
        """The recipe of a net of the paper; None if a change does not apply."""
        try:
            return self._recipe(entry, changes)
        except BadInput:
            return None

    def _recipe(self, entry: str, changes: Sequence[str]) -> Recipe:
        usual = ["selection=test", *(["bn=batch"] if entry.startswith("pgdat") else [])]
        return _on_cifar(RECIPES[f"cifar10-{entry}"], usual, changes)

    def choose(self, attacks: Sequence[str]) -> tuple[str, ...]:
        """The attack to run, of those that may fill a cell; the paper's own is the first."""
        return tuple(attacks[:1])

    def attack_text(self, text: str, recipe: Recipe) -> str:
        """The attack as it is run on a net of this scale."""
        return text

    def images(self, text: str) -> int:
        """The number of test images to attack."""
        return ALL_IMAGES

    def stand_ins(self, changes: Sequence[str]) -> str:
        """What is used in place of the paper's data and net; empty at the other scales."""
        return ""


@dataclass(frozen=True)
class ShortScale(Scale):
    """A third of the epochs, one restart, and fewer images for the longest attacks."""

    name: str = "short"
    about: str = "CIFAR, 36 epochs, last epoch, one restart, 250 to 10,000 images"

    epochs: int = 36

    def _recipe(self, entry: str, changes: Sequence[str]) -> Recipe:
        usual = [*COMPARED_CHANGES, f"epochs={self.epochs}"]
        return _on_cifar(RECIPES[f"cifar10-{entry}-short"], usual, changes)

    def choose(self, attacks: Sequence[str]) -> tuple[str, ...]:
        return tuple(attacks[-1:])

    def images(self, text: str) -> int:
        fewer = {
            "cw": 250, "adaptive": 1000, "autoattack": 1000, "multi-target": 2000, "pgd-1000": 2000
        }  # fmt: skip
        return next((n for name, n in fewer.items() if text.startswith(name)), ALL_IMAGES)


@dataclass(frozen=True)
class SmokeScale(ShortScale):
    """Digits and a small net: every step of the paper's scale in minutes on a CPU."""

    name: str = "smoke"
    about: str = "digits, 5 epochs of a small net, a tenth of the attack steps, 128 images"

    def _recipe(self, entry: str, changes: Sequence[str]) -> Recipe:
        small = ["width=8", "epochs=5", "validation_attack.steps=5", "selection=test"]
        small += [] if entry == "standard" else ["attack.steps=5"]
        replaced = {LARGE_NET: "width=12", LARGE_DATA: "seed=1"}
        mapped = [replaced.get(change, change) for change in changes]
        return with_changes(RECIPES[f"digits-{entry}"], [*small, *mapped])

    def attack_text(self, text: str, recipe: Recipe) -> str:
        """The attack in the digits' ball, with a tenth of the steps, at least ten.

        C&W would take most of the time if it searched its constant nine times, as in the paper.
        """
        unit = recipe.data.threat.linf / 8
        text = re.sub(r"eps=(\d+)/255", lambda found: f"eps={min(1, unit * int(found[1])):g}", text)
        spec, changes = attack(text, recipe), []
        steps, decay = find_field(spec, "steps"), find_field(spec, "decay_steps")
        if steps is not None and steps > 10:
            changes.append(f"steps={max(10, steps // 10)}")
        if decay:
            changes.append(f"decay_steps=({', '.join(str(step // 10) for step in decay)})")
        if (find_field(spec, "searches") or 0) > MOST_SEARCHES:
            changes.append(f"searches={MOST_SEARCHES}")
        if not changes:
            return text
        return text + ("," if ":" in text else ":") + ",".join(changes)

    def images(self, text: str) -> int:
        return 128

    def stand_ins(self, changes: Sequence[str]) -> str:
        data = "CIFAR-100" if LARGE_DATA in changes else "CIFAR-10"
        net = "WRN-34-10" if LARGE_NET in changes else "ResNet-18"
        return f"digits in place of {data}, ResNet-8 in place of {net}"


_BRIEF = ShortScale(
    "brief", "CIFAR, 20 epochs, last epoch, one restart, 250 to 10,000 images", epochs=20
)
SCALES: dict[str, Scale] = {
    scale.name: scale for scale in (SmokeScale(), _BRIEF, ShortScale(), Scale())
}


def scale_by_name(name: str) -> Scale:
    """The scale with this name; raises BadInput if there is none."""
    if name not in SCALES:
        raise BadInput(f"there is no scale {name!r}; {suggestion(name, SCALES)}")
    return SCALES[name]


def settings_grid(recipe: Recipe) -> dict[str, Rejector]:
    """KD and LID at every setting of Tables 9 and 10, by name.

    On the digits k is a tenth of the one in the name, since there are few images.
    """
    if not isinstance(recipe.data, Digits):
        return paper_grid(recipe.data)
    grid = paper_grid(CIFAR10()) | paper_grid(CIFAR100())
    return {
        name: LID(max(2, one.k // 10)) if isinstance(one, LID) else one
        for name, one in grid.items()
    }


def find_field(spec: Spec, name: str) -> Any:
    """The value of a field of a spec or of the specs inside it; None if there is none."""
    for key, value in vars(spec).items():
        if key == name:
            return value
        if isinstance(value, Spec) and (found := find_field(value, name)) is not None:
            return found
    return None


def _on_cifar(base: Recipe, usual: Sequence[str], changes: Sequence[str]) -> Recipe:
    """The recipe on all training images of CIFAR-10 or CIFAR-100."""
    if LARGE_DATA not in changes:
        return with_changes(base, ["data.split=paper", *usual, *changes])
    data = show(CIFAR100(split="paper"))
    return with_changes(base, [*usual, *(c.replace("CIFAR100()", data) for c in changes)])
