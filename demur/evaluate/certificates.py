"""Certificates: statistical guarantees about a rejector of a run, and retests of them on records.

A certificate that was issued on adversarial examples is valid for that attack and radius only.
"""

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from demur.attacks import Attack, Clean, WorstScore
from demur.calibrate import Certificate, Guarantee, certify_threshold, lower_bound, upper_bound
from demur.errors import BadInput
from demur.evaluate.accepted_errors import aimed_rejector, clean_of, under_attack, worst_case_of
from demur.evaluate.binding import ThresholdResolver, other_aim, resolve_thresholds
from demur.evaluate.record_scores import JsonFields, StoredScore, accepted, can_score, values
from demur.evaluate.recording import LoadedRun, RecordOptions, run_attack
from demur.files.checked_files import write_json
from demur.metrics import Interval
from demur.recipes import VOCABULARY, AnyName, aimed_at, rejectors_named
from demur.recipes import attack as attack_named
from demur.rejectors import ImageRejector
from demur.rejectors.image_scores import image_rejectors
from demur.rejectors.rule import Rejector, Rule, Score
from demur.runs import Record, Run, provenance
from demur.runs.metadata import CERTIFICATE, read_metadata
from demur.runs.record import identity
from demur.spec import digest, read, show
from demur.spec.code_digest import score_key

REMEDY = "delete it and make it again with demur calibrate"
RetestVerdict = Literal["kept", "within chance", "broken", "nothing accepted"]


@dataclass(frozen=True)
class IssuedCertificate:
    """A certificate as it is stored, with the data, weights and rejector that it is valid for."""

    metadata: dict[str, Any]

    @property
    def rejector(self) -> str:
        return str(self.metadata["rejector"])

    @property
    def thresholds(self) -> tuple[float, ...]:
        return tuple(float(t) for t in self.metadata["thresholds"])

    def covers(self, record: Record) -> bool:
        """Whether the images of a record were attacked like those of the certificate."""
        code = record.metadata.get("user_code", {})
        own = self.metadata["attack"], self.metadata.get("user_code", code)  # older ones have none
        return bool((record.metadata["attack"], code) == own)

    def rule(self, score: Score) -> Rule:
        """The certified rule for the fitted score of the rejector."""
        parts = [part for part, _ in score.rule(0.0).pairs]
        if len(parts) != len(self.thresholds):
            raise BadInput(
                f"the certificate of {self.rejector} has {len(self.thresholds)} thresholds, but "
                f"the rejector has {len(parts)} scores; {REMEDY}"
            )
        return Rule(tuple(zip(parts, self.thresholds, strict=True)))


@dataclass(frozen=True)
class Retest(JsonFields):
    """The guaranteed quantity, observed on one record; intervals are exact 95%."""

    certificate: str
    attack: str
    covered: bool  # whether the guarantee is valid for these images
    quantity: str
    level: float
    observed: float | None  # None if no image counts, as the risk if nothing is accepted
    interval: Interval
    hits: int
    trials: int
    coverage: float
    verdict: RetestVerdict
    aim: str = ""  # what the attack aims at, if not at this rejector and its thresholds


def issue(
    loaded: LoadedRun, name: AnyName, guarantee: Guarantee, confidence: float | None = None,
    label: str = "clean", attack: Attack = Clean(),
) -> IssuedCertificate:  # fmt: skip
    """Certify a rejector on the cal images of a run and store the certificate in its folder.

    It is valid under the attack only, whose name is `label`. None as the confidence takes the
    guarantee's own. Uncertified is raised if no threshold gives the guarantee.
    """
    ((name, rejector),) = rejectors_named(name, loaded.run.recipe).items()
    rejector = loaded.fitted(rejector)
    cal = attacked_cal(loaded, label, attack, tuple(image_rejectors(rejector)))
    binding = ThresholdResolver(loaded.clean, loaded.device)
    found = certify_record(rejector, cal, guarantee, confidence, binding)
    about = {"rejector": name, "rejector_spec": score_key(rejector), "fitted": binding.fitted}
    certificate = IssuedCertificate(about | _metadata(loaded, found, cal))
    with loaded.run.writing():
        path = _path(loaded.run, certificate.metadata)
        if not path.exists():
            write_json(path, certificate.metadata)
            return certificate
        stored = IssuedCertificate(read_metadata(path, CERTIFICATE, REMEDY))
        if stored.thresholds != certificate.thresholds:
            raise BadInput(
                f"{path} has the same guarantee with other thresholds; delete it to make another"
            )
        return stored


