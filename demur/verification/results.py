"""Checks of a record, and of certificates, figures and tables against what they come from.

A record is checked against itself, the clean records, the data set and the weights. Each check
returns a problem, "" if there is none, or None if the record has nothing to check. It raises
BadInput if it cannot tell.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from demur.attacks import Clean
from demur.attacks.balls import L2, Linf
from demur.audits.ensemble_result import KINDS, Counts
from demur.calibrate import Certificate, Guarantee
from demur.calibrate.certificate import GUARANTEE_SHARE
from demur.data import Images
from demur.errors import BadInput
from demur.evaluate import RejectorEvaluation
from demur.evaluate.accepted_errors import aimed_rejector, worst_cases
from demur.evaluate.binding import ThresholdResolver, resolve_thresholds
from demur.evaluate.certificates import certify_record
from demur.evaluate.record_scores import tcon_of, values
from demur.evaluate.recording import LoadedRun, RecordOptions, final_outputs
from demur.evaluate.score import summary
from demur.files.checked_files import MAX_JSON, read_regular_file
from demur.guards.calibration import count_figures
from demur.output import prediction
from demur.recipes import VOCABULARY
from demur.rejectors import Con, ImageRejector, Rejector
from demur.rejectors.rule import Score
from demur.runs import Record
from demur.runs.record import TRUE, attack_of, identity, norm_problem
from demur.spec import digest, older_version, read, show

ROUNDING = 1e-4  # relative, of values that another device computes
EXACT = 1e-6  # of probabilities that come from one array
EXAMPLES = 32  # stored adversarial examples that are evaluated again
INPUTS = (
    "attack", "thresholds", "fitted", "weights", "data", "split", "source", "precision", "model",
    "user_code",
)  # fmt: skip
Check = Callable[..., str | None]


class StoredRun(LoadedRun):
    """A run whose clean records are read and never made: verifying writes nothing."""

    records: tuple[Record, ...] = ()

    def clean(self, split: str, *rejectors: ImageRejector) -> Record:
        """The clean record of a whole split; older runs do not say which one is whole."""
        known = {"split": split, "attack": digest(Clean())}
        if whole := self.run.checkpoint.get("data", {}).get(split):
            known["data"] = whole
        whole_records = (r for r in self.records if "first_of" not in r.metadata)
        found = [r for r in whole_records if known.items() <= r.metadata.items()]
        if not found:
            raise BadInput(f"there is no clean {split} record")
        return max(found, key=lambda r: (len(r.y), bool(r.metadata["features"])))


def _identity(record: Record, loaded: StoredRun) -> str:
    """The digests of the record and of its attack, from what they are made of."""
    known, made_as = record.metadata, record.digest
    if known["weights"] != loaded.run.checkpoint["weights"]:
        return "the record is of other weights than its run"
    older = _older_version(record)
    if digest(attack_of(known["spec"])) != known["attack"] and not older:
        return "the digest of the attack is not that of its spec"
    if "first_of" in known:  # a pack
        made_as = known["first_of"]
        if record.digest != identity(first=known["n"], of=made_as):
            return "the digest is not that of the first images of a record"
    inputs = {key: known[key] for key in INPUTS if key in known}
    options = [(known["features"], known["images"])]
    if known.get("archive"):  # it has dropped what the two count; any number of images may be kept
        numbers = dict.fromkeys((0, min(256, known["n"]), known["n"], *range(4096)))
        options = [(features, images) for images in numbers for features in (False, True)]
    if any(identity(**inputs, features=f, images=i) == made_as for f, i in options):
        if older:
            raise BadInput(older)
        return ""
    return "the digest does not follow from the attack, thresholds, weights and images"


def _older_version(record: Record) -> str:
    """Which older version of its attack a record is of; empty for one of today's."""
    known = record.metadata
    return older_version(attack_of(known["spec"]), known["attack"])


