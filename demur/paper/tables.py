"""The named tables: their recipes, the attacks they are evaluated under, the published numbers.

    TABLES["methods-digits"].entries["pgdat-rr"]                    # a recipe
    first_table(("clean", *RADII))["pgdat-rr", "R-Con", "clean"]    # 86.91, 0.861

The paper scores CARL and ATRO by their margin. Its CCAT is that of the reference code.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from demur.data import SplitName
from demur.errors import BadInput, suggestion
from demur.recipes import RECIPES, Recipe, with_changes
from demur.runs import run_folder


class Figure(NamedTuple):
    """The published numbers of one rejector under one attack."""

    right: float  # accuracy on accepted images at TPR 95, in percent
    auroc: float


PaperFigures = Mapping[tuple[str, str, str], Figure]  # by entry, score and attack
PUBLISHED_NOTE = (
    "`the paper` is TPR-95 and AUROC of the paper's Table 1: 110 epochs, the checkpoint with the "
    "best result on the test images."
)
# TPR-95 and AUROC for clean, Linf 8/255, Linf 16/255, L2 128/255
_TABLE_1: dict[tuple[str, str], tuple[float, ...]] = {
    ("pgdat", "KD"): (82.59, 0.618, 53.12, 0.588, 31.97, 0.535, 64.60, 0.599),
    ("pgdat", "LID"): (84.02, 0.712, 54.92, 0.660, 32.75, 0.621, 66.07, 0.663),
    ("pgdat", "GDA"): (82.35, 0.453, 52.67, 0.461, 31.89, 0.454, 64.13, 0.459),
    ("pgdat", "GDA*"): (84.51, 0.664, 53.88, 0.589, 31.94, 0.527, 65.71, 0.605),
    ("pgdat", "GMM"): (85.44, 0.703, 54.35, 0.607, 31.96, 0.532, 66.54, 0.635),
    ("pgdat-carl", "CARL"): (85.54, 0.682, 51.67, 0.539, 30.41, 0.516, 65.98, 0.645),
    ("pgdat-atro", "ATRO"): (73.42, 0.669, 36.04, 0.654, 21.37, 0.644, 41.52, 0.655),
    ("trades", "Con"): (86.07, 0.837, 57.62, 0.774, 37.55, 0.739, 67.88, 0.781),
    ("ccat-reference", "Con"): (92.44, 0.806, 51.68, 0.637, 45.12, 0.683, 67.07, 0.772),
    ("pgdat", "Con"): (86.52, 0.857, 57.30, 0.768, 34.77, 0.685, 69.10, 0.783),
    ("pgdat-snet", "SNet"): (84.19, 0.796, 56.41, 0.730, 35.25, 0.692, 67.49, 0.741),
    ("pgdat-ebd", "Energy"): (85.34, 0.832, 57.04, 0.763, 34.96, 0.690, 67.82, 0.774),
    ("trades-rr", "R-Con"): (86.47, 0.849, 58.52, 0.786, 38.06, 0.748, 68.97, 0.793),
    ("ccat-reference-rr", "R-Con"): (94.12, 0.909, 53.89, 0.662, 48.02, 0.688, 67.98, 0.785),
    ("pgdat-rr", "R-Con"): (86.91, 0.861, 58.21, 0.776, 35.32, 0.705, 70.24, 0.796),
}


def first_table(attacks: Sequence[str]) -> PaperFigures:
    """The paper's Table 1; `attacks` are demur's names of its four columns."""
    return {
        (entry, score, attack): Figure(*figures[2 * column : 2 * column + 2])
        for (entry, score), figures in _TABLE_1.items()
        for column, attack in enumerate(attacks)
    }


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
METHODS = (  # in the order of the paper's Table 1
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
        published=first_table(("clean", *RADII)),
    ),
}


def entry_folder(entry: str) -> str:
    """The folder name of an entry: lower case, other characters replaced by single hyphens."""
    text = "".join(c if c.isalnum() or c in "._" else "-" for c in entry.lower())
    return "-".join(part for part in text.split("-") if part)


def table_by_name(name: str) -> Table:
    """The table with this name; raises BadInput if there is none."""
    if name not in TABLES:
        raise BadInput(f"there is no table {name!r}; {suggestion(name, TABLES)}")
    return TABLES[name]
