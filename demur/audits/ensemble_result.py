"""The result of an attack ensemble and its verdict: counts with intervals, per image, as a table.

The verdict is one of three grades with a fixed meaning, and its reasons. docs/guides/audit.md has
the definitions, word by word.
"""

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from demur.metrics import Interval, wilson
from demur.sanity import Flag
from demur.sanity.evidence import MIN_IMAGES, MIN_LEFT, CheckResult, Grade, Verdict, too_many

KINDS_OF_ATTACK = {  # beginnings of the names of members, and what is not tried without them
    ("fab", "closest"): "FAB",
    ("square",): "Square",
    ("rays", "hopskipjump"): "attacks by decisions",
    ("transfer", "surrogate"): "attacks by transfer",
}
FLAT_SCORE = "the score has no gradient"  # beginning of a warning
FAST_TITLES = {  # beginnings of the titles of version="fast"
    "a part of AutoAttack": "AutoAttack", "RejectAutoAttack (fast)": "RejectAutoAttack",
}  # fmt: skip


def verdict_of(
    results: Sequence[Any], checks: Sequence[CheckResult], warnings: Sequence[str],
    claim: float | None = None,
) -> Verdict:  # fmt: skip
    """Return the verdict on EnsembleResults, the last of which is the one a claim is about."""
    flags, n = [flag for check in checks for flag in check.flags], len(results[-1].broken_by)
    if n < MIN_IMAGES:
        few = f"{n} images are too few to show a sign; attack at least {MIN_IMAGES}"
        warnings = [*warnings, few]
    if found := _refuted(results, claim):
        besides = [*dict.fromkeys(flag.kind for flag in flags), *warnings]
        more = [f"Besides: {', '.join(besides)}."] if besides else []
        return Verdict(Grade.BROKEN, (*found, *more))
    tried = f"Not tried: {', '.join(not_tried(results))}."
    if flags or warnings:
        signs = [f"{flag.kind}: {flag.observed} Remedy: {flag.remedy}" for flag in flags]
        signs += [f"{sentence[0].upper()}{sentence[1:]}." for sentence in warnings]
        return Verdict(Grade.SUSPICIOUS, (*signs, tried))
    skipped = [check.kind for check in checks if check.missing]
    count = len(checks) - len(skipped)
    made = f"{count} checks found nothing" if count else "No check was made"
    reasons = [f"{made} on {n} images.", tried]
    reasons += [f"Not checked: {', '.join(dict.fromkeys(skipped))}."] if skipped else []
    return Verdict(Grade.NO_SIGN, tuple(reasons))


def _refuted(results: Sequence[Any], claim: float | None) -> list[str]:
    """Return a sentence for each way in which what was found refutes the robustness."""
    last, sentences = results[-1], []
    n, left = len(last.broken_by), last.left
    low, high = wilson(left, n)
    if claim is not None and high < claim:
        sentences.append(
            f"The claim is {claim:.1%}, and the attacks leave {left:g} of {n} images, "
            f"{left / n:.1%} [{100 * low:.1f}, {100 * high:.1f}]."
        )
    for result in results:
        count, of = result.masked
        if of and too_many(count, of):
            sentences.append(
                f"Attacks without gradients broke {count} of {of} images that every gradient "
                "attack left, so a figure by gradients is false."
            )
    right = n - (last.clean.accepted_wrong if last.passes > 1 else last.broken_by.count(CLEAN))
    if last.seeks_errors and right and left <= MIN_LEFT * right:
        what = f"that are {'without an accepted error' if last.rejects else 'right'}"
        sentences.append(f"Of {right:g} images {what} without an attack, {left:g} are left.")
    return sentences


def not_tried(results: Sequence[Any]) -> list[str]:
    """Return what no attack of the evaluation did."""
    names = [name for result in results for name in result.seconds]
    kinds = KINDS_OF_ATTACK.items()
    missing = [kind for begins, kind in kinds if not any(n.startswith(begins) for n in names)]
    if not any(member.uses_gradient for result in results for member in result.members):
        missing.insert(0, "attacks by gradients")
    elif any(said.startswith(FLAT_SCORE) for result in results for said in result.warnings):
        missing.insert(0, "attacks by the gradient of the score")
    for title, whole in FAST_TITLES.items():
        if any(result.attack.startswith(title) for result in results):
            missing.append(f"the rest of {whole} (version='standard')")
    return [*missing, "other norms and radii", "an attack written for this model"]


