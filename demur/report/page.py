"""The report of one to six runs: one HTML file that needs no network and no other file.

It shows what was accepted and rejected, and why. Tables come from rows; figures are elements of the
page; the explorer counts from the scores of every image, which the page contains.
"""

import html
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from demur.errors import import_optional
from demur.evaluate import ORACLE, PROTOCOLS, Protocol, Row, ScoredRecord
from demur.evaluate.accepted_errors import ScoredWorstCase
from demur.evaluate.certificates import retests
from demur.files.checked_files import write_text
from demur.metrics import Difference, Interval
from demur.report import plot
from demur.report.explorer import explorer_data
from demur.report.plot import FAINT, INK, drawing, saved
from demur.report.scored_runs import RECTIFIED, ScoredRun, attacked_images, cells, hardest, main_row
from demur.report.terminal import (
    WORST_CASE_COLUMNS,
    Sanity,
    attack_command,
    comparable,
    label_is_current,
    percent,
    signed,
    train_command,
    worst_case_words,
)
from demur.runs import Record
from demur.sanity import run_checks
from demur.spec import lines, show


def check_installed() -> None:
    """Raise BadInput unless the report extra is installed."""
    for name in ("matplotlib", "jinja2"):
        import_optional(name, "the page needs matplotlib and jinja2", "'demur[report]'")


def worst_case_svg(worst: Sequence[ScoredWorstCase]) -> bytes:
    """Draw accepted errors against clean coverage, under worst-score and without an attack."""
    cases = {f"{entry.row.rejector}, worst-score": entry.case for entry in worst}
    cases |= {f"{entry.row.rejector}, clean": entry.unattacked for entry in worst}
    with drawing(6.0, 3.5) as figure:
        plot.worst_case(cases, figure.subplots())
        return saved(figure, "svg")


