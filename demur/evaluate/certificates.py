"""Promises a run has made about one rejector each, and what became of them on every record.

    made = issue(source, "R-Con", Risk(0.05))            # on clean cal images, and nothing else
    retested(made, score, record)                        # observed beside promised

A certificate made on attacked images is valid for that attack at that radius only.
"""

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from demur.attacks import Attack, Clean
from demur.calibrate import Certificate, Promise, certify, lower_bound, upper_bound
from demur.errors import BadInput, suggestion
from demur.evaluate.attack import Order, Source, attacked
from demur.evaluate.binding import Binding, bind
from demur.evaluate.plain import plain
from demur.evaluate.values import Kept, accepted, can_score, values
from demur.metrics import Interval
from demur.rule import Rejector, Rule, Score
from demur.runs import Record, Run, provenance
from demur.runs.files import write_story
from demur.runs.record import identity
from demur.runs.story import told_in
from demur.spec import digest, show

MEND = "delete it and make it again with demur calibrate"
Word = Literal["kept", "within chance", "broken", "nothing accepted"]


@dataclass(frozen=True)
class Issued:
    """A certificate with all that it rests on."""

    story: dict[str, Any]

    @property
    def rejector(self) -> str:
        """The rejector's name among those of the recipe."""
        return str(self.story["rejector"])

    @property
    def thresholds(self) -> tuple[float, ...]:
        """Of each of its scores."""
        return tuple(float(t) for t in self.story["thresholds"])

    def covers(self, record: Record) -> bool:
        """Whether a record shows images of the kind that was calibrated on."""
        return bool(record.about["attack"] == self.story["attack"])

    def rule(self, score: Score) -> Rule:
        """The rule that was certified."""
        parts = [part for part, _ in score.rule(0.0).pairs]
        return Rule(tuple(zip(parts, self.thresholds, strict=True)))


@dataclass(frozen=True)
class Retest:
    """What one record shows of a promise."""

    certificate: str
    attack: str
    covered: bool  # whether the promise was made for such images
    about: str
    level: float
    observed: float | None  # None where nothing is accepted
    interval: Interval
    hits: int
    trials: int
    coverage: float
    word: Word

    def plain(self) -> dict[str, Any]:
        """The retest as JSON values."""
        told: dict[str, Any] = plain(self)
        return told


def issue(
    source: Source,
    name: str,
    promise: Promise,
    confidence: float | None = None,
    label: str = "clean",
    attack: Attack = Clean(),
) -> Issued:
    """The certificate of a rejector on the run's cal images, kept in its folder."""
    run = source.run
    rejector = _named(run.recipe.rejectors(), name)
    cal = source.clean("cal") if isinstance(attack, Clean) else _attacked_cal(source, label, attack)
    binding = Binding(source.clean, source.device)
    text = show(rejector, full=True)
    score = Kept(text) if text in cal.kept else binding.bound(rejector)
    parts = [part for part, _ in score.rule(0.0).pairs]
    columns = np.stack([values(part, cal) for part in parts], axis=1)
    found = certify(columns, cal.correct, promise, confidence)
    made = Issued(_story(source, name, rejector, found, cal, binding))
    with run.writing():
        return _kept(_path(run, made), made)


def _kept(path: Path, made: Issued) -> Issued:
    """The certificate in its file; one that is there and says otherwise is not written over."""
    if not path.exists():
        write_story(path, made.story)
        return made
    there = Issued(told_in(path, MEND))
    if there.thresholds != made.thresholds:
        raise BadInput(f"{path} promises the same with other thresholds; delete it to make another")
    return there


def issued(run: Run) -> list[Issued]:
    """Every certificate of these weights, by rejector and promise."""
    found = [Issued(told_in(path, MEND)) for path in (run.path / "certificates").glob("*.json")]
    weights = run.chosen["weights"]
    mine = [made for made in found if made.story["weights"] == weights]
    return sorted(mine, key=lambda made: (made.rejector, made.story["promise"], made.story["on"]))


