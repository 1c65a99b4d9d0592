"""The report of a run: one HTML file that needs no network and no other file.

    scored = [evaluation.score_record(record) for record in run.records("test")]
    write_page(loaded, scored, evaluation, Path("report.html"))

It shows what was accepted and rejected, and why; all figures come from rows and records.
"""

import math
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from demur.evaluate import (
    ORACLE,
    LoadedRun,
    Protocol,
    RejectorEvaluation,
    Row,
    ScoredRecord,
    Summary,
)
from demur.evaluate.certificates import retests
from demur.metrics import Interval
from demur.report.certificates import cells, guarantees_svg
from demur.report.figures import (
    RECTIFIED,
    attacked_images,
    certainty_svg,
    check_installed,
    data_uri,
    main_rejector,
    risk_coverage_svg,
)
from demur.report.gallery import GROUPS, PER_GROUP, Gallery, Group, Verdicts, gallery
from demur.report.sanity import Sanity
from demur.report.text import (
    attack_command,
    comparable,
    label_is_current,
    percent,
    signed,
    train_command,
)
from demur.runs import Record
from demur.runs.files import write_text
from demur.sanity import run_checks
from demur.spec import lines, show

METADATA_NAMES = {
    "digest": "record digest",
    "attack": "attack digest",
    "data": "data digest",
    "weights": "weights digest",
    "code": "code version",
    "file_digest": "file digest",
    "images": "images stored",
    "features": "features stored",
}
TERMS = {
    "Con": "Confidence (con): the probability of the predicted class, from 0 to 1.",
    "R-Con": "Rectified confidence: con corrected by A, the net's second output (usually their "
    "product). It is trained to predict T-Con without the true label.",
    "Con (trained)": "Confidence at the temperature at which it was trained to predict T-Con.",
    "SNet": "The net's second output: trained to select the images to accept.",
    "ATRO": "The net's second output: trained to trade wrong predictions against rejections.",
    "CARL": "One minus the probability of an extra class, which stands for rejection.",
    "Energy": "The log-sum-exp of the net's logits.",
    "Con+R-Con": "Two conditions in sequence: con must reach 1/2, then R-Con its threshold.",
    "T-Con": "True confidence: the probability of the true class. It needs the label, so it cannot "
    "be used in practice; it is an oracle that shows what is possible.",
    "A": "The net's second output alone, from 0 to 1: how reliable con is.",
    "Margin": "The probability of the predicted class minus that of the second best.",
    "Entropy": "The negative entropy of the predicted probabilities: how concentrated they are.",
    "MaxLogit": "The largest logit of the net.",
    "KD": "Kernel density of correctly classified features of the same class around the image.",
    "LID": "Local intrinsic dimension: how the nearest correctly classified features are spread.",
    "kNN": "The closeness of the k-th nearest correctly classified feature.",
    "GDA": "The closeness to the nearest class mean, with one covariance for all classes.",
    "GDA*": "The same, with a covariance for each class.",
    "GMM": "The same, for the predicted class only.",
    "ViM": "Energy, minus the part of the feature that no class explains.",
}


class Cell(NamedTuple):
    """A figure and its 95% interval."""

    value: str
    interval: str = ""


class TableRow(NamedTuple):
    """One row of a table."""

    rejector: str
    remark: str
    kind: str  # "none", "oracle", "decides" or "rejector"
    cells: list[Cell]
    threshold: str
    threshold_from: str


class AttackView(NamedTuple):
    """The view of one record in the template."""

    name: str
    words: str
    summary: Summary
    counts: list[tuple[Group, int, str]]  # images and their share in percent
    total: dict[str, int]
    lines: dict[Protocol, list[TableRow]]
    certainty: str
    risk_coverage: str
    gallery: Gallery | None
    metadata: list[tuple[str, str]]
    label_is_current: bool
    command: str


def write_page(
    loaded: LoadedRun, scored: list[ScoredRecord], evaluation: RejectorEvaluation, path: Path
) -> Path:
    """Write the page and return its path; raise BadInput without the report extra."""
    check_installed()
    write_text(path, page_text(loaded, scored, evaluation))
    return path


