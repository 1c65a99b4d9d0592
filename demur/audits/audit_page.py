"""An audit as a page, as Markdown and as JSON, with what a reader needs to repeat it.

report.save("audit.html")      # or audit.md, or audit.json (audit.schema.json describes it)
"""

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from demur.attacks.attack_model import Model
from demur.audits.ensemble_result import CLEAN, EnsembleResult, count_cell
from demur.errors import BadInput
from demur.files.checked_files import tensor_digest, write_text
from demur.files.output_paths import check_output_file
from demur.images import png_url
from demur.version import code_version

NO_JINJA = "the page needs jinja2; install it with pip install 'demur[report]', or name a .md file"
SAMPLES = 6  # broken images on the page
WIDE, HIGH = 320, 120  # of a curve, in pixels
Curve = Sequence[tuple[str, int, int]]  # a name, images, all images


def provenance(
    model: Model, images: tuple[Tensor, Tensor], device: object, **options: Any
) -> dict[str, Any]:
    """Return the options and what else is needed to repeat an audit, as JSON values."""
    weights = model.state_dict() if isinstance(model, nn.Module) else {}
    named = {name: part for name, part in weights.items() if isinstance(part, Tensor)}
    return options | {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": str(device),
        "weights": tensor_digest(named).hex() if named else "",
        "images": tensor_digest(dict(zip("xy", images, strict=True))).hex(),
        "software": {
            "demur": code_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


def check_format(path: str | Path) -> None:
    """Raise BadInput if a report cannot be written there, or not as the ending of the path says."""
    check_output_file(str(path))
    if Path(path).suffix.lower() not in ("", ".html", ".htm", ".md", ".json"):
        raise BadInput(f"{path} is no .html, .md or .json file; name one")


def save(report: Any, path: str | Path) -> None:
    """Write the report in the format that the ending of the path names."""
    check_format(path)
    match Path(path).suffix.lower():
        case ".json":
            text = json.dumps(report.to_json(), indent=1) + "\n"
        case ".md":
            text = markdown(report)
        case _:
            text = html(report)
    write_text(Path(path), text)


def rows_of(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the entries of nested JSON values as names and texts."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from rows_of(value, f"{prefix}{name} ")
        elif value not in ("", None):
            yield f"{prefix}{name}", str(value)


def member_rows(result: EnsembleResult) -> list[tuple[str, ...]]:
    """Return the cells of the table of attacks: budget, time and what each one broke."""
    return [
        (
            m.name, f"{m.gradient_queries:g} gradients" if m.gradient_queries
            else f"{m.forward_queries} passes", f"{m.attacked}", f"{m.broke}", f"{m.seconds:.1f}",
            m.attack,
        )
        for m in result.members
    ]  # fmt: skip


MEMBER_HEADS = ("attack", "queries per image", "images", "broken", "seconds", "settings")


def markdown(report: Any) -> str:
    """Return the report as Markdown."""
    lines = [f"# Audit of {_plain(report.model)}", "", f"**{report.grade}.**", ""]
    lines += [f"- {reason}" for reason in report.verdict.reasons]
    lines += ["", report.setting, "", *_table(("what", "images, share, 95% interval"), (
        (name, count_cell(counts, kind).strip()) for name, counts, kind in report.figures()
    ))]  # fmt: skip
    for result in report.results:
        lines += ["", f"## {result.attack}", "", *_table(MEMBER_HEADS, member_rows(result))]
    lines += ["", "## Checks", ""]
    for check in report.sanity:
        state = f"not checked, since it needs {check.missing}" if check.missing else "not found"
        lines += [f"- **{flag.kind}**: {flag.observed} *{flag.remedy}*" for flag in check.flags]
        lines += [] if check.flags else [f"- {check.kind}: {state}"]
    lines += [f"- **warning**: {sentence}" for sentence in report.warnings]
    curve = ((radius, f"{right} of {n}") for radius, right, n in report.curve)
    lines += ["", "## Plain PGD by radius", "", *_table(("radius", "correct"), curve)]
    lines += ["", "## To repeat it", "", *_table(("what", "value"), rows_of(report.provenance))]
    return "\n".join(lines) + "\n"


def _table(heads: Sequence[str], rows: Any) -> list[str]:
    cells = [" | ".join(map(_plain, row)) for row in (heads, *rows)]
    return [f"| {cells[0]} |", "|---" * len(heads) + "|", *(f"| {row} |" for row in cells[1:])]


def _plain(text: str) -> str:
    """Return a text that Markdown shows as it is, in one line."""
    return " ".join(text.split()).replace("<", "&lt;").replace("|", "\\|")


def html(report: Any) -> str:
    """Return the report as one HTML page that needs no other file."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError:
        raise BadInput(NO_JINJA) from None
    text = files("demur.audits").joinpath("audit.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(text).render(
        report=report,
        figures=[
            (name, count_cell(counts, kind), 100 * counts.share(kind))
            for name, counts, kind in report.figures()
        ],
        heads=MEMBER_HEADS,
        members=[(part.attack, member_rows(part), left_after(part)) for part in report.results],
        samples=[(part.attack, list(_samples(part, report.clean))) for part in report.results],
        provenance=list(rows_of(report.provenance)),
        size=(WIDE, HIGH),
        line=lambda curve: " ".join(
            f"{10 + k * (WIDE - 20) / max(1, len(curve) - 1):.0f},"
            f"{HIGH - 10 - (HIGH - 20) * share / max(1, n):.0f}"
            for k, (_, share, n) in enumerate(curve)
        ),
    )


def left_after(result: EnsembleResult) -> Curve:
    """Return the images that are not broken without an attack and after each attack."""
    n = len(result.y)
    left = n - result.broken_by.count(CLEAN)
    curve = [(CLEAN, left, n)]
    for member in result.members:
        left -= member.broke
        curve.append((member.name, left, n))
    return curve


def _samples(result: EnsembleResult, clean: Tensor) -> Iterator[tuple[str, str, str, str]]:
    """Yield a caption and three images of the first broken ones: clean, attacked, difference."""
    broken = [i for i, name in enumerate(result.broken_by) if name not in ("", CLEAN)]
    for i in broken[:SAMPLES]:
        x, x_adv = (part[i].detach().cpu().float() for part in (clean, result.x_adv))
        change = x_adv - x
        scaled = change / (2 * change.abs().max().clamp_min(1e-12)) + 0.5
        caption = f"{int(result.y[i])} as {int(result.labels[i])}, {result.broken_by[i]}"
        yield caption, png_url(x), png_url(x_adv), png_url(scaled)