WIDTH = 80  # columns of the printed table
CLEAN = "clean"  # in `broken_by`: no attack was needed
KINDS = ("accepted_right", "accepted_wrong", "rejected")
SUMMED = ("seconds", "attacked", "broke")  # fields of a Member, over parts of the images
PER_IMAGE = (
    "x_adv", "y", "labels", "accepted", "clean_labels", "clean_accepted", "kinds", "clean_kinds",
)  # fmt: skip


class Counts(NamedTuple):
    """Images by decision. A classifier without a rejector accepts every image.

    For a randomised model they are means over several passes, and no integers.
    """

    accepted_right: float
    accepted_wrong: float
    rejected: float

    @property
    def n(self) -> int:
        return round(sum(self))

    def share(self, kind: str) -> float:
        """Share of the images of one kind: accepted_right, accepted_wrong or rejected."""
        return float(getattr(self, kind)) / self.n

    def interval(self, kind: str) -> Interval:
        """Wilson interval of that share, at 95%, without the spread of a model's draws."""
        return wilson(getattr(self, kind), self.n)

    def to_json(self) -> dict[str, Any]:
        return {
            kind: {"count": count, "share": self.share(kind), "interval": [*self.interval(kind)]}
            for kind, count in self._asdict().items()
        }


class Member(NamedTuple):
    """One attack of an ensemble, with its budget for each image and what it did."""

    name: str
    attack: str  # its settings, as text
    uses_gradient: bool  # of the model itself
    gradient_queries: float  # of each image at most; towards one class for a targeted attack
    forward_queries: int  # of each image at most, for an attack without gradients
    seconds: float
    attacked: int  # images
    broke: int  # images


