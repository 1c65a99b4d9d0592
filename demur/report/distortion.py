"""Minimal distortions as a table."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from demur.evaluate.distortion import Distances
from demur.report.text import percent, show_table

UNITS = {"L2": "squared L2", "Linf": "Linf x 255", "Linf-adam": "Linf x 255, Adam"}
COLUMNS = (
    "broken, %", "wrong unattacked", "mean of broken", "median", "times normal",
    "paper: mean of all, rest 0",
)  # fmt: skip
CAPTION = (
    "adaptive: misclassified, with a score of at least the median of correct predictions on clean "
    "training images. Mean and median are over the images that the attack broke; times normal is "
    "over those that both attacks broke. The last column follows the paper: failed attacks and "
    "images misclassified without attack count as 0, which makes an attack that fails seem closer"
)


def show_distances(lines: Sequence[Distances]) -> None:
    """Print the table."""
    show_table(distance_table(lines))


def distance_table(lines: Sequence[Distances]) -> Table:
    """Return minimum-norm attacks by norm, normal beside adaptive."""
    table = Table(
        title=f"smallest change that breaks an image, n={lines[0].n}", title_justify="left",
        title_style="bold", header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
        caption=CAPTION, caption_justify="left",
    )  # fmt: skip
    table.add_column("distance, must be accepted by", no_wrap=True)
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
    """Format a line: the cells of COLUMNS."""
    ends = line.mean_interval
    mean = "" if line.mean is None else _three_digits(line.mean)
    return (
        percent(line.broken, line.broken_interval),
        percent(line.broken_clean),
        mean if ends is None else f"{mean} [{_three_digits(ends.lo)}, {_three_digits(ends.hi)}]",
        "" if line.median is None else _three_digits(line.median),
        "" if line.ratio_to_normal is None else f"{line.ratio_to_normal:.2f}",
        _three_digits(line.paper_mean),
    )


def _three_digits(value: float) -> str:
    """Format a number with three significant digits."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
