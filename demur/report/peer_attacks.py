"""Our attacks beside other libraries' as a table, for the terminal and for docs/attacks.md."""

from typing import Any

from rich import box
from rich.table import Table

from demur.report.text import show_table, terminal

COLUMNS = ("attack", "by", "right", "other verdicts", "s", "to prepare", "times ours",
           "largest change", "distance", "ours there")  # fmt: skip
OURS = "demur"
SPARE = 1  # images that chance may decide
NEAR = 1.02  # of the best peer's distance


def cells(line: dict[str, Any]) -> tuple[str, ...]:
    """One line of the report as text; what an attack has not is left empty."""
    ready, left = line["ready_s"], line["outside"]
    beside = ("", "", "")
    if line["by"] != OURS:
        beside = str(line["differ"]), f"{line['times_ours']:.2f}", _far(line["distance_ours"])
    return (
        line["attack"], line["by"], str(line["right"]), beside[0], f"{line['seconds']:.1f}",
        "" if ready is None else f"{ready:.1f}", beside[1],
        _far(line["largest"]) + (f", {left} outside" if left else ""), _far(line["distance"]),
        beside[2],
    )  # fmt: skip


def weaker(report: dict[str, Any]) -> list[str]:
    """Where ours leaves more right than a peer's, or goes further."""
    found = []
    ours = {line["attack"]: line for line in report["lines"] if line["by"] == OURS}
    for line in report["lines"]:
        more = ours[line["attack"]]["right"] - line["right"]
        if more > SPARE:
            found.append(f"{line['attack']} leaves {more} images more right than {line['by']}'s")
        if line["distance"] is not None and line["distance_ours"] > NEAR * line["distance"]:
            further = 100 * (line["distance_ours"] / line["distance"] - 1)
            found.append(f"{line['attack']} goes {further:.1f}% further than {line['by']}'s")
    return found


def sentences(report: dict[str, Any]) -> list[str]:
    """What is not in the table."""
    verdict = "; ".join(weaker(report)) or (
        f"none of ours leaves more than {SPARE} image more right than a peer's, or goes more than "
        f"{100 * (NEAR - 1):.0f}% further"
    )
    return [verdict, *report["missing"], *report["notes"]]


def show_peer_attacks(report: dict[str, Any]) -> None:
    """Print the report."""
    machine = report["machine"]
    table = Table(
        box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0),
        title=f"{report['run']}, {report['ball']}, {report['right_unattacked']} of {report['n']} "
        f"right unattacked; {machine['device']}, torch {machine['torch']}, "
        f"{machine['threads']} threads",
    )  # fmt: skip
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:2] else "right")
    for line in report["lines"]:
        if line["by"] == OURS and table.rows:
            table.add_section()
        table.add_row(*cells(line))
    show_table(table)
    for sentence in sentences(report):
        terminal().print(sentence, soft_wrap=True)


def _far(distance: float | None) -> str:
    return "" if distance is None else f"{distance:.4f}"
