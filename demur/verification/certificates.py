"""Certificates, figures and tables against the counts and records that they were computed from."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from demur.audits.ensemble_result import KINDS, Counts
from demur.calibrate import Certificate, Guarantee
from demur.calibrate.certificate import GUARANTEE_SHARE
from demur.errors import BadInput
from demur.evaluate import RejectorEvaluation
from demur.evaluate.accepted_errors import aimed_rejector, worst_cases
from demur.evaluate.binding import ThresholdResolver
from demur.evaluate.certificates import certify_record
from demur.evaluate.score import summary
from demur.files.atomic import MAX_JSON, read_regular_file
from demur.guards.calibration import count_figures
from demur.recipes import VOCABULARY
from demur.rejectors import Rejector
from demur.runs import Record
from demur.spec import read
from demur.verification.records import StoredRun

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
