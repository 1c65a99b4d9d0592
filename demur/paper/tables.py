"""The tables that can be made by name: which recipes, under which attacks.

TABLES["methods-digits"].entries["pgdat-rr"]        # a recipe
TABLES["study-digits"]                              # what makes R-Con better than confidence?
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from demur.data import SplitName
from demur.errors import BadInput, suggestion
from demur.paper.published import Published, first_table
from demur.paper.study import variants
from demur.recipes import RECIPES, Recipe, changed
from demur.runs import run_folder


@dataclass(frozen=True)
class Table:
    """Recipes by the names that the table calls them, and the attacks they are measured under.

    A base that is the name of a line stands for the run of that line and the same seed.
    """

    title: str
    entries: Mapping[str, Recipe]
    attacks: tuple[str, ...]
    split: SplitName = "test"  # whose images are attacked; what is chosen by them is no test
    learned: tuple[str, ...] = ()  # rejectors that learn from features of every finished net
    published: Published = field(default_factory=dict)

    def recipe(self, entry: str, seed: int) -> Recipe:
        """The recipe of one training."""
        recipe = replace(self.entries[entry], seed=seed)
        based = recipe.base in self.entries
        return replace(recipe, base=self.folder(str(recipe.base), seed).name) if based else recipe

    def folder(self, entry: str, seed: int) -> Path:
        """Where that training is kept."""
        return run_folder(entry_folder(entry), self.recipe(entry, seed), changed=True)

    def only(self, names: tuple[str, ...]) -> "Table":
        """The table with some of its lines, in its own order, and those they are based on."""
        for name in names:
            if name not in self.entries:
                known = suggestion(name, self.entries)
                raise BadInput(f"the table has no line called {name!r}; {known}")
        based = {self.entries[name].base for name in names}
        asked = {name: each for name, each in self.entries.items() if name in based.union(names)}
        return replace(self, entries=asked)

    def changed(self, changes: Iterable[str]) -> "Table":
        """The table with every recipe changed; a line that cannot be is named."""
        made, entries = tuple(changes), {}
        for name, recipe in self.entries.items():
            try:
                entries[name] = changed(recipe, made)
            except BadInput as error:
                raise BadInput(f"the line {name} cannot be changed so: {error}") from error
        return replace(self, entries=entries)


PAPER = ["data.split=paper"]
# the paper averages no weights; what is measured already also rose for longer
AS_COMPARED = ["ema=0", "schedule.warmup=0.3"]
LINES = (  # in the order of the paper's first table
    "standard", "pgdat", "pgdat-snet", "pgdat-ebd", "pgdat-carl", "pgdat-atro", "pgdat-rr",
    "trades", "trades-rr", "ccat", "ccat-rr", "ccat-reference", "ccat-reference-rr",
)  # fmt: skip
RADII = (
    "pgd-100:restarts=10", "pgd-100:restarts=10,eps=16/255", "pgd-100-l2:restarts=10",
)  # fmt: skip
ADAPTIVE = ("clean", "pgd-20", "adaptive", "adaptive-apgd")
TABLES: dict[str, Table] = {
    "methods-digits": Table(
        "Every way to train, on digits",
        {
            name.removeprefix("digits-"): recipe
            for name, recipe in RECIPES.items()
            if name.startswith("digits-")
        },
        ADAPTIVE,
    ),
    "methods-cifar10": Table(
        "Every way to train, on CIFAR-10 (ResNet-18, 36 epochs, not averaged; best: 60, averaged)",
        {name: changed(RECIPES[f"cifar10-{name}-short"], PAPER + AS_COMPARED) for name in LINES}
        | {"best": changed(RECIPES["cifar10-best"], PAPER)},
        ("clean", "pgd-10", "pgd-100", *RADII),
        learned=("KD", "LID", "GDA", "GDA*", "GMM"),
        published=first_table(("clean", *RADII)),
    ),
    "study-digits": Table(
        "What makes R-Con better than confidence? Digits",
        variants(RECIPES["digits-pgdat-rr"], RECIPES["digits-trades-rr"], average="0.98"),
        ADAPTIVE,
    ),
    "study-cifar10": Table(
        "What makes R-Con better than confidence? CIFAR-10, twelve epochs",
        variants(
            changed(
                RECIPES["cifar10-pgdat-rr-short"], ["epochs=12", "selection=last", *AS_COMPARED]
            ),
            RECIPES["cifar10-trades-rr-short"],
            average="0.998",
        ),
        ("clean", "pgd-100"),
        split="cal",
    ),
}


def entry_folder(entry: str) -> str:
    """The name of an entry as that of a folder."""
    kept = "".join(c if c.isalnum() or c in "._" else "-" for c in entry.lower())
    return "-".join(part for part in kept.split("-") if part)


def table_by_name(name: str) -> Table:
    """The table of that name."""
    if name not in TABLES:
        raise BadInput(f"no table is called {name!r}; {suggestion(name, TABLES)}")
    return TABLES[name]