def _norms(record: Record, loaded: StoredRun) -> str:
    """Perturbations inside the ball, and Linf and L2 norms that one image can have."""
    attack, pixels = attack_of(record.metadata["spec"]), loaded.run.recipe.data.domain.shape
    linf, l2 = (record.arrays.get(f"size_{name}", torch.zeros(1)) for name in ("linf", "l2"))
    if min(float(linf.min()), float(l2.min())) < 0:
        return "a norm is negative"
    wrong = (l2 - linf < -ROUNDING) | (l2 > linf * math.prod(pixels) ** 0.5 + ROUNDING)
    if {"size_linf", "size_l2"} <= set(record.arrays) and wrong.any():
        return "size_l2 and size_linf are not the norms of one image"
    if isinstance(attack, Clean):
        return norm_problem(record.arrays, Linf(0)) or norm_problem(record.arrays, L2(0))
    if len(balls := attack.balls()) != 1:
        raise BadInput(f"{type(attack).__name__} has no ball, or several")
    return norm_problem(record.arrays, balls.pop())


def _scores(record: Record, loaded: StoredRun) -> str | None:
    """Stored scores against the outputs; without these, Con and T-Con against `correct`."""
    stored, computed = record.stored_scores, 0
    if record.scores_only:
        con, true = stored.get(show(Con(), full=True)), stored.get(TRUE)
        if con is None or true is None:
            return None
        same, below = (con - true).abs() <= EXACT, true <= con.clamp(max=0.5) + EXACT
        agree = torch.where(torch.from_numpy(record.correct), same, below)
        return "" if agree.all() else "`correct` contradicts Con and T-Con"
    for text, score in stored.items():
        rejector = None if text == TRUE else read(text, VOCABULARY)
        if rejector is None or isinstance(rejector, Score):  # others are fitted to features
            found = tcon_of(record) if rejector is None else values(rejector, record)
            computed += 1
            if not torch.allclose(score.double(), torch.from_numpy(found), ROUNDING, ROUNDING):
                return f"the stored score {text} is not that of the outputs"
    return "" if computed else None


def _thresholds(record: Record, loaded: StoredRun) -> str | None:
    """Thresholds of the attack against those of the clean records."""
    stored, fitted = record.metadata["thresholds"], record.metadata["fitted"]
    bound = resolve_thresholds(attack_of(record.metadata["spec"]), loaded.clean, loaded.device)
    if (set(stored), set(fitted)) != (set(bound.thresholds), set(bound.fitted)):
        return "the thresholds are not those of the criteria of the attack"
    for text, value in bound.thresholds.items():
        if not math.isclose(stored[text], value, rel_tol=ROUNDING, abs_tol=ROUNDING):
            return f"{text} has the threshold {stored[text]:.6g}, but {value:.6g} on clean images"
    return "" if stored else None


def _images(record: Record, loaded: StoredRun, count: int) -> Images:
    """The first images of the split of a record; BadInput if the data set cannot be read."""
    return loaded.images(RecordOptions(record.metadata["split"], n=count))


def _labels(record: Record, loaded: StoredRun) -> str:
    """Labels, positions and digest of the images against the data set."""
    split, count = loaded.split_by_name(record.metadata["split"]), len(record.y)
    if count > len(loaded.splits[split]):
        return f"the record has more images than the {split} split"
    images = _images(record, loaded, count)
    if not torch.equal(images.index.cpu(), record.arrays["index"]):
        return "the positions are not those of the first images of the split"
    if not torch.equal(images.y.cpu(), record.y):
        return "the labels are not those of the data set"
    is_same = "first_of" in record.metadata or images.digest() == record.metadata["data"]
    return "" if is_same else "data is not the digest of the images"


def _examples(record: Record, loaded: StoredRun) -> str | None:
    """Stored adversarial examples against images, norms and, with weights, outputs."""
    if (x_adv := record.arrays.get("x_adv")) is None:
        return None
    if len(x_adv) != record.metadata["images"] or len(x_adv) > len(record.y):
        return "the number of adversarial examples is not that of the metadata"
    x = _images(record, loaded, len(x_adv)).batch(slice(None))[0].cpu()
    if x.shape != x_adv.shape or not attack_of(record.metadata["spec"]).inside(x, x_adv).all():
        return "an adversarial example is outside the ball of the attack"
    for name, ball in (("size_linf", Linf(0)), ("size_l2", L2(0))):
        if not torch.allclose(ball.norm(x_adv - x), record.arrays[name][: len(x)], atol=ROUNDING):
            return f"{name} is not the norm of the adversarial examples"
    if not loaded.run.has_weights:
        return ""
    out = final_outputs(loaded.net, x_adv[:EXAMPLES], loaded.device)
    return "the weights give other outputs for the adversarial examples" * _far(out.logits, record)


