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
from demur.calibrate import Certificate, Guarantee, certify, lower_bound, upper_bound
from demur.errors import BadInput, suggestion
from demur.evaluate.as_json import plain
from demur.evaluate.attack import AttackOptions, Evaluator, run_attack
from demur.evaluate.binding import Binding, bind_thresholds
from demur.evaluate.record_scores import StoredScore, accepted, can_score, values
from demur.metrics import Interval
from demur.rule import Rejector, Rule, Score
from demur.runs import Record, Run, provenance
from demur.runs.files import write_json
from demur.runs.metadata import read_metadata
from demur.runs.record import identity
from demur.spec import digest, show

MEND = "delete it and make it again with demur calibrate"
Word = Literal["kept", "within chance", "broken", "nothing accepted"]


@dataclass(frozen=True)
class IssuedCertificate:
    """A certificate with all that it rests on."""

    metadata: dict[str, Any]

    @property
    def rejector(self) -> str:
        """The rejector's name among those of the recipe."""
        return str(self.metadata["rejector"])

    @property
    def thresholds(self) -> tuple[float, ...]:
        """Of each of its scores."""
        return tuple(float(t) for t in self.metadata["thresholds"])

    def covers(self, record: Record) -> bool:
        """Whether a record shows images of the kind that was calibrated on."""
        return bool(record.metadata["attack"] == self.metadata["attack"])

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
    quantity: str
    level: float
    observed: float | None  # None where nothing is accepted
    interval: Interval
    hits: int
    trials: int
    coverage: float
    word: Word

    def plain(self) -> dict[str, Any]:
        """The retest as JSON values."""
        describe_counts: dict[str, Any] = plain(self)
        return describe_counts


def issue(
    evaluator: Evaluator,
    name: str,
    guarantee: Guarantee,
    confidence: float | None = None,
    label: str = "clean",
    attack: Attack = Clean(),
) -> IssuedCertificate:
    """The certificate of a rejector on the run's cal images, kept in its folder."""
    run = evaluator.run
    rejector = _named(run.recipe.rejectors(), name)
    cal = (
        evaluator.clean("cal")
        if isinstance(attack, Clean)
        else _attacked_cal(evaluator, label, attack)
    )
    binding = Binding(evaluator.clean, evaluator.device)
    text = show(rejector, full=True)
    score = StoredScore(text) if text in cal.kept else binding.bound(rejector)
    parts = [part for part, _ in score.rule(0.0).pairs]
    columns = np.stack([values(part, cal) for part in parts], axis=1)
    found = certify(columns, cal.correct, guarantee, confidence)
    made = IssuedCertificate(_story(evaluator, name, rejector, found, cal, binding))
    with run.writing():
        return _kept(_path(run, made), made)


def _kept(path: Path, made: IssuedCertificate) -> IssuedCertificate:
    """The certificate in its file; one that is there and says otherwise is not written over."""
    if not path.exists():
        write_json(path, made.metadata)
        return made
    there = IssuedCertificate(read_metadata(path, MEND))
    if there.thresholds != made.thresholds:
        raise BadInput(f"{path} promises the same with other thresholds; delete it to make another")
    return there


def issued_certificates(run: Run) -> list[IssuedCertificate]:
    """Every certificate of these weights, by rejector and promise."""
    found = [
        IssuedCertificate(read_metadata(path, MEND))
        for path in (run.path / "certificates").glob("*.json")
    ]
    weights = run.checkpoint["weights"]
    mine = [made for made in found if made.metadata["weights"] == weights]
    return sorted(
        mine, key=lambda made: (made.rejector, made.metadata["guarantee"], made.metadata["on"])
    )


def retest(made: IssuedCertificate, score: Score, record: Record) -> Retest:
    """What a record shows of a promise, with an exact 95% interval."""
    taken, correct = accepted(made.rule(score), record), record.correct
    quantity = made.metadata["quantity"]
    within = {"risk": taken, "tpr": correct, "coverage": np.ones_like(taken)}[quantity]
    counted = ~correct if quantity == "risk" else taken
    hits, trials = int((counted & within).sum()), int(within.sum())
    level, is_upper_bound = float(made.metadata["level"]), quantity == "risk"
    interval = Interval(
        float(lower_bound(hits, trials, 0.025)), float(upper_bound(hits, trials, 0.025))
    )
    observed = hits / trials if trials else None
    return Retest(
        str(made.metadata["sentence"]), record.label, made.covers(record), quantity, level, observed,
        interval, hits, trials, float(taken.mean()), _word(observed, interval, level, is_upper_bound),
    )  # fmt: skip


