"""The named tables: their recipes, the attacks they are evaluated under, the published numbers.

    TABLES["methods-digits"].entries["pgdat-rr"]                    # a recipe
    published_table2(("clean", *RADII))["pgdat-rr", "R-Con", "clean"]    # 86.91, 0.861

The paper scores CARL and ATRO by their margin. Its CCAT is that of the reference code.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from demur.data import SplitName
from demur.errors import BadInput, suggestion
from demur.paper.published import PAPER_TABLES, PaperRow
from demur.recipes import RECIPES, Recipe, with_changes
from demur.runs import run_folder


class Figure(NamedTuple):
    """The published numbers of one rejector under one attack."""

    right: float  # accuracy on accepted images at TPR 95, in percent
    auroc: float


PaperFigures = Mapping[tuple[str, str, str], Figure]  # by entry, score and attack
PUBLISHED_NOTE = (
    "`the paper` is TPR-95 and AUROC of the paper's Table 2: 110 epochs, the checkpoint with the "
    "best result on the test images."
)


def published_table2(attacks: Sequence[str]) -> PaperFigures:
    """The paper's Table 2; `attacks` are demur's names of its four columns."""
    return {
        (row.entry, _rejector_name(row), attack): Figure(*row.values[2 * column : 2 * column + 2])
        for row in PAPER_TABLES[2].rows
        for column, attack in enumerate(attacks)
    }


def _rejector_name(row: PaperRow) -> str:
    return row.rejector or RECIPES[f"cifar10-{row.entry}"].head_rejector[0]


@dataclass(frozen=True)
class Table:
    """Recipes by entry name, and the attacks they are evaluated under.

    A recipe whose base is the name of an entry starts from that entry's run with the same seed.
    """

    title: str
    entries: Mapping[str, Recipe]
    attacks: tuple[str, ...]
    split: SplitName = "test"  # the attacked images
    learned: tuple[str, ...] = ()  # rejectors fitted to features of every trained net
    published: PaperFigures = field(default_factory=dict)
    command: tuple[str, ...] = ("demur", "table")  # that makes it; its name follows

    def recipe(self, entry: str, seed: int) -> Recipe:
        """The recipe of one training: entry and seed."""
        recipe = replace(self.entries[entry], seed=seed)
        based = recipe.base in self.entries
        return replace(recipe, base=self.folder(str(recipe.base), seed).name) if based else recipe

    def folder(self, entry: str, seed: int) -> Path:
        """The run folder of one training."""
        return run_folder(entry_folder(entry), self.recipe(entry, seed), changed=True)

    def only(self, names: tuple[str, ...]) -> "Table":
        """The table with only these entries and their bases, in the original order.

        Raises:
            BadInput: There is no such entry.
        """
        for name in names:
            if name not in self.entries:
                hint = suggestion(name, self.entries)
                raise BadInput(f"the table has no entry {name!r}; {hint}")
        wanted = {self.entries[name].base for name in names}.union(names)
        entries = {name: recipe for name, recipe in self.entries.items() if name in wanted}
        return replace(self, entries=entries)

    def with_changes(self, changes: Iterable[str]) -> "Table":
        """The table with KEY=VALUE changes applied to every recipe.

        Raises:
            BadInput: A change does not apply to a recipe; the message names its entry.
        """
        all_changes, entries = tuple(changes), {}
        for name, recipe in self.entries.items():
            try:
                entries[name] = with_changes(recipe, all_changes)
            except BadInput as error:
                raise BadInput(f"the entry {name} cannot be changed: {error}") from error
        return replace(self, entries=entries)


def _every_pair(data: str) -> dict[str, Recipe]:
    """Recipes of every framework with every head of the paper that it combines with."""
    entries = {}
    for framework in ("standard", "pgdat", "trades", "ccat", "ccat-reference"):
        plain = RECIPES[f"{data}-{framework}"]
        entries[framework] = plain
        for head in ("RR", "EBD", "SNet", "ATRO", "CARL"):
            with suppress(BadInput):
                entries[f"{framework}-{head.lower()}"] = with_changes(plain, [f"head={head}()"])
    return entries


PAPER = ["data.split=paper"]
# the paper uses no EMA; the stored runs were trained with a longer warm-up
COMPARED_CHANGES = ["ema=0", "schedule.warmup=0.3"]
METHODS = (  # in the order of the paper's Table 2
    "standard", "pgdat", "pgdat-snet", "pgdat-ebd", "pgdat-carl", "pgdat-atro", "pgdat-rr",
    "trades", "trades-rr", "ccat", "ccat-rr", "ccat-reference", "ccat-reference-rr",
)  # fmt: skip
RADII = (
    "pgd-100:restarts=10", "pgd-100:restarts=10,eps=16/255", "pgd-100-l2:restarts=10",
)  # fmt: skip
ADAPTIVE = ("clean", "pgd-20", "adaptive", "adaptive-apgd")
TABLES: dict[str, Table] = {
    "methods-digits": Table(
        "Training methods on digits",
        _every_pair("digits")
        | {
            "pgdat-ebd-swapped": with_changes(  # the paper's failing pair, which diverges
                RECIPES["digits-pgdat-ebd"],
                ["head.m_in=-5.0", "head.m_out=-23.0", "head.weight=1.0"],
            )
        },
        ADAPTIVE,
    ),
    "methods-cifar10": Table(
        "Training methods on CIFAR-10 (ResNet-18, 36 epochs without EMA; best: 60 epochs with EMA)",
        {
            name: with_changes(RECIPES[f"cifar10-{name}-short"], PAPER + COMPARED_CHANGES)
            for name in METHODS
        }
        | {"best": with_changes(RECIPES["cifar10-best"], PAPER)},
        ("clean", "pgd-10", "pgd-100", *RADII),
        learned=("KD", "LID", "GDA", "GDA*", "GMM"),
        published=published_table2(("clean", *RADII)),
    ),
}


def entry_folder(entry: str) -> str:
    """The folder name of an entry: lower case, other characters replaced by single hyphens."""
    text = "".join(c if c.isalnum() or c in "._" else "-" for c in entry.lower())
    return "-".join(part for part in text.split("-") if part)


def table_by_name(name: str) -> Table:
    """The table with this name; raises BadInput if there is none."""
    if name not in TABLES:
        known = [*TABLES, *map(str, range(1, 14)), "verdicts", "text", "all"]
        raise BadInput(f"there is no table {name!r}; {suggestion(name, known)}")
    return TABLES[name]