def _far(logits: Tensor, record: Record) -> bool:
    """Whether logits of the first images differ from the stored ones by more than rounding."""
    stored = record.arrays["logits"][: len(logits)]
    within = 10 * ROUNDING * (1 + float(stored.abs().max()))
    return stored.shape != logits.shape or bool(((logits.cpu() - stored).abs() > within).any())


CHECKS: dict[str, Check] = {
    "identity": _identity, "norms": _norms, "stored scores": _scores, "thresholds": _thresholds,
    "labels in the data set": _labels, "adversarial examples": _examples,
}  # fmt: skip


def attacked_again(record: Record, loaded: StoredRun, n: int) -> str:
    """Attack the first n images again and compare which predictions are correct."""
    if record.metadata.get("probe", {}).get("random_outputs"):
        raise BadInput("the outputs of the net are random")
    if older := _older_version(record):
        raise BadInput(older)
    images = _images(record, loaded, count := min(n, len(record.y)))
    bound = resolve_thresholds(attack_of(record.metadata["spec"]), loaded.clean, loaded.device)
    x_adv = loaded.craft(bound.spec, images, slice(0, count), count).cpu()
    out = final_outputs(loaded.net, x_adv, loaded.device)
    if isinstance(bound.spec, Clean) and not record.scores_only and _far(out.logits, record):
        return "the weights give other outputs for the clean images"
    right = (prediction(out).cpu() == images.y.cpu()).numpy()
    other = int((right != record.correct[:count]).sum())
    same_device = str(record.metadata.get("device", "")).startswith(loaded.device.type)
    if other <= max(1, count // (20 if same_device else 4)):  # rounding may turn an image
        return ""
    return f"{other} of {count} images have another outcome when they are attacked again"


CELLS = 1e-5  # relative: scores may be computed on another device
WRONG = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)  # of values of no type
TABLES = ("attacks", "rows", "worst_case")  # of demur score
COUNTS = [f.name for f in fields(Certificate) if f.name not in ("guarantee", "thresholds")]


def differs(stored: Any, computed: Any) -> bool:
    """Whether JSON values differ from computed ones, numbers by more than CELLS."""
    if isinstance(computed, dict):
        return any(differs(stored[key], value) for key, value in computed.items())
    if isinstance(computed, list | tuple):
        pairs = zip(stored, computed, strict=True)
        return any(differs(a, b) for a, b in pairs)
    if isinstance(computed, float) and isinstance(stored, float | int):
        return not (stored == computed or math.isclose(stored, computed, rel_tol=CELLS))
    return bool(stored != computed)


def certificate_problem(values: dict[str, Any], loaded: StoredRun | None = None) -> str:
    """What does not follow from the counts of a certificate, or from its record if it is here."""
    try:
        values = {"under": ""} | values  # older certificates have no such attack
        at = tuple(-math.inf if t is None else float(t) for t in values["thresholds"])
        guarantee = read(values["guarantee"], VOCABULARY)
        if not isinstance(guarantee, Guarantee):
            return "the certificate has no guarantee"
        found = Certificate(guarantee, thresholds=at, **{name: values[name] for name in COUNTS})
        wrong_kept, kept, right = found.accepted_wrong, found.accepted, found.correct
        if not (0 <= wrong_kept <= kept <= found.n and kept - wrong_kept <= right <= found.n):
            return "the counts of the certificate contradict each other"
        if differs(values, found.to_json() | {"thresholds": values["thresholds"]}):
            return "the sentence or an interval of the certificate does not follow from its counts"
        shares = {"risk": (wrong_kept, kept), "tpr": (kept - wrong_kept, right)}
        hits, trials = shares.get(guarantee.quantity, (kept, found.n))
        if guarantee.p_value(hits, trials) > GUARANTEE_SHARE * (1 - found.confidence):
            return f"{hits} of {trials} images do not suffice for the guarantee of the certificate"
        return _record_problem(values, found, loaded) if loaded else ""
    except BadInput:
        raise
    except WRONG:
        return "the certificate lacks a value or has one of another type"