def retests(
    evaluator: Evaluator, scores: dict[str, Score], records: list[Record]
) -> list[tuple[IssuedCertificate, list[Retest]]]:
    """All certificates on all records that can show them, clean images first.

    A certificate whose rejector is not among the scores, or means something else by now, shows no
    record.
    """
    unseen = [record for record in records if record.metadata["split"] != "cal"]
    ordered = sorted(unseen, key=lambda record: record.metadata["attack"] != digest(Clean()))
    today = {name: show(r, full=True) for name, r in evaluator.run.recipe.rejectors().items()}
    tested = []
    for made in issued_certificates(evaluator.run):
        lines: list[Retest] = []
        score = scores.get(made.rejector)
        if score is not None and today.get(made.rejector) == made.metadata["rejector_spec"]:
            lines = [retest(made, score, r) for r in ordered if can_score(score, r)]
        tested.append((made, lines))
    return tested


def _word(observed: float | None, interval: Interval, level: float, is_upper_bound: bool) -> Word:
    if observed is None:
        return "nothing accepted"
    if observed <= level if is_upper_bound else observed >= level:
        return "kept"
    return (
        "broken"
        if (interval.lo > level if is_upper_bound else interval.hi < level)
        else "within chance"
    )


def _named(rejectors: dict[str, Rejector], name: str) -> Rejector:
    if name not in rejectors:
        raise BadInput(f"no rejector is called {name!r}; {suggestion(name, rejectors)}")
    return rejectors[name]


def _attacked_cal(evaluator: Evaluator, label: str, attack: Attack) -> Record:
    if bind_thresholds(attack, evaluator.clean).thresholds:
        raise BadInput(
            f"{label} has a threshold of its own that was chosen on the cal images, so these "
            "cannot test a promise under it; calibrate under an attack without one"
        )
    return run_attack(evaluator, label, attack, AttackOptions("cal", keep_images=0))


def _story(
    evaluator: Evaluator,
    name: str,
    rejector: Rejector,
    found: Certificate,
    cal: Record,
    binding: Binding,
) -> dict[str, Any]:
    """All that a certificate rests on."""
    clean = cal.metadata["attack"] == digest(Clean())
    attacked_by = f"images attacked by {cal.metadata['spec']} and no others"
    only = "images as they are, drawn like these" if clean else attacked_by
    describe_counts: dict[str, Any] = json.loads(json.dumps(found.plain()))
    return describe_counts | {
        "rejector": name,
        "rejector_spec": show(rejector, full=True),
        "quantity": found.guarantee.quantity,
        "level": found.guarantee.level,
        "on": cal.label,
        "attack": cal.metadata["attack"],
        "attack_spec": cal.metadata["spec"],
        "valid_for": only,
        "split": "cal",
        "cal_record": cal.digest,
        "cal_images": len(cal.y),
        "data": cal.metadata["data"],
        "fitted": binding.fitted,
        "weights": evaluator.run.checkpoint["weights"],
        "recipe_digest": digest(evaluator.run.recipe),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **provenance(evaluator.device),
    }


def _path(run: Run, made: IssuedCertificate) -> Path:
    """One file a rejector, promise, confidence and kind of image."""
    describe_counts = made.metadata
    parts = (
        describe_counts["rejector"],
        describe_counts["guarantee"],
        f"{describe_counts['confidence']:g}",
        describe_counts["on"],
    )
    name = re.sub(r"[^A-Za-z0-9.]+", "-", "_".join(parts)).strip("-")[:100]
    exact = (
        describe_counts["rejector_spec"],
        describe_counts["attack"],
        describe_counts["cal_record"],
        *parts,
    )
    apart = identity(parts=exact)[:6]
    return run.path / "certificates" / f"{name}-{apart}.json"