def retested(made: Issued, score: Score, record: Record) -> Retest:
    """What a record shows of a promise, with an exact 95% interval."""
    taken, correct = accepted(made.rule(score), record), record.correct
    about = made.story["about"]
    within = {"risk": taken, "tpr": correct, "coverage": np.ones_like(taken)}[about]
    counted = ~correct if about == "risk" else taken
    hits, trials = int((counted & within).sum()), int(within.sum())
    level, ceiling = float(made.story["level"]), about == "risk"
    interval = Interval(
        float(lower_bound(hits, trials, 0.025)), float(upper_bound(hits, trials, 0.025))
    )
    observed = hits / trials if trials else None
    return Retest(
        str(made.story["sentence"]), record.label, made.covers(record), about, level, observed,
        interval, hits, trials, float(taken.mean()), _word(observed, interval, level, ceiling),
    )  # fmt: skip


def retests(
    source: Source, scores: dict[str, Score], records: list[Record]
) -> list[tuple[Issued, list[Retest]]]:
    """All certificates on all records that can show them, clean images first.

    A certificate whose rejector is not among the scores, or means something else by now, shows no
    record.
    """
    unseen = [record for record in records if record.about["split"] != "cal"]
    ordered = sorted(unseen, key=lambda record: record.about["attack"] != digest(Clean()))
    today = {name: show(r, full=True) for name, r in source.run.recipe.rejectors().items()}
    tested = []
    for made in issued(source.run):
        lines: list[Retest] = []
        score = scores.get(made.rejector)
        if score is not None and today.get(made.rejector) == made.story["rejector_spec"]:
            lines = [retested(made, score, r) for r in ordered if can_score(score, r)]
        tested.append((made, lines))
    return tested


def _word(observed: float | None, interval: Interval, level: float, ceiling: bool) -> Word:
    if observed is None:
        return "nothing accepted"
    if observed <= level if ceiling else observed >= level:
        return "kept"
    return (
        "broken" if (interval.lo > level if ceiling else interval.hi < level) else "within chance"
    )


def _named(rejectors: dict[str, Rejector], name: str) -> Rejector:
    if name not in rejectors:
        raise BadInput(f"no rejector is called {name!r}; {suggestion(name, rejectors)}")
    return rejectors[name]


def _attacked_cal(source: Source, label: str, attack: Attack) -> Record:
    if bind(attack, source.clean).thresholds:
        raise BadInput(
            f"{label} has a threshold of its own that was chosen on the cal images, so these "
            "cannot test a promise under it; calibrate under an attack without one"
        )
    return attacked(source, label, attack, Order("cal", keep_images=0))


def _story(
    source: Source, name: str, rejector: Rejector, found: Certificate, cal: Record, binding: Binding
) -> dict[str, Any]:
    """All that a certificate rests on."""
    clean = cal.about["attack"] == digest(Clean())
    attacked_by = f"images attacked by {cal.about['spec']} and no others"
    only = "images as they are, drawn like these" if clean else attacked_by
    told: dict[str, Any] = json.loads(json.dumps(found.plain()))
    return told | {
        "rejector": name,
        "rejector_spec": show(rejector, full=True),
        "about": found.promise.about,
        "level": found.promise.level,
        "on": cal.label,
        "attack": cal.about["attack"],
        "attack_spec": cal.about["spec"],
        "valid_for": only,
        "split": "cal",
        "cal_record": cal.digest,
        "cal_images": len(cal.y),
        "data": cal.about["data"],
        "fitted": binding.fitted,
        "weights": source.run.chosen["weights"],
        "recipe_digest": digest(source.run.recipe),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        **provenance(source.device),
    }


def _path(run: Run, made: Issued) -> Path:
    """One file a rejector, promise, confidence and kind of image."""
    told = made.story
    parts = (told["rejector"], told["promise"], f"{told['confidence']:g}", told["on"])
    name = re.sub(r"[^A-Za-z0-9.]+", "-", "_".join(parts)).strip("-")[:100]
    exact = (told["rejector_spec"], told["attack"], told["cal_record"], *parts)
    apart = identity(parts=exact)[:6]
    return run.path / "certificates" / f"{name}-{apart}.json"