def _record_problem(values: dict[str, Any], found: Certificate, loaded: StoredRun) -> str:
    stated = {"weights": loaded.run.checkpoint["weights"], "quantity": found.guarantee.quantity,
              "level": found.guarantee.level}  # fmt: skip
    if differs(values, stated):
        return "weights, quantity or level are not those of the run and the guarantee"
    cal = next((r for r in loaded.records if r.digest == values["cal_record"]), None)
    if cal is None:
        raise BadInput("its record of cal images is not here")
    rejector, binding = read(values["rejector_spec"], VOCABULARY), ThresholdResolver(loaded.clean)
    if not isinstance(rejector, Rejector):
        return "the certificate has no rejector"
    again = certify_record(rejector, cal, found.guarantee, found.confidence, binding)
    if differs(vars(found), {name: vars(again)[name] for name in ("thresholds", *COUNTS)}):
        return "the thresholds or counts of the certificate are not those of its record"
    return ""


def figures_problem(figures: dict[str, Any]) -> str:
    """Which shares of decisions do not come from one set of counts; empty if all do."""
    shares = {key: figures[key] for key in ("accuracy", "coverage", "tpr", "risk")}
    counts = (round(share["value"] * share["n"]) if share else 0 for share in shares.values())
    right, kept, kept_right, kept_wrong = counts
    computed = count_figures(figures["images"], right, kept, kept_right)
    present = all(bool(share) == (computed[key] is not None) for key, share in shares.items())
    if kept_right + kept_wrong != kept or not present:
        return "the shares of the figures contradict each other"
    return "a share or an interval does not follow from counts" * differs(figures, computed)


def read_table(path: Path) -> dict[str, Any] | None:
    """The JSON of demur score or demur audit in a file; None if it is something else."""
    try:
        found = json.loads(read_regular_file(path, MAX_JSON, ""))
    except (BadInput, OSError, ValueError, RecursionError):
        return None
    is_table = isinstance(found, dict) and ({"attacks", "rows"} <= set(found) or _results(found))
    return found if is_table else None


def _results(table: dict[str, Any]) -> list[dict[str, Any]]:
    parts, keys = (table, *table.values()), {"clean", "attacked", "broken_by"}
    return [part for part in parts if isinstance(part, dict) and keys <= set(part)]


def table_problem(table: dict[str, Any], known: Mapping[str, tuple[Record, StoredRun]]) -> str:
    """The first row with a cell that is not that of its counts or record."""
    try:
        for part in _results(table):
            for when in ("clean", "attacked"):
                counts = Counts(*(part[when][kind]["count"] for kind in KINDS))
                if part["n"] != counts.n or differs(part[when], counts.to_json()):
                    return f"the row {when} of {part['attack']} does not follow from its counts"
            broken_by = part["broken_by"]
            if (part["unbroken"], part["n"]) != (broken_by.count(""), len(broken_by)):
                return f"unbroken of {part['attack']} is not the number of unbroken images"
        rows = [row for part in TABLES for row in table.get(part, ())]
        digests = dict.fromkeys(row["record"] for row in rows)
        if missing := [digest for digest in digests if digest not in known]:
            raise BadInput(f"{len(missing)} of its {len(digests)} records are not here")
        computed = [row for digest in digests for row in _rows(*known[digest])]
        for row in rows:
            key = {k: row[k] for k in ("record", "rejector", "protocol") if k in row}
            cells = [one for one in computed if all(one.get(k, "") == row.get(k, "") for k in key)]
            if len(key) > 1 and not cells:
                raise BadInput(f"the row of {row['rejector']} cannot be computed from its record")
            if differs(row, cells[0]):
                return f"a cell of {' '.join(key.values())} is not that of the record"
    except BadInput:
        raise
    except WRONG:
        return "a row of the table lacks a value or has one of another type"
    return ""


def _rows(record: Record, loaded: StoredRun) -> list[dict[str, Any]]:
    """The rows of one record, that of the classifier first."""
    same = [one for one in loaded.records if one.metadata["split"] == record.metadata["split"]]
    evaluation = RejectorEvaluation.of(loaded, records=same)
    cases = worst_cases(evaluation, loaded, same) if aimed_rejector(record) else []
    rows = [] if cases else evaluation.score_record(record).rows
    worst = [entry.row.to_json() for entry in cases if entry.row.record == record.digest]
    found = [summary(record).to_json(), *worst, *(row.to_json() for row in rows)]
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]