@dataclass(frozen=True, eq=False)
class EnsembleResult:
    """What an attack ensemble found on N images.

    Attributes:
        attack: The name of the ensemble, with norm and radius.
        rejects: Whether the model has a rejector. Otherwise it accepts every image.
        x_adv: Adversarial examples, N, C, H, W.
        y: True labels, N.
        labels: Predictions for `x_adv`, N; the most frequent ones if there are several passes.
        accepted: Whether `x_adv` is accepted, N, bool; in at least half of the passes.
        clean_labels: Predictions for the clean images, N.
        clean_accepted: Whether the clean images are accepted, N, bool.
        broken_by: For each image the attack that succeeded: a name of `seconds`, "clean" if none
            was needed, or "" if the image is robust.
        seconds: Wall time of each attack, by name.
        sanity: Results of the sanity checks; empty if they were turned off.
        warnings: Sentences about the model, the rejector and the attacks.
        members: The attacks with their budgets, in the order in which they ran.
        unconfirmed: Images that an attack broke and that a final pass finds unbroken.
        seeks_errors: Whether an attack succeeds by an error, and not by a rejection.
        passes: Forward passes that decide on each image; more than one for a randomised model.
        kinds: The passes on `x_adv` by decision, N, 3; empty for one pass.
        clean_kinds: The same for the clean images.

    Example:
        >>> import torch
        >>> from demur import AutoAttack
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> attack = AutoAttack(model, version="custom", attacks_to_run=["apgd-ce"], verbose=False)
        >>> result = attack.evaluate(torch.rand(4, 1, 8, 8), torch.arange(4), sanity=False)
        >>> result.attacked.n
        4
    """

    attack: str
    rejects: bool
    x_adv: Tensor
    y: Tensor
    labels: Tensor
    accepted: Tensor
    clean_labels: Tensor
    clean_accepted: Tensor
    broken_by: tuple[str, ...]
    seconds: Mapping[str, float]
    sanity: tuple[CheckResult, ...] = ()
    warnings: tuple[str, ...] = ()
    members: tuple[Member, ...] = ()
    unconfirmed: int = 0
    seeks_errors: bool = True
    passes: int = 1
    kinds: Tensor = torch.empty(0, 3)
    clean_kinds: Tensor = torch.empty(0, 3)

    @property
    def clean(self) -> Counts:
        """Images by decision without an attack; the mean over passes of a randomised model."""
        return self._counts(self.clean_labels, self.clean_accepted, self.clean_kinds)

    @property
    def attacked(self) -> Counts:
        """Images by decision under the attack; the mean over passes of a randomised model.

        These passes are not those that chose the adversarial examples.
        """
        return self._counts(self.labels, self.accepted, self.kinds)

    @property
    def majority(self) -> Counts:
        """Images under the attack by the majority vote of the passes."""
        return self._counts(self.labels, self.accepted)

    def _counts(self, labels: Tensor, accepted: Tensor, kinds: Tensor | None = None) -> Counts:
        if kinds is not None and self.passes > 1:
            return Counts(*(int(total) / self.passes for total in kinds.sum(0)))
        right = labels == self.y
        decisions = (accepted & right, accepted & ~right, ~accepted)
        return Counts(*(int(decided.sum()) for decided in decisions))

    @property
    def passes_note(self) -> str:
        """What the figures of a randomised model mean, in one sentence; "" for one pass."""
        if self.passes == 1:
            return ""
        kind, name = ("accepted_wrong", "accepted errors") if self.rejects else (KINDS[0], "right")
        never = int((self.kinds[:, 1] == 0).sum())
        return (
            f"the model is randomised: figures are means over {self.passes} passes; "
            f"by majority vote {getattr(self.majority, kind)} of {len(self.y)} are {name}, and "
            f"{never} are in no pass {'an accepted error' if self.rejects else 'wrong'}"
        )

    @property
    def unbroken(self) -> int:
        """Images on which no attack succeeded; with version="rand" in more than half of the passes.

        Other versions count one lucky pass of a randomised model as a success.
        """
        return self.broken_by.count("")

    @property
    def left(self) -> float:
        """Images that the attacks left; for a randomised model the mean over passes."""
        if self.passes == 1:
            return self.unbroken
        return self.attacked.n - self.attacked.accepted_wrong

    @property
    def masked(self) -> tuple[int, int]:
        """Images that only attacks without gradients broke, of those that gradient attacks left."""
        first = next((i for i, one in enumerate(self.members) if one.uses_gradient), None)
        later = self.members[first:] if first is not None else ()
        count = sum(one.broke for one in later if not one.uses_gradient)
        return count, count + self.unbroken

    @property
    def flags(self) -> list[Flag]:
        """Flags of the checks: signs that the figures overstate robustness."""
        return [flag for check in self.sanity for flag in check.flags]

    @property
    def grade(self) -> Grade:
        return self.verdict.grade

    @property
    def verdict(self) -> Verdict:
        """The grade and its reasons; docs/guides/audit.md defines the grades."""
        return verdict_of([self], self.sanity, self.warnings)

    def to_numpy(self) -> NDArray[np.void]:
        """Return one row per image, as a structured array."""
        columns = {
            "y": self.y, "clean_label": self.clean_labels, "clean_accepted": self.clean_accepted,
            "label": self.labels, "accepted": self.accepted,
        }  # fmt: skip
        arrays = {name: column.cpu().numpy() for name, column in columns.items()}
        arrays["broken_by"] = np.array(self.broken_by)
        if self.passes > 1:
            shares = (self.kinds.cpu().numpy() / self.passes).T
            arrays |= {f"{kind}_share": share for kind, share in zip(KINDS, shares, strict=True)}
        dtype = np.dtype([(name, array.dtype) for name, array in arrays.items()])
        return np.rec.fromarrays([*arrays.values()], dtype)

    def to_json(self) -> dict[str, Any]:
        """Return everything except the images as JSON values."""
        return {
            "attack": self.attack, "n": len(self.y), "rejects": self.rejects,
            **self.verdict.to_json(), "clean": self.clean.to_json(),
            "attacked": self.attacked.to_json(), "passes": self.passes,
            "majority": self.majority.to_json(), "unbroken": self.unbroken,
            "unconfirmed": self.unconfirmed,
            "members": [member._asdict() for member in self.members],
            "broken_by": list(self.broken_by), "seconds": dict(self.seconds),
            "sanity": sanity_json(self.sanity), "warnings": list(self.warnings),
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [f"{self.attack}, {len(self.y)} images", f"{'':16}{'clean':<29}attacked"]
        for kind in KINDS if self.rejects else KINDS[:2]:
            name = kind.replace("_", " ") if self.rejects else kind.removeprefix("accepted_")
            cells = (count_cell(counts, kind) for counts in (self.clean, self.attacked))
            lines.append("".join((f"{name:<16}", *(f"{cell:<29}" for cell in cells))).rstrip())
        lines += entry("passes", self.passes_note)
        found = Counter(self.broken_by)
        names = [name for name in (CLEAN, *self.seconds) if found[name]]
        broken = ", ".join(f"{name} {found[name]}" for name in names) or "none"
        lines += entry("broken by", f"{broken}; {self.unbroken} unbroken")
        lines += entry("seconds", ", ".join(f"{k} {v:.1f}" for k, v in self.seconds.items()))
        return "\n".join([*lines, *closing_lines(self.sanity, self.warnings, self.verdict)])

    def __repr__(self) -> str:
        return f"<EnsembleResult: {self.attack}, {len(self.y)} images, {self.attacked}>"


def joined(parts: Sequence[EnsembleResult]) -> EnsembleResult:
    """Return the result on all images from those on parts of them, without attacks that never ran.

    The sanity checks are those of the first part.
    """
    members = [
        one[0]._replace(**{name: sum(getattr(m, name) for m in one) for name in SUMMED})
        for one in zip(*(part.members for part in parts), strict=True)
        if any(one[0].name in part.seconds for part in parts)
    ]
    tensors: Any = {name: torch.cat([getattr(one, name) for one in parts]) for name in PER_IMAGE}
    return replace(
        parts[0], members=tuple(members), seconds={one.name: one.seconds for one in members},
        broken_by=tuple(name for part in parts for name in part.broken_by),
        warnings=tuple(dict.fromkeys(sentence for part in parts for sentence in part.warnings)),
        unconfirmed=sum(part.unconfirmed for part in parts), **tensors,
    )  # fmt: skip


def count_cell(counts: Counts, kind: str) -> str:
    """Return a count, its share and its interval: "12   6.0% [3.5, 10.2]"."""
    low, high = counts.interval(kind)
    share = f"{100 * counts.share(kind):.1f}% [{100 * low:.1f}, {100 * high:.1f}]"
    return f"{round(getattr(counts, kind), 1):>5}  {share}"


def closing_lines(
    checks: Sequence[CheckResult], warnings: Sequence[str], verdict: Verdict
) -> Iterator[str]:
    """Yield lines about flags, the number of passed checks, missing ones, warnings, the verdict."""
    flags = [flag for check in checks for flag in check.flags]
    for flag in flags:
        yield from entry("flag", f"{flag.kind}: {flag.observed}")
    passed = sum(not check.flags and not check.missing for check in checks)
    count = "1 flag" if len(flags) == 1 else f"{len(flags)} flags"
    if checks:
        yield from entry("sanity", f"{count}; {passed} of {len(checks)} checks passed")
    for check in checks:
        if check.missing:
            yield from entry("not checked", f"{check.kind}, which needs {check.missing}")
    for sentence in warnings:
        yield from entry("warning", sentence)
    yield from entry("verdict", str(verdict))


def entry(name: str, text: str) -> list[str]:
    """Return a name and a text in lines of at most WIDTH columns; none if the text is empty."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"{name:<16}", subsequent_indent=" " * 16,
        break_long_words=True, break_on_hyphens=False,
    )  # fmt: skip


def sanity_json(checks: Sequence[CheckResult]) -> list[dict[str, Any]]:
    """Return the results of checks as JSON values."""
    return [
        {"check": one.kind, "flags": [flag.to_json() for flag in one.flags], "missing": one.missing}
        for one in checks
    ]
