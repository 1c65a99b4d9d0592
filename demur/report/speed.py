"""A speed report as a table and sentences."""

from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from demur.report.text import show_table, terminal

COLUMNS = ("what", "batch", "batch norm", "arithmetic", "s / epoch", "images / s", "of peak",
           "GiB", "to prepare, s")  # fmt: skip


def cells(line: dict[str, Any]) -> tuple[str, ...]:
    """Format one line of the report."""
    share, memory = line["share_of_peak"], line["memory_gib"]
    return (
        line["what"], str(line["batch_size"]), line["bn"], line["precision"],
        f"{line['epoch_s']:.2f}", f"{line['images_per_s']:,.0f}",
        "" if share is None else f"{100 * share:.0f}%",
        "" if memory is None else f"{memory:.1f}", f"{line['prepare_s']:.0f}",
    )  # fmt: skip


def sentences(report: dict[str, Any]) -> list[str]:
    """Return the figures that are not in the table, as sentences."""
    found = []
    for mode, cost in report.get("head", {}).items():
        spread = max(max(ms) / min(ms) - 1 for ms in (cost["ms"], cost["ms_without"]))
        found.append(
            f"the head costs {100 * cost['share']:+.2f}% of a step with batch norm in {mode} mode; "
            f"captures of one step are up to {100 * spread:.2f}% apart{_extra_kernels(cost)}"
        )
    if "attack" in report:
        attack = report["attack"]
        found.append(
            f"PGD-100 on {attack['images']:,} images: {attack['seconds']:.2f} s at batch "
            f"{attack['batch_size']} ({attack['prepare_s']:.0f} s to prepare)"
        )
    for key, mode in (("where", "train"), ("where_eval", "eval")):
        if key in report:
            kinds = report[key]["kinds_ms"].items()
            parts = ", ".join(f"{kind} {ms:.2f} ms" for kind, ms in kinds)
            found.append(f"a fast step with batch norm in {mode} mode: {parts}")
    return found


def _extra_kernels(cost: dict[str, Any]) -> str:
    """Return the time of the kernels that the step with the head launches in addition."""
    more = [kernel for kernel in cost["kernels"].values() if kernel["launches"]]
    if not more:
        return ""
    launches, ms = (sum(kernel[part] for kernel in more) for part in ("launches", "ms"))
    share = ms / median(cost["ms_without"])
    return f"; it launches {launches:.0f} more kernels, which take {100 * share:.2f}%"


def show_speed(report: dict[str, Any]) -> None:
    """Print the report as a table and sentences."""
    machine = report["machine"]
    table = Table(box=box.SIMPLE_HEAD, title=f"{machine['device']}, torch {machine['torch']}")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "what" else "right")
    for line in report["lines"]:
        table.add_row(*cells(line))
    show_table(table)
    console = terminal()
    for sentence in sentences(report):
        console.print(sentence)