def certify_record(
    rejector: Rejector, cal: Record, guarantee: Guarantee, confidence: float | None,
    binding: ThresholdResolver,
) -> Certificate:  # fmt: skip
    """Certify a rejector on a record of cal images."""
    text = score_key(rejector)
    score = StoredScore(text) if text in cal.stored_scores else binding.bound(rejector)
    clean = binding.clean("cal") if aimed_rejector(cal) else cal
    attacked = {} if clean is cal else under_attack(rejector, score, cal, clean)
    columns = np.stack([values(part, clean) for part, _ in score.rule(0.0).pairs], axis=1)
    return certify_threshold(columns, clean.correct, guarantee, confidence, **attacked)


def attack_under(loaded: LoadedRun, label: str, name: AnyName) -> tuple[str, Attack]:
    """Label and attack of `--under`; worst-score attacks this rejector if its label names none."""
    recipe = loaded.run.recipe
    spec = attack_named(label, recipe)
    rejectors = rejectors_named(name, recipe).values() if isinstance(spec, WorstScore) else ()
    return aimed_at(label, spec, list(rejectors))[0]


def issued_certificates(run: Run) -> list[IssuedCertificate]:
    """Certificates of the run's weights, sorted by rejector and guarantee."""
    found = [
        IssuedCertificate(read_metadata(path, CERTIFICATE, REMEDY))
        for path in (run.path / "certificates").glob("*.json")
    ]
    own = [one for one in found if one.metadata["weights"] == run.checkpoint["weights"]]
    order = ("rejector", "guarantee", "on")
    return sorted(own, key=lambda one: [one.metadata[key] for key in order])


def retest(
    certificate: IssuedCertificate, score: Score, record: Record, clean: Record | None = None
) -> Retest:
    """Observe the guaranteed quantity on a record, with an exact 95% interval.

    `clean` is the record of the clean images of a worst-score record.
    """
    if clean is None:
        accept, correct = accepted(certificate.rule(score), record), record.correct
    else:
        case, (at,) = worst_case_of(score, record, clean), certificate.thresholds
        accept, correct = case.accepted >= at, case.worst < at
    quantity = certificate.metadata["quantity"]
    among = {"risk": accept, "tpr": correct, "coverage": np.ones_like(accept)}[quantity]
    counted = ~correct if quantity == "risk" else accept
    hits, trials = int((counted & among).sum()), int(among.sum())
    level, bounds = float(certificate.metadata["level"]), (lower_bound, upper_bound)
    interval = Interval(*(float(bound(hits, trials, 0.025)) for bound in bounds))
    observed = hits / trials if trials else None
    rejector = read(str(certificate.metadata["rejector_spec"]), VOCABULARY)
    aim = other_aim(record, rejector, certificate.thresholds)
    verdict = _verdict(observed, interval, level, is_upper_bound=quantity == "risk")
    return Retest(
        str(certificate.metadata["sentence"]), record.label, certificate.covers(record), quantity,
        level, observed, interval, hits, trials, float(accept.mean()), verdict, aim,
    )  # fmt: skip