def inline_svg(content: bytes, prefix: str, description: str) -> str:
    """Return an SVG file as an element of a page, with ids of its own and the page's colours."""
    text = content.decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    used = set(re.findall(r"#([\w-]+)[\")]", text))
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{prefix}{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{prefix}", text).replace("xlink:href", "href")
    for colour, name in ((INK, "ink"), (FAINT, "soft"), ("#ffffff", "card")):
        text = text.replace(f": {colour}", f": var(--{name})")
    opening = re.match(r"<svg[^>]*>", text)
    assert opening is not None
    box = re.search(r'viewBox="[^"]*"', opening[0])
    assert box is not None
    label = html.escape(description, quote=True)
    start = f'<svg class="figure" role="img" aria-label="{label}" {box[0]}>'
    return start + text[opening.end() :].strip()


PAGE_TERMS = {
    "accept": "The net gives its prediction. It does so where every score reaches its threshold.",
    "reject": "The net gives no prediction, because a score is below its threshold.",
    "threshold": "An image is accepted where its score reaches the threshold, else rejected.",
    "coverage": "The accepted share of all images.",
    "risk": "The wrong share of the accepted images.",
    "accepted and wrong": "The share of all images that are accepted although the prediction is "
    "wrong: the error that remains after rejection.",
    "TPR": "The accepted share of the correct predictions. TPR-95 is the threshold that accepts "
    "95% of them.",
    "AUROC": "The probability that a correct prediction scores above a wrong one: 1 is perfect, "
    "0.5 is chance.",
    "ROC": "The curve of the accepted share of correct predictions against that of wrong ones, "
    "over all thresholds. AUROC is the area under it.",
    "T-Con": "True confidence: the probability of the true class. It needs the label, so it cannot "
    "be used in practice; it is an oracle that shows what is possible.",
    "xi": "The error of A: how far it is from the A at which R-Con equals T-Con. 0 is exact.",
    "Theorem 1": "Where con is above 1/(2 - xi), R-Con is above 1/2 for a correct prediction and "
    "below 1/2 for a wrong one.",
    "temperature": "The number that logits are divided by before the softmax. It changes Con, "
    "R-Con and T-Con, but no prediction.",
    "interval": "The range beside or under a figure: its 95% confidence interval.",
    "deploy": "The threshold is chosen on clean held-out images, then frozen before any attack, as "
    "in practice.",
    "paper": "The threshold is chosen again on every scored set with its true labels, as in "
    "published tables. This allows comparisons with them, but is impossible in practice.",
    "certificate": "A threshold with a guarantee for future images of the same distribution, "
    "tested on held-out images.",
}
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
SCRIPTS = ("stats.js", "charts.js", "dom.js", "data.js", "image.js", "explorer.js")
STYLES = ("page.css", "explorer.css")


class Group(NamedTuple):
    """A combination of decision and correctness."""

    key: str
    words: str
    accepted: bool
    correct: bool


GROUPS = (
    Group("accepted-correct", "accepted, correct", True, True),
    Group("accepted-wrong", "accepted, wrong", True, False),
    Group("rejected-correct", "rejected, would have been correct", False, True),
    Group("rejected-wrong", "rejected, would have been wrong", False, False),
)

View = dict[str, Any]  # what the template shows of a run, an attack or a row


def anchor(name: str) -> str:
    """Return the id of a term's entry in the glossary."""
    words = name.removesuffix(" (oracle)").replace("+", " and ").replace("*", " star")
    return "term-" + re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


class Cell(NamedTuple):
    """A figure and its 95% interval."""

    value: str
    interval: str = ""


def write_page(runs: Sequence[ScoredRun], path: Path) -> Path:
    """Write the page and return its path; raise BadInput without the report extra."""
    check_installed()
    write_text(path, page_text(runs))
    return path


def page_text(runs: Sequence[ScoredRun]) -> str:
    """Return the page as HTML; records without attack come first."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    here = files("demur.report")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((here / "page.html.j2").read_text(encoding="utf-8"))
    terms = {name: text for results in runs for name, text in _rejector_words(results).items()}
    terms |= PAGE_TERMS
    ordered = [replace(r, scored=sorted(r.scored, key=attacked_images)) for r in runs]
    views = [_run_view(results, f"run-{i}-") for i, results in enumerate(ordered)]
    explorer = explorer_data(ordered)
    arrays = [one for run in explorer["runs"] for one in (*run["records"], run["cal"] or {})]
    sampled = any("of" in one or "top" in one for one in arrays)
    scripts = [*SCRIPTS[:4], *(["sample.js"] * sampled), *SCRIPTS[4:]]
    data = json.dumps(explorer, separators=(",", ":"), allow_nan=False)
    return template.render(
        css=Markup(_joined(STYLES)),
        script=Markup(_joined(scripts)),
        arrays=arrays,
        data=Markup(data.replace("<", "\\u003c")),  # no name can end the script element
        title=", ".join(results.name for results in runs),
        runs=views,
        several=len(views) > 1,
        groups=GROUPS,
        words=terms,
        anchor=lambda name: anchor(name) if name.removesuffix(" (oracle)") in terms else "",
        markup=Markup,
    )


def _rejector_words(results: ScoredRun) -> dict[str, str]:
    """Return what each rejector that is scored here is, as `demur list rejectors` does."""
    specs = results.evaluation.scores | results.loaded.run.recipe.rejectors()
    classes = {name: type(specs[name]) for name in results.evaluation.scores}
    return {name: (cls.__doc__ or "").splitlines()[0] for name, cls in classes.items()}


def _joined(names: Sequence[str]) -> str:
    return "\n".join((files("demur.report") / name).read_text(encoding="utf-8") for name in names)


def number(value: float) -> str:
    """Format a threshold with three decimals, or as infinity."""
    if math.isfinite(value):
        return f"{value:.3f}"
    return "∞" if value > 0 else "-∞"


def _run_view(results: ScoredRun, prefix: str) -> View:
    run, evaluation = results.loaded.run, results.evaluation
    attacks = [_attack_view(entry, results) for entry in results.scored]
    records = [entry.record for entry in results.scored]
    records += [entry.record for entry in results.worst]
    worst = hardest(results.scored, evaluation) if attacks else None
    return {
        "name": results.name,
        "sentences": _sentences(results, worst),
        "facts": _facts(results),
        "attacks": attacks,
        "hardest": next((a for a in attacks if worst and a["summary"] is worst.summary), None),
        "protocols": ("deploy", "paper") if results.protocol == "deploy" else ("paper",),
        "threshold_words": _threshold_words(results),
        "worst_case": _worst_case(results, prefix) if results.worst else None,
        "records": [*attacks, *(_record_view(entry.record, results) for entry in results.worst)],
        "sanity": Sanity.of(run_checks(records, evaluation), run, records) if records else None,
        "guarantees": _guarantees(results, records),
        "recipe": lines(run.recipe),
        "checkpoint": run.checkpoint if run.trained else None,
        "epochs": run.recipe.epochs,
        "sizes": results.split_sizes,
        "train_command": train_command(run),
    }


def _sentences(results: ScoredRun, worst: ScoredRecord | None) -> list[str]:
    """Return what the run is and how it did, in three sentences."""
    recipe, name = results.loaded.run.recipe, results.main_rejector
    attack = getattr(recipe.method.framework, "attack", None)
    how = "under attack" if attack is not None else "on clean images"
    what = f"A {type(recipe.net).__name__}, trained {how} on {type(recipe.data).__name__}, "
    first = f"{what}classifies an image or rejects it: here where {name} is below a threshold."
    if worst is None:
        return [first, "No attack has been recorded yet."]
    clean = next((e for e in results.scored if not attacked_images(e)), None)
    second = (
        f"Without an attack it accepts {_accepts(results, clean)}."
        if clean
        else "It has not been measured without an attack."
    )
    hardest_words = f"Under {worst.summary.attack}, the attack with the most accepted errors,"
    if not attacked_images(worst):
        return [first, second, "No record of an attack has more accepted errors."]
    return [first, second, f"{hardest_words} it accepts {_accepts(results, worst)}."]


def _accepts(results: ScoredRun, scored: ScoredRecord) -> str:
    row = main_row(scored, results.main_rejector)
    lo, hi = (percent(end) for end in row.accepted_wrong_interval)
    wrong = f"{percent(row.point.accepted_wrong)}% [{lo}, {hi}]"
    return (
        f"{percent(row.point.coverage)}% of {row.point.n:,} images and is right on "
        f"{percent(row.point.accuracy)}% of these; {wrong} of all images are accepted and wrong"
    )


def _threshold_words(results: ScoredRun) -> str:
    evaluation, name = results.evaluation, results.main_rejector
    if results.protocol == "deploy":
        return (
            f"{name} is at least {number(evaluation.thresholds[name])}. This threshold accepts "
            f"{100 * evaluation.level:g}% of the correct predictions on {evaluation.cal_n} "
            "held-out clean images; it was frozen before any attack"
        )
    return (
        f"{name} is above the TPR-95 threshold that the paper's protocol chooses with the labels "
        "of each scored set, since no cal images were held out"
    )


def _facts(results: ScoredRun) -> list[tuple[str, str, str]]:
    """Return the training set, the training, the net and the rule, as name, text and code."""
    run = results.loaded.run
    recipe, sizes = run.recipe, results.split_sizes
    channels, height, width = recipe.data.domain.shape
    picture = f"{width} by {height} pixels, {'grey' if channels == 1 else 'in colour'}"
    attack = getattr(recipe.method.framework, "attack", None)
    second = RECTIFIED in results.evaluation.scores
    head = "a second output is trained to correct the confidence" if second else "no second output"
    training = "adversarial training" if attack is not None else "on clean images"
    net = f"weights of epoch {run.checkpoint['epoch']}" if run.trained else "still in training"
    if run.has_weights:
        net = f"{sum(p.numel() for p in results.loaded.net.parameters()):,} parameters; {net}"
    facts = [
        ("Trained on", f"{sizes['fit']} images, " if "fit" in sizes else "", show(recipe.data)),
        ("Images", f"{picture}, {recipe.data.domain.classes} classes", ""),
        ("How", f"{recipe.epochs} epochs, {training}; {head}", show(attack) if attack else ""),
        ("Net", net, show(recipe.net)),
    ]
    if results.scored:
        facts.append(("Accepts when", _threshold_words(results), ""))
    return facts


def _guarantees(results: ScoredRun, records: list[Record]) -> list[Any]:
    """Return certificates with the cells of their retests on each record."""
    if not records:
        return []
    tested = [t for t in retests(results.loaded, results.evaluation.scores, records) if t[1]]
    return [(made, [(line.attack, cells(line)) for line in tests]) for made, tests in tested]


def _attack_view(scored: ScoredRecord, results: ScoredRun) -> View:
    accepted, n = results.accepted(scored, results.main_rejector), scored.summary.n
    correct = scored.record.correct
    total = {
        group.key: int(((accepted == group.accepted) & (correct == group.correct)).sum())
        for group in GROUPS
    }
    label = scored.summary.attack
    return {
        "words": f"Attacked with {label}" if attacked_images(scored) else "Without attack",
        "summary": scored.summary,
        "counts": [(g, total[g.key], f"{100 * total[g.key] / n:.2f}") for g in GROUPS],
        "total": total | {"accepted": int(accepted.sum())},
        "lines": {protocol: _table(scored, results, protocol) for protocol in PROTOCOLS},
        **_record_view(scored.record, results),
        "name": label if attacked_images(scored) else f"{label} (no attack)",
    }


def _record_view(record: Record, results: ScoredRun) -> View:
    shown = ((key, _plain(value)) for key, value in record.metadata.items() if key != "recipe")
    return {
        "name": record.label,
        "label": record.label,
        "metadata": [(METADATA_NAMES.get(key, key), text) for key, text in shown],
        "label_is_current": label_is_current(record, results.loaded),
        "command": attack_command(record, results.loaded, results.split_sizes),
    }


def _worst_case(results: ScoredRun, prefix: str) -> View:
    rows = [entry.row for entry in results.worst]
    words = "Accepted errors against clean coverage, under worst-score and without an attack"
    return {
        "words": worst_case_words(rows),
        "columns": WORST_CASE_COLUMNS,
        "figure": inline_svg(worst_case_svg(results.worst), f"{prefix}w-", words),
        "lines": [
            (
                f"{row.rejector}, n = {row.n}",
                [*(share(*one) for one in row.shares()), _difference(row.augrc_vs_con, 2)],
            )
            for row in rows
        ],
    }


def _difference(gap: Difference | None, decimals: int) -> Cell:
    """Format a paired difference in percent; None where there is nothing to compare."""
    if gap is None:
        return Cell("n/a")
    value, lo, hi = (signed(v, 100, decimals) for v in gap[:3])
    return Cell(value, f"{lo} to {hi}")


def _table(scored: ScoredRecord, results: ScoredRun, protocol: Protocol) -> list[View]:
    summary = scored.summary
    wrong = Interval(1 - summary.accuracy_interval.hi, 1 - summary.accuracy_interval.lo)
    every, unknown = Cell("100.0%"), Cell("n/a")
    accuracy = share(summary.accuracy, summary.accuracy_interval)
    none = {
        "rejector": "none", "remark": "all are accepted", "kind": "none",
        "cells": [accuracy, unknown, every, share(1 - summary.accuracy, wrong), every, unknown],
        "threshold": "always", "threshold_from": "",
    }  # fmt: skip
    return [none, *(_line(r, results) for r in scored.rows if r.protocol == protocol)]


def _line(row: Row, results: ScoredRun) -> View:
    point, area = row.point, row.ranking.auroc_interval
    cells = [
        share(point.accuracy, row.accuracy_interval) if point.accepted else Cell("none accepted"),
        _difference(row.accuracy_vs_con if comparable(row) else None, 1),
        share(point.coverage, row.coverage_interval),
        share(point.accepted_wrong, row.accepted_wrong_interval),
        share(point.tpr, row.tpr_interval),
        Cell(f"{row.ranking.auroc:.3f}", f"{area.lo:.3f} to {area.hi:.3f}"),
    ]
    kind = {ORACLE: "oracle", results.main_rejector: "decides"}.get(row.rejector, "rejector")
    remark = "needs the true label" if kind == "oracle" else ""
    return {
        "rejector": row.rejector, "remark": remark, "kind": kind, "cells": cells,
        "threshold": _conditions(row, results), "threshold_from": row.threshold_from,
    }  # fmt: skip


def share(value: float, interval: Interval | None = None) -> Cell:
    """Format a share in percent with its interval."""
    if interval is None:
        return Cell(f"{percent(value)}%")
    return Cell(f"{percent(value)}%", f"{percent(interval.lo)} to {percent(interval.hi)}")


def _conditions(row: Row, results: ScoredRun) -> str:
    """Return the conditions of acceptance; the threshold of the paper protocol is strict."""
    evaluation = results.evaluation
    score = evaluation.scores.get(row.rejector)
    sign = "≥" if row.protocol == "deploy" else ">"
    last = f"{sign} {number(row.point.threshold)}"
    if score is None:
        return f"{row.rejector.split()[0]} {last}"
    pairs = score.rule(row.point.threshold).pairs
    known = {row.rejector: score} | evaluation.scores  # the row's own name comes first
    names = [
        next((name for name, one in known.items() if one == part), type(part).__name__)
        for part, _ in pairs
    ]
    gates = [f"{name} ≥ {number(at)}" for name, (_, at) in zip(names, pairs[:-1], strict=False)]
    return ", then ".join([*gates, f"{names[-1]} {last}"])


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        value = [f"{k}: {v}" for k, v in value.items()]
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
