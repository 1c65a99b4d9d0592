"""A measured table as Markdown: one part an attack, one line a score."""

from collections.abc import Sequence

from demur.evaluate import ORACLE
from demur.metrics import Difference
from demur.paper.measured import OVERFLOW, TrainingResult
from demur.paper.published import NOTE as PUBLISHED_NOTE
from demur.paper.published import Figure, Published
from demur.paper.seeds import Mean, SeedAverage, average_seeds
from demur.paper.tables import Table

HEADINGS = (
    "trained by", "score", "right of all", "TPR-95: right of accepted", "vs Con", "AUROC", "vs Con"
)  # fmt: skip
PAPER = ("the paper",)
FROZEN = ("frozen: coverage", "frozen: accepted and wrong")  # where cal images were held out
NOTES = (
    "Percent, AUROC from 0 to 1. `TPR-95` is the paper's protocol: the threshold keeps 95% of the "
    "right answers of each scored set, chosen with labels.",
    "Square brackets are 95% intervals; `vs Con` is paired, on the same images, and includes the "
    "spread over seeds where there are several; ± is the standard deviation over seeds.",
)
FROZEN_NOTE = (
    "`frozen` is the deployed protocol: the threshold keeps 95% of right answers on clean cal "
    "images and is fixed before any attack."
)
HELD_OUT_NOTE = (
    "All images are training images that were held out, so that settings can be compared without "
    "a look at the test images."
)
ADAPTIVE_NOTE = (
    "An adaptive attack is after the head's own score (Con where there is none), not after Con "
    "beside."
)
LEARNED = "Learned from features of the finished net, TPR-95 and AUROC:"
ONE_KIND_NOTE = (
    "Where no answer is right there is nothing to order: AUROC 0.500 [0.000, 1.000] says just that."
)


def markdown(table: Table, lines: Sequence[TrainingResult], command: str, version: str) -> str:
    """The table as a page."""
    shown = average_seeds(lines)
    seeds = len({line.seed for line in lines})
    each = f"up to {seeds} seeds each" if seeds > 1 else "1 seed each"
    made = f"Made by `{command}`, {each}, demur {version}."
    notes = sorted({note for line in lines for note in line.notes})
    parts = [f"# {table.title}", made, _explained(table, shown), *notes]
    for label in table.attacks:
        rows = [each for each in shown if each.attack == label]
        kind = "images" if table.split == "test" else f"{table.split} images"
        n = f", {max(row.n for row in rows)} {kind}" if rows else ""
        parts += [f"## {label}{n}"]
        parts += _part(rows, seeds, table) if rows else ["Not measured yet."]
    if missing := _missing(lines):
        parts += ["## Not there", "\n".join(missing)]
    runs = [
        f"| {line.entry} | {line.seed} | {line.run} | {line.recipe[:12]} |"
        for line in lines
        if line.rows or line.failure.startswith(OVERFLOW)
    ]
    heads = "| trained by | seed | run | recipe |\n|---|---|---|---|"
    parts += ["## Where the figures come from", "\n".join([heads, *runs])]
    return "\n\n".join(parts) + "\n"


def _explained(table: Table, shown: Sequence[SeedAverage]) -> str:
    """What the columns say, as far as they are there."""
    first, second = NOTES
    frozen = [FROZEN_NOTE] if any(each.protocol == "deploy" for each in shown) else []
    adaptive = [ADAPTIVE_NOTE] if any("adaptive" in label for label in table.attacks) else []
    held = [HELD_OUT_NOTE] if table.split in ("val", "cal") else []
    paper = [PUBLISHED_NOTE] if table.published else []
    one_kind = [ONE_KIND_NOTE] if any(each.all.value == 0 for each in shown) else []
    return " ".join([first, *frozen, second, *adaptive, *held, *paper, *one_kind])


def _missing(lines: Sequence[TrainingResult]) -> list[str]:
    """What is not there and why, the seeds of an entry together."""
    seeds: dict[tuple[str, str], list[int]] = {}
    for line in lines:
        if line.failure:
            seeds.setdefault((line.entry, line.failure), []).append(line.seed)
    return [
        f"- {entry}, seed{'s' if len(of) > 1 else ''} {', '.join(map(str, of))}: {failure}"
        for (entry, failure), of in seeds.items()
    ]


