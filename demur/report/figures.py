"""The figure of worst-score records, and figures as elements of a page."""

import html
import re
from collections.abc import Sequence

from demur.errors import import_optional
from demur.evaluate.accepted_errors import ScoredWorstCase
from demur.report import plot
from demur.report.plot import FAINT, INK, drawing, saved


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
