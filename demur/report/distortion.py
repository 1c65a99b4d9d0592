"""Least changes as a table."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from demur.evaluate.distortion import Distances
from demur.report.text import percent, show_table

UNITS = {"L2": "squared L2", "Linf": "Linf x 255", "Linf-adam": "Linf x 255, Adam"}
COLUMNS = (
    "broken, %", "as they came", "mean of broken", "median", "times normal",
    "paper: mean of all, rest 0",
)  # fmt: skip
CAPTION = (
    "adaptive: wrong, and the score reaches the median of the right answers on clean training "
    "images. Mean and median are over the images that a change broke; times normal over those that "
    "both broke. The last column is the paper's way: failures and images wrong as they came count "
    "as 0, so an attack that fails looks as if it had come nearer"
)


def show_distances(lines: Sequence[Distances]) -> None:
    """Print the table."""
    show_table(distance_table(lines))


def distance_table(lines: Sequence[Distances]) -> Table:
    """Attacks of least change, normal beside adaptive, by norm."""
    table = Table(
        title=f"least change that breaks an image, n={lines[0].n}", title_justify="left",
        title_style="bold", header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
        caption=CAPTION, caption_justify="left",
    )  # fmt: skip
    table.add_column("distance, has to be accepted by", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for norm in dict.fromkeys(line.norm for line in lines):
        table.add_row(UNITS[norm], style="bold")
        for line in lines:
            if line.norm == norm:
                table.add_row(f"  {line.rejector_name} ({line.attack})", *cells(line))
        table.add_section()
    return table


def cells(line: Distances) -> tuple[str, ...]:
    """A line as text."""
    ends = line.mean_interval
    mean = "" if line.mean is None else _short(line.mean)
    return (
        percent(line.broken, line.broken_interval),
        percent(line.as_they_came),
        mean if ends is None else f"{mean} [{_short(ends.lo)}, {_short(ends.hi)}]",
        "" if line.median is None else _short(line.median),
        "" if line.beyond_normal is None else f"{line.beyond_normal:.2f}",
        _short(line.paper_mean),
    )


def _short(value: float) -> str:
    """Three digits that mean something."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