def _part(rows: Sequence[SeedAverage], seeds: int, table: Table) -> list[str]:
    """What is measured under one attack: scores of the nets, then what learned from them."""
    most = max(row.n for row in rows)
    learned = [
        row
        for row in rows
        if row.rejector in table.learned and row.protocol == "paper" and row.n == most
    ]
    own = [row for row in rows if row.rejector not in table.learned]
    beside = [LEARNED, _learned_grid(learned, seeds, table)] if learned else []
    return [_grid(own, seeds, table.published), *beside]


def _grid(rows: Sequence[SeedAverage], seeds: int, published: Published) -> str:
    """One line a score: the paper's protocol and, beside it, the deployed one if there is one."""
    frozen = {(row.entry, row.rejector, row.n): row for row in rows if row.protocol == "deploy"}
    most = max(row.n for row in rows)
    known = any(attack == rows[0].attack for _, _, attack in published)
    headings = HEADINGS + (PAPER if known else ()) + (FROZEN if frozen else ())
    lines: list[Sequence[str]] = [headings, ["---", "---", *["---:"] * (len(headings) - 2)]]
    for row in rows:
        if row.protocol == "paper" and row.rejector != ORACLE:
            paper = published.get((row.entry, row.rejector, row.attack))
            beside = ((_published(paper),) if known else ()) + (
                _frozen(frozen.get((row.entry, row.rejector, row.n))) if frozen else ()
            )
            where = f", {row.n} images" if row.n < most else ""
            lines.append((_name(row, seeds) + where, *_cells(row), *beside))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _learned_grid(rows: Sequence[SeedAverage], seeds: int, table: Table) -> str:
    """One line a net, a column for each rejector; what the paper has of the same net below it."""
    found = {(row.entry, row.rejector): row for row in rows}
    lines: list[Sequence[str]] = [
        ("trained by", *table.learned), ("---", *["---:"] * len(table.learned))
    ]  # fmt: skip
    for entry in dict.fromkeys(row.entry for row in rows):
        of = {name: found.get((entry, name)) for name in table.learned}
        first = next(row for row in of.values() if row)
        cells = [
            f"{_percent(row.right)}, {row.auroc.value:.3f}" if row else "" for row in of.values()
        ]
        lines.append((_name(first, seeds), *cells))
        paper = [table.published.get((entry, name, first.attack)) for name in table.learned]
        if any(paper):
            lines.append((f"{entry}, the paper", *map(_published, paper)))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _published(figure: Figure | None) -> str:
    return "" if figure is None else f"{figure.right:.2f}, {figure.auroc:.3f}"


def _name(row: SeedAverage, seeds: int) -> str:
    return row.entry + (f" ({row.seeds} of {seeds} seeds)" if row.seeds < seeds else "")


def _cells(row: SeedAverage) -> tuple[str, ...]:
    return (
        row.rejector, _percent(row.all), _percent(row.right),
        _versus(row.right_vs_con, 100, 1, row.rejector), _figure(row.auroc, 1, 3),
        _versus(row.auroc_vs_con, 1, 3, row.rejector),
    )  # fmt: skip


def _frozen(row: SeedAverage | None) -> tuple[str, str]:
    return ("", "") if row is None else (_percent(row.coverage), _percent(row.accepted_wrong))


def _percent(mean: Mean) -> str:
    return _figure(mean, 100, 1)


def _figure(mean: Mean, scale: float, digits: int) -> str:
    text = f"{scale * mean.value:.{digits}f}"
    if mean.spread is not None:
        return f"{text} ± {scale * mean.spread:.{digits}f}"
    if mean.interval is not None:
        lo, hi = (f"{scale * end:.{digits}f}" for end in mean.interval)
        return f"{text} [{lo}, {hi}]"
    return text


def _versus(gap: Difference, scale: float, digits: int, rejector: str) -> str:
    if rejector == "Con":
        return ""
    value, lo, hi = (f"{scale * end:+.{digits}f}" for end in (gap.value, gap.lo, gap.hi))
    return f"{value} [{lo}, {hi}]"
