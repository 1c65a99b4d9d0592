"""How far an image must be moved until it is broken, read off records of C&W.

    found = judged(record, attack, source.clean, right_before)
    distances([found], recipe.rejectors())      # the mean over what was broken, and how much was

normal: the answer is wrong. adaptive: it is wrong and the score reaches the median of the right
answers among clean training images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from demur import metrics
from demur.attacks import CW, Attack
from demur.attacks.criteria import RuleCriterion
from demur.errors import BadInput
from demur.evaluate.as_json import plain
from demur.evaluate.binding import CleanRecord, bind_thresholds
from demur.metrics import BoolArray, FloatArray, Interval
from demur.recipes import Recipe
from demur.recipes import attack as attack_named
from demur.rejectors import Rejector
from demur.runs import Record

NORMAL = "normal"
Norm = Literal["L2", "Linf", "Linf-adam"]


@dataclass(frozen=True)
class Distances:
    """What one attack of least change found on one record.

    Squared for L2, times 255 for Linf. None: there is no image to take the mean of.
    """

    attack: str
    norm: Norm
    rejector_name: str  # the rejector that has to accept, or normal
    threshold: float | None
    n: int
    broken: float  # share of all images, those broken as they came too
    broken_interval: Interval
    as_they_came: float  # share of all images that no change was needed for
    mean: float | None  # over the images that a change broke
    mean_interval: Interval | None
    median: float | None
    paper_mean: float  # over all images; failures and those wrong as they came count as 0
    beyond_normal: float | None  # mean over normal's, on the images that both broke
    record: str

    def plain(self) -> dict[str, Any]:
        """The line as JSON values."""
        line: dict[str, Any] = plain(self)
        return line


@dataclass(frozen=True)
class DistortionVerdicts:
    """One record with the criterion's verdict and the distance of each image."""

    record: Record
    attack: CW
    threshold: float | None
    broken: BoolArray
    distance: FloatArray
    right_before: BoolArray  # answered rightly as they came

    @property
    def moved(self) -> BoolArray:
        """Which images a change broke."""
        return self.broken & (self.distance > 0)


def usual(recipe: Recipe) -> list[str]:
    """The paper's table: both norms, normal and adaptive for confidence and the head's own."""
    name, _ = recipe.head_rejector
    on_confidence = [] if name == "Con" else [":rejector=Con()"]
    return [
        label
        for norm in ("", "-linf")
        for label in (f"cw{norm}", *(f"cw-adaptive{norm}{c}" for c in (*on_confidence, "")))
    ]


def distortion_attack(text: str, recipe: Recipe) -> CW:
    """The attack that a text names, or BadInput where it does not look for the least change."""
    found: Attack = attack_named(text, recipe)
    if not isinstance(found, CW):
        raise BadInput(f"{text} does not look for the least change; use cw, cw-linf, cw-adaptive")
    return found


def judged(
    record: Record, attack: CW, clean: CleanRecord, right_before: BoolArray
) -> DistortionVerdicts:
    """Which images of a record are broken, and how far each was moved."""
    bound = bind_thresholds(attack, clean).spec
    broken = bound.criterion(record.output, record.y).numpy()
    at = bound.criterion.threshold if isinstance(bound.criterion, RuleCriterion) else None
    t = at if isinstance(at, float) else None
    return DistortionVerdicts(record, attack, t, broken, _distance(record, attack), right_before)


def distances(
    found: Sequence[DistortionVerdicts], rejectors: Mapping[str, Rejector]
) -> list[Distances]:
    """A line for each attack, beside the normal attack in the same norm where there is one."""
    normal = {each.attack.norm: each for each in reversed(found) if not _ruled(each.attack)}
    return [_line(each, normal.get(each.attack.norm), rejectors) for each in found]


def _line(
    one: DistortionVerdicts, normal: DistortionVerdicts | None, rejectors: Mapping[str, Rejector]
) -> Distances:
    far = one.distance[one.moved]
    return Distances(
        attack=one.record.label,
        norm=one.attack.norm,
        rejector_name=_against(one.attack, rejectors),
        threshold=one.threshold,
        n=len(one.broken),
        broken=float(one.broken.mean()),
        broken_interval=metrics.wilson(int(one.broken.sum()), len(one.broken)),
        as_they_came=float((one.broken & ~one.moved).mean()),
        mean=float(far.mean()) if len(far) else None,
        mean_interval=metrics.bootstrap(lambda part: float(part.mean()), far) if len(far) else None,
        median=float(np.median(far)) if len(far) else None,
        paper_mean=float(np.where(one.moved & one.right_before, one.distance, 0.0).mean()),
        beyond_normal=_ratio(one, normal) if normal and _ruled(one.attack) else None,
        record=one.record.digest,
    )


def _ratio(one: DistortionVerdicts, other: DistortionVerdicts) -> float | None:
    """How many times further one had to go, on the images that a change broke in both."""
    both = one.moved & other.moved
    return float(one.distance[both].mean() / other.distance[both].mean()) if both.any() else None


def _distance(record: Record, attack: CW) -> FloatArray:
    """The distance of each image as papers report it."""
    sizes = record.arrays["size_l2" if attack.norm == "L2" else "size_linf"].double().numpy()
    found: FloatArray = sizes**2 if attack.norm == "L2" else 255 * sizes
    return found


def _ruled(attack: CW) -> bool:
    return isinstance(attack.criterion, RuleCriterion)


def _against(attack: CW, rejectors: Mapping[str, Rejector]) -> str:
    """The name of the rejector that has to accept."""
    criterion = attack.criterion
    if not isinstance(criterion, RuleCriterion):
        return NORMAL
    known = (name for name, rejector in rejectors.items() if rejector == criterion.rejector)
    return next(known, str(criterion.rejector))
