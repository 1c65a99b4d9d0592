"""A measured table as a Markdown page: one section per attack, one row per score."""

from collections.abc import Sequence

from demur.evaluate import ORACLE
from demur.metrics import Difference
from demur.paper.measure import DIVERGED, Mean, SeedAverage, TrainingResult, average_seeds
from demur.paper.tables import PUBLISHED_NOTE, Figure, PaperFigures, Table

HEADINGS = (
    "training", "score", "accuracy", "TPR-95: accuracy on accepted", "vs Con", "AUROC", "vs Con"
)  # fmt: skip
PAPER_HEADING = ("the paper",)
FROZEN_HEADINGS = ("frozen: coverage", "frozen: accepted errors")  # only with cal images
NOTES = (
    "Values are percent; AUROC is 0 to 1. `TPR-95` is the paper's protocol: the threshold accepts "
    "95% of the correct predictions of each evaluated set and uses its labels.",
    "Square brackets are 95% intervals. `vs Con` is a paired difference on the same images and "
    "includes the variance over seeds if there are several. ± is the standard deviation over "
    "seeds.",
)
FROZEN_NOTE = (
    "`frozen` is the deployed protocol: the threshold accepts 95% of the correct predictions on "
    "clean cal images and is fixed before any attack."
)
HELD_OUT_NOTE = (
    "All images are held-out training images, so that settings are compared without using the test "
    "images."
)
ADAPTIVE_NOTE = (
    "An adaptive attack targets the head's own score (Con if there is none), so it does not target "
    "the Con row of a net with another score."
)
LEARNED_CAPTION = "Rejectors fitted to features of the trained net, TPR-95 and AUROC:"
NO_CORRECT_NOTE = (
    "AUROC is undefined if no prediction is correct; the table then shows 0.500 [0.000, 1.000]."
)


def markdown(table: Table, results: Sequence[TrainingResult], command: str, version: str) -> str:
    """The table as a Markdown page; `command` and `version` are quoted as its origin."""
    averages = average_seeds(results)
    seeds = len({result.seed for result in results})
    count = f"up to {seeds} seeds each" if seeds > 1 else "1 seed each"
    origin = f"Made by `{command}`, {count}, demur {version}."
    notes = sorted({note for result in results for note in result.notes})
    parts = [f"# {table.title}", origin, _explanation(table, averages), *notes]
    for label in table.attacks:
        rows = [row for row in averages if row.attack == label]
        kind = "images" if table.split == "test" else f"{table.split} images"
        n = f", {max(row.n for row in rows)} {kind}" if rows else ""
        parts += [f"## {label}{n}"]
        parts += _section(rows, seeds, table) if rows else ["Not measured yet."]
    if missing := _missing(results):
        parts += ["## Missing", "\n".join(missing)]
    runs = [
        f"| {result.entry} | {result.seed} | {result.run} | {result.recipe[:12]} |"
        for result in results
        if result.rows or result.failure.startswith(DIVERGED)
    ]
    header = "| training | seed | run | recipe |\n|---|---|---|---|"
    parts += ["## Runs", "\n".join([header, *runs])]
    return "\n\n".join(parts) + "\n"


def _explanation(table: Table, rows: Sequence[SeedAverage]) -> str:
    """The notes on the columns that the table has."""
    first, second = NOTES
    frozen = [FROZEN_NOTE] if any(row.protocol == "deploy" for row in rows) else []
    adaptive = [ADAPTIVE_NOTE] if any("adaptive" in label for label in table.attacks) else []
    held = [HELD_OUT_NOTE] if table.split in ("val", "cal") else []
    paper = [PUBLISHED_NOTE] if table.published else []
    no_correct = [NO_CORRECT_NOTE] if any(row.all.value == 0 for row in rows) else []
    return " ".join([first, *frozen, second, *adaptive, *held, *paper, *no_correct])


def _missing(results: Sequence[TrainingResult]) -> list[str]:
    """One item per entry and reason, with all its seeds."""
    seeds: dict[tuple[str, str], list[int]] = {}
    for result in results:
        if result.failure:
            seeds.setdefault((result.entry, result.failure), []).append(result.seed)
    return [
        f"- {entry}, seed{'s' if len(which) > 1 else ''} {', '.join(map(str, which))}: {failure}"
        for (entry, failure), which in seeds.items()
    ]


def _section(rows: Sequence[SeedAverage], seeds: int, table: Table) -> list[str]:
    """The grids of one attack: the nets' own scores, then the fitted rejectors."""
    most = max(row.n for row in rows)
    learned = [
        row
        for row in rows
        if row.rejector in table.learned and row.protocol == "paper" and row.n == most
    ]
    own = [row for row in rows if row.rejector not in table.learned]
    fitted = [LEARNED_CAPTION, _learned_grid(learned, seeds, table)] if learned else []
    return [_grid(own, seeds, table.published), *fitted]


def _grid(rows: Sequence[SeedAverage], seeds: int, published: PaperFigures) -> str:
    """One row per score: the paper's protocol, then the deployed one if there is one."""
    frozen = {(row.entry, row.rejector, row.n): row for row in rows if row.protocol == "deploy"}
    most = max(row.n for row in rows)
    in_paper = any(attack == rows[0].attack for _, _, attack in published)
    headings = HEADINGS + (PAPER_HEADING if in_paper else ()) + (FROZEN_HEADINGS if frozen else ())
    lines: list[Sequence[str]] = [headings, ["---", "---", *["---:"] * (len(headings) - 2)]]
    for row in rows:
        if row.protocol == "paper" and row.rejector != ORACLE:
            paper = published.get((row.entry, row.rejector, row.attack))
            deployed = frozen.get((row.entry, row.rejector, row.n))
            extra = ((_published(paper),) if in_paper else ()) + (
                _frozen(deployed) if frozen else ()
            )
            fewer = f", {row.n} images" if row.n < most else ""
            lines.append((_name(row, seeds) + fewer, *_cells(row), *extra))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _learned_grid(rows: Sequence[SeedAverage], seeds: int, table: Table) -> str:
    """One row per net, one column per rejector; the paper's numbers of the net follow below."""
    by_name = {(row.entry, row.rejector): row for row in rows}
    lines: list[Sequence[str]] = [
        ("training", *table.learned), ("---", *["---:"] * len(table.learned))
    ]  # fmt: skip
    for entry in dict.fromkeys(row.entry for row in rows):
        of_entry = {name: by_name.get((entry, name)) for name in table.learned}
        first = next(row for row in of_entry.values() if row)
        cells = [
            f"{_percent(row.right)}, {row.auroc.value:.3f}" if row else ""
            for row in of_entry.values()
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
        _difference(row.right_vs_con, 100, 1, row.rejector), _figure(row.auroc, 1, 3),
        _difference(row.auroc_vs_con, 1, 3, row.rejector),
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


def _difference(gap: Difference, scale: float, digits: int, rejector: str) -> str:
    if rejector == "Con":
        return ""
    value, lo, hi = (f"{scale * end:+.{digits}f}" for end in (gap.value, gap.lo, gap.hi))
    return f"{value} [{lo}, {hi}]"