def page_text(loaded: LoadedRun, scored: list[ScoredRecord], evaluation: RejectorEvaluation) -> str:
    """Return the page as HTML; records without attack come first."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    here = files("demur.report")
    css = Markup((here / "page.css").read_text(encoding="utf-8"))
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((here / "page.html.j2").read_text(encoding="utf-8"))
    ordered = sorted(scored, key=attacked_images)
    records = [entry.record for entry in ordered]
    attacks = [_attack_view(entry, loaded, evaluation) for entry in ordered]
    return template.render(
        css=css,
        attacks=attacks,
        hardest=max(attacks, key=lambda view: view.total["accepted-wrong"]),
        groups=GROUPS,
        per_group=PER_GROUP,
        main_rejector=main_rejector(evaluation),
        rectified=RECTIFIED in evaluation.scores,
        threshold=number(evaluation.thresholds[main_rejector(evaluation)]),
        level=f"{100 * evaluation.level:g}%",
        cal_n=evaluation.cal_n,
        words=_glossary(evaluation),
        sanity=Sanity.of(run_checks(records, evaluation), loaded.run, records),
        **_guarantees(loaded, evaluation, records),
        **_run_view(loaded),
    )


def number(value: float) -> str:
    """Format a threshold with three decimals, or as infinity."""
    if math.isfinite(value):
        return f"{value:.3f}"
    return "∞" if value > 0 else "-∞"


def _glossary(evaluation: RejectorEvaluation) -> list[tuple[str, str]]:
    """Return the rejectors on the page with their explanations."""
    names = [*evaluation.scores, "T-Con"]
    return [(name, TERMS[name]) for name in names if name in TERMS]


def _guarantees(
    loaded: LoadedRun, evaluation: RejectorEvaluation, records: list[Record]
) -> dict[str, Any]:
    """Return certificates with their retests on each record, and a figure."""
    tested = [t for t in retests(loaded, evaluation.scores, records) if t[1]]
    views = [(made, [(line.attack, cells(line)) for line in lines]) for made, lines in tested]
    picture = data_uri(guarantees_svg(tested), "svg+xml") if views else ""
    return {"guarantees": views, "guarantees_picture": picture}


def _run_view(loaded: LoadedRun) -> dict[str, Any]:
    """Return the template variables of the run."""
    run = loaded.run
    recipe = run.recipe
    channels, height, width = recipe.data.domain.shape
    attack = getattr(recipe.method.framework, "attack", None)
    return {
        "run": run.name,
        "data": show(recipe.data),
        "sizes": {name: len(images) for name, images in loaded.splits.items()},
        "picture": f"{width} by {height} pixels, {'grey' if channels == 1 else 'in colour'}",
        "classes": recipe.data.domain.classes,
        "net": show(recipe.net),
        "parameters": f"{sum(p.numel() for p in loaded.net.parameters()):,}",
        "epochs": recipe.epochs,
        "training_attack": show(attack) if attack is not None else "",
        "recipe": lines(recipe),
        "checkpoint": run.checkpoint,
        "train_command": train_command(run),
    }


def _attack_view(
    scored: ScoredRecord, loaded: LoadedRun, evaluation: RejectorEvaluation
) -> AttackView:
    verdicts = Verdicts.of(scored, evaluation, main_rejector(evaluation))
    total, n = verdicts.counts(), scored.summary.n
    has_images = attacked_images(scored) and "x_adv" in scored.record.arrays
    label = scored.summary.attack
    return AttackView(
        name=label if attacked_images(scored) else f"{label} (no attack)",
        words=f"Attacked with {label}" if attacked_images(scored) else "Without attack",
        summary=scored.summary,
        counts=[(g, total[g.key], f"{100 * total[g.key] / n:.2f}") for g in GROUPS],
        total=total | {"accepted": int(verdicts.accepted.sum())},
        lines={
            "deploy": _table(scored, evaluation, "deploy"),
            "paper": _table(scored, evaluation, "paper"),
        },
        certainty=data_uri(certainty_svg(scored, evaluation), "svg+xml"),
        risk_coverage=data_uri(risk_coverage_svg(scored, evaluation), "svg+xml"),
        gallery=gallery(verdicts, loaded) if has_images else None,
        metadata=_metadata(scored.record),
        label_is_current=label_is_current(scored.record, loaded),
        command=attack_command(scored.record, loaded),
    )


def _table(
    scored: ScoredRecord, evaluation: RejectorEvaluation, protocol: Protocol
) -> list[TableRow]:
    """Return the rows of one attack in one protocol, first the net without a rejector."""
    summary = scored.summary
    wrong = Interval(1 - summary.accuracy_interval.hi, 1 - summary.accuracy_interval.lo)
    no_rejector = [
        share(summary.accuracy, summary.accuracy_interval),
        Cell("n/a"),
        Cell("100.0%"),
        share(1 - summary.accuracy, wrong),
        Cell("100.0%"),
        Cell("n/a"),
    ]
    rows = [_line(r, evaluation) for r in scored.rows if r.protocol == protocol]
    return [TableRow("none", "all are accepted", "none", no_rejector, "always", ""), *rows]


def _line(row: Row, evaluation: RejectorEvaluation) -> TableRow:
    point, area = row.point, row.ranking.auroc_interval
    cells = [
        share(point.accuracy, row.accuracy_interval) if point.accepted else Cell("none accepted"),
        _vs_con(row),
        share(point.coverage, row.coverage_interval),
        share(point.accepted_wrong, row.accepted_wrong_interval),
        share(point.tpr, row.tpr_interval),
        Cell(f"{row.ranking.auroc:.3f}", f"{area.lo:.3f} to {area.hi:.3f}"),
    ]
    kind = {ORACLE: "oracle", main_rejector(evaluation): "decides"}.get(row.rejector, "rejector")
    remark = "needs the true label" if kind == "oracle" else ""
    return TableRow(
        row.rejector, remark, kind, cells, _conditions(row, evaluation), row.threshold_from
    )


def _vs_con(row: Row) -> Cell:
    """Format the difference in accuracy to confidence on the same images."""
    if not comparable(row):
        return Cell("n/a")
    gap = row.accuracy_vs_con
    value, lo, hi = (signed(v, 100, 1) for v in (gap.value, gap.lo, gap.hi))
    return Cell(value, f"{lo} to {hi}")


def share(value: float, interval: Interval | None = None) -> Cell:
    """Format a share in percent with its interval."""
    if interval is None:
        return Cell(f"{percent(value)}%")
    return Cell(f"{percent(value)}%", f"{percent(interval.lo)} to {percent(interval.hi)}")


def _conditions(row: Row, evaluation: RejectorEvaluation) -> str:
    """Return the conditions of acceptance; the threshold of the paper protocol is strict."""
    score = evaluation.scores.get(row.rejector)
    sign = "≥" if row.protocol == "deploy" else ">"
    last = f"{sign} {number(row.point.threshold)}"
    if score is None:
        return f"{row.rejector.split()[0]} {last}"
    pairs = score.rule(row.point.threshold).pairs
    gates = [f"{_score_name(gate, evaluation)} ≥ {number(at)}" for gate, at in pairs[:-1]]
    return ", then ".join([*gates, f"{_score_name(pairs[-1][0], evaluation)} {last}"])


def _score_name(score: object, evaluation: RejectorEvaluation) -> str:
    """Return the name of a score on the page."""
    names = (name for name, known in evaluation.scores.items() if known == score)
    return next(names, type(score).__name__)


def _metadata(record: Record) -> list[tuple[str, str]]:
    """Return the metadata of a record as names and text."""
    return [
        (METADATA_NAMES.get(k, k), _plain(v)) for k, v in record.metadata.items() if k != "recipe"
    ]


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{k}: {v}" for k, v in value.items()) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