def retests(
    loaded: LoadedRun, scores: dict[str, Score], records: list[Record]
) -> list[tuple[IssuedCertificate, list[Retest]]]:
    """Retest each certificate of a run on the records that contain its score, clean ones first.

    A certificate has no retests if its rejector has no score or another spec than it had then.
    """
    not_cal = [record for record in records if record.metadata["split"] != "cal"]
    ordered = sorted(not_cal, key=lambda record: record.metadata["attack"] != digest(Clean()))
    specs = {name: show(r, full=True) for name, r in loaded.run.recipe.rejectors().items()}
    specs |= {name: score_key(r) for name, r in scores.items() if isinstance(r, Rejector)}
    tested = []
    for made in issued_certificates(loaded.run):
        lines, name = list[Retest](), made.rejector
        score = scores.get(name)
        if score is not None and specs.get(name) == made.metadata["rejector_spec"]:
            known = [r for r in ordered if can_score(score, r)]
            is_risk = made.metadata["quantity"] == "risk" and len(made.thresholds) == 1
            for record in known:
                aim = aimed_rejector(record)
                clean = clean_of(record, known) if aim else None
                if not aim or (is_risk and clean and aim == specs[name]):
                    lines.append(retest(made, score, record, clean))
        tested.append((made, lines))
    return tested


def _verdict(
    observed: float | None, interval: Interval, level: float, is_upper_bound: bool
) -> RetestVerdict:
    """Verdict on a guarantee: broken only if the whole interval is on the wrong side of it."""
    if observed is None:
        return "nothing accepted"
    if observed <= level if is_upper_bound else observed >= level:
        return "kept"
    broken = interval.lo > level if is_upper_bound else interval.hi < level
    return "broken" if broken else "within chance"


def attacked_cal(
    loaded: LoadedRun, label: str, attack: Attack, rejectors: tuple[ImageRejector, ...] = ()
) -> Record:
    """Record of the attacked cal images; BadInput if the attack has a threshold chosen on them."""
    if isinstance(attack, Clean):
        return loaded.clean("cal", *rejectors)
    if resolve_thresholds(attack, loaded.clean).thresholds:
        raise BadInput(
            f"{label} has a threshold that was chosen on the cal images, so they cannot test a "
            "guarantee under it; calibrate under an attack without a threshold"
        )
    return run_attack(loaded, label, attack, RecordOptions("cal", None, None, 0, True, rejectors))


def _metadata(loaded: LoadedRun, found: Certificate, cal: Record) -> dict[str, Any]:
    clean = cal.metadata["attack"] == digest(Clean())
    attacked_by = f"images attacked by {cal.metadata['spec']} and no others"
    attacked_by += " (clean where it finds no accepted error)" if found.under else ""
    valid_for = "clean images of the same distribution" if clean else attacked_by
    values: dict[str, Any] = json.loads(json.dumps(found.to_json()))
    return values | {
        "quantity": found.guarantee.quantity,
        "level": found.guarantee.level,
        "on": cal.label,
        "attack": cal.metadata["attack"],
        "attack_spec": cal.metadata["spec"],
        "user_code": cal.metadata.get("user_code", {}),
        "valid_for": valid_for,
        "split": "cal",
        "cal_record": cal.digest,
        "cal_images": len(cal.y),
        "data": cal.metadata["data"],
        "weights": loaded.run.checkpoint["weights"],
        "recipe_digest": digest(loaded.run.recipe),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **provenance(loaded.device),
    }


def _path(run: Run, values: dict[str, Any]) -> Path:
    """Path of a certificate: one file per rejector, guarantee, confidence and attack."""
    parts = (values["rejector"], values["guarantee"], f"{values['confidence']:g}", values["on"])
    name = re.sub(r"[^A-Za-z0-9.]+", "-", "_".join(parts)).strip("-")[:100]
    exact = (values["rejector_spec"], values["attack"], values["cal_record"], *parts)
    suffix = identity(parts=exact)[:6]
    return run.path / "certificates" / f"{name}-{suffix}.json"
