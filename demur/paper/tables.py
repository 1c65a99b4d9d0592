"""The tables that can be made by name: which recipes, under which attacks.

TABLES["methods-digits"].entries["pgdat-rr"]        # a recipe
TABLES["study-digits"]                              # what makes R-Con better than confidence?
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from demur.errors import BadInput, suggestion
from demur.paper.study import variants
from demur.recipes import RECIPES, Recipe, changed


@dataclass(frozen=True)
class Table:
    """Recipes by the names that the table calls them, and the attacks they are measured under."""

    title: str
    entries: Mapping[str, Recipe]
    attacks: tuple[str, ...]

    def only(self, names: tuple[str, ...]) -> "Table":
        """The table with some of its lines."""
        for name in names:
            if name not in self.entries:
                known = suggestion(name, self.entries)
                raise BadInput(f"the table has no line called {name!r}; {known}")
        return Table(self.title, {name: self.entries[name] for name in names}, self.attacks)

    def changed(self, changes: Iterable[str]) -> "Table":
        """The table with every recipe changed."""
        made = tuple(changes)
        entries = {name: changed(recipe, made) for name, recipe in self.entries.items()}
        return Table(self.title, entries, self.attacks)


PAPER = ["data.split=paper"]
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
        "Every way to train, on CIFAR-10 with a ResNet-18, 36 epochs; the best so far, 60 epochs",
        {name: changed(RECIPES[f"cifar10-{name}-short"], PAPER) for name in LINES}
        | {"best": changed(RECIPES["cifar10-best"], PAPER)},
        ("clean", "pgd-10", "pgd-100", *RADII),
    ),
    "study-digits": Table(
        "What makes R-Con better than confidence? Digits",
        variants(RECIPES["digits-pgdat-rr"], average="0.98"),
        ADAPTIVE,
    ),
    "study-cifar10": Table(
        "What makes R-Con better than confidence? CIFAR-10, twelve epochs",
        variants(
            changed(RECIPES["cifar10-pgdat-rr-short"], [*PAPER, "epochs=12"]),
            average="0.998",
        ),
        ("clean", "pgd-10", "pgd-100"),
    ),
}


def table_named(name: str) -> Table:
    """The table of that name."""
    if name not in TABLES:
        raise BadInput(f"no table is called {name!r}; {suggestion(name, TABLES)}")
    return TABLES[name]
