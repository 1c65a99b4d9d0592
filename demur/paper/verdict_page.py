"""The verdicts on R-Con as a section of RESULTS.md."""

from collections import Counter
from collections.abc import Iterable, Sequence

from demur.paper.verdicts import Measure, Verdict

INTRODUCTION = """\
## Does R-Con beat the confidence of its own net?

R-Con minus confidence on the same images of the same net, with paired 95% intervals (bootstrap over
images; DeLong for AUROC). The interval decides: *better*, *worse*, or *equal* where it contains
zero; about one in twenty differs by chance. A star marks attacks that stop at the first success,
whose rankings are artefacts; they are not counted. Of each attack the record of most images counts.

- **Paper's threshold**: accuracy in percent of the accepted images, each score accepting 95% of the
  correct predictions of the attacked images.
- **Deployed threshold**: the same accuracy, each score accepting 95% of the correct predictions on
  clean images; those of the test set for nets that were trained on all other images.
"""
STRONGEST = """\
**Strongest attack**: accepted errors in percent of the images under RejectAutoAttack, aimed at each
score at its threshold from clean images. Less is better.
"""
MISSING = """\
Not measured; `RUN` is a run with weights (`demur train @{folder}/NET/recipe.txt --out RUN`):
"""
COLUMNS: tuple[tuple[Measure, str], ...] = (
    ("paper", "paper's threshold"),
    ("deployed", "deployed threshold"),
    ("auroc", "AUROC"),
)


def verdict_section(verdicts: Sequence[Verdict], folder: str) -> str:
    """The section: counts, a row for each net and attack, the strongest attack, what is missing."""
    ranked = [one for one in verdicts if one.measure != "strongest"]
    strongest = [one for one in verdicts if one.measure == "strongest"]
    measured = [one for one in strongest if one.word != "not measured"]
    lines = [INTRODUCTION, *_counts(verdicts), ""]
    lines += ["| net | attack | n | " + " | ".join(name for _, name in COLUMNS) + " |"]
    lines += ["|---|---|---:|" + "---|" * len(COLUMNS), *_rows(ranked), "", STRONGEST]
    if measured:
        lines += ["| net | n | Con | R-Con | difference |", "|---|---:|---:|---:|---|"]
        lines += [
            f"| {one.net} | {one.n:,} | {one.con:.1f} | {one.rcon:.1f} | {_cell(one)} |"
            for one in measured
        ]
    else:
        lines += ["No net has both records."]
    return "\n".join([*lines, "", *_missing(verdicts, folder)]).rstrip() + "\n"


def _counts(verdicts: Iterable[Verdict]) -> list[str]:
    """A sentence for each measure: how often R-Con is better, equal and worse."""
    names = (*COLUMNS, ("strongest", "strongest attack"))
    lines = []
    for measure, name in names:
        words = Counter(
            one.word for one in verdicts if one.measure == measure and not _is_artefact(one)
        )
        parts = [f"{words[word]} {word}" for word in ("better", "equal", "worse", "not measured")]
        lines.append(f"- {name}: {', '.join(parts)}")
    return lines


def _is_artefact(verdict: Verdict) -> bool:
    return bool(verdict.note) and verdict.word != "not measured"


def _rows(verdicts: Iterable[Verdict]) -> list[str]:
    groups: dict[tuple[str, str, int | None], dict[Measure, Verdict]] = {}
    for one in verdicts:
        groups.setdefault((one.net, one.attack, one.n), {})[one.measure] = one
    lines = []
    for (net, attack, n), own in groups.items():
        star = " *" if any(_is_artefact(one) for one in own.values()) else ""
        images = "" if n is None else f"{n:,}"
        cells = (_cell(own[measure]) if measure in own else "" for measure, _ in COLUMNS)
        lines.append(f"| {net} | {attack}{star} | {images} | " + " | ".join(cells) + " |")
    return lines


def _cell(verdict: Verdict) -> str:
    if verdict.difference is None or verdict.lo is None or verdict.hi is None:
        return verdict.word
    decimals = 3 if verdict.measure == "auroc" else 2
    value, lo, hi = (f"{end:+.{decimals}f}" for end in (verdict.difference, verdict.lo, verdict.hi))
    return f"{value} [{lo}, {hi}] {verdict.word}"


def _missing(verdicts: Iterable[Verdict], folder: str) -> list[str]:
    """What is not measured by the command that makes it."""
    nets: dict[str, list[str]] = {}
    for one in verdicts:
        if one.word == "not measured":
            nets.setdefault(one.note, []).append(one.net)
    lines = [MISSING.format(folder=folder)] if nets else []
    for command, names in nets.items():
        lines.append(f"- {'; '.join(dict.fromkeys(names))}: `{command}`")
    return lines
