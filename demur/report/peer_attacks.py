"""Our attacks compared with other libraries', as a table and sentences."""

from typing import Any

from rich import box
from rich.table import Table

from demur.report.text import show_table, terminal

COLUMNS = ("attack", "by", "correct", "other verdicts", "s", "to prepare", "times ours",
           "largest change", "distance", "ours there")  # fmt: skip
OURS = "demur"
MAX_EXTRA = 1  # images that ours may leave correct beyond a peer's, by chance
MAX_RATIO = 1.02  # of our distance to a peer's


def cells(line: dict[str, Any]) -> tuple[str, ...]:
    """Format one line of the report; missing values are empty."""
    ready, left = line["ready_s"], line["outside"]
    versus_ours = ("", "", "")
    if line["by"] != OURS:
        versus_ours = (
            str(line["differ"]),
            f"{line['times_ours']:.2f}",
            _format_distance(line["distance_ours"]),
        )
    return (
        line["attack"], line["by"], str(line["right"]), versus_ours[0], f"{line['seconds']:.1f}",
        "" if ready is None else f"{ready:.1f}", versus_ours[1],
        _format_distance(line["largest"]) + (f", {left} outside" if left else ""),
        _format_distance(line["distance"]),
        versus_ours[2],
    )  # fmt: skip


def weaker(report: dict[str, Any]) -> list[str]:
    """Return where our attack leaves more images correct than a peer's, or needs larger changes."""
    found = []
    ours = {line["attack"]: line for line in report["lines"] if line["by"] == OURS}
    for line in report["lines"]:
        more = ours[line["attack"]]["right"] - line["right"]
        if more > MAX_EXTRA:
            found.append(f"{line['attack']} leaves {more} more images correct than {line['by']}'s")
        if line["distance"] is not None and line["distance_ours"] > MAX_RATIO * line["distance"]:
            further = 100 * (line["distance_ours"] / line["distance"] - 1)
            found.append(
                f"{line['attack']} needs changes {further:.1f}% larger than {line['by']}'s"
            )
    return found


def sentences(report: dict[str, Any]) -> list[str]:
    """Return the comparison in words, missing libraries and notes."""
    verdict = "; ".join(weaker(report)) or (
        f"none of our attacks leaves more than {MAX_EXTRA} more image correct than a peer's, or "
        f"needs changes more than {100 * (MAX_RATIO - 1):.0f}% larger"
    )
    return [verdict, *report["missing"], *report["notes"]]


def show_peer_attacks(report: dict[str, Any]) -> None:
    """Print the report as a table and sentences."""
    machine = report["machine"]
    table = Table(
        box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0),
        title=f"{report['run']}, {report['ball']}, {report['right_unattacked']} of {report['n']} "
        f"correct unattacked; {machine['device']}, torch {machine['torch']}, "
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


def _format_distance(distance: float | None) -> str:
    return "" if distance is None else f"{distance:.4f}"
