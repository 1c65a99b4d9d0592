"""Recipes: everything that decides a training run, and the names people type.

recipe("digits-pgdat-rr", ["epochs=20", "head.weight=0.5"])
attack("pgd-20:eps=0.2,restarts=5", RECIPES["digits-pgdat-rr"])
"""

from collections.abc import Iterable
from functools import reduce
from pathlib import Path
from typing import TypeVar

from demur.attacks import ATTACKS, CRITERIA, OBJECTIVES, Attack, Evasion
from demur.balls import L2, Linf
from demur.calibrate import OPERATING_POINTS
from demur.data import AUGMENTS, DATASETS
from demur.errors import BadInput, brief, suggestion
from demur.methods import FRAMEWORKS, HEADS, SCHEDULES, Method
from demur.nets import NETS
from demur.recipes.adaptive import ADAPTIVE_ATTACKS, ADAPTIVE_OBJECTIVES, AdaptiveObjective
from demur.recipes.attacks import NAMED_ATTACKS
from demur.recipes.named import RECIPES
from demur.recipes.training import Recipe
from demur.rejectors import REJECTORS, Con
from demur.spec import Spec, Vocabulary, edit, read

__all__ = [
    "ADAPTIVE_OBJECTIVES",
    "NAMED_ATTACKS",
    "RECIPES",
    "VOCABULARY",
    "AdaptiveObjective",
    "Recipe",
    "attack",
    "changed",
    "recipe",
    "recipe_in",
]  # fmt: skip

S = TypeVar("S", bound=Spec)

_LISTS: tuple[tuple[type[Spec], ...], ...] = (
    (Linf, L2, Recipe, Method), DATASETS, AUGMENTS, NETS, ATTACKS, OBJECTIVES, CRITERIA, REJECTORS,
    OPERATING_POINTS, FRAMEWORKS, HEADS, SCHEDULES,
)  # fmt: skip

VOCABULARY: Vocabulary = {cls.__name__: cls for group in _LISTS for cls in group}


def recipe(name: str, changes: Iterable[str] = ()) -> Recipe:
    """A named recipe, or one in an @file, with `key=value` changes."""
    if name.startswith("@"):
        found = recipe_in(Path(name[1:]))
    elif name in RECIPES:
        found = RECIPES[name]
    else:
        raise BadInput(f"no recipe is called {brief(name)!r}; {suggestion(name, RECIPES)}")
    return changed(found, changes)


def changed(recipe: Recipe, changes: Iterable[str]) -> Recipe:
    """The recipe with `key=value` changes."""
    return reduce(_changed, changes, recipe)


def attack(text: str, recipe: Recipe) -> Attack:
    """The attack that `name:key=value,...` or an @file means for a run of this recipe."""
    name, _, changes = text.partition(":")
    parts = _parts(changes)
    if name.startswith("@"):
        held = _from_file(Path(name[1:]))
        if not isinstance(held, Attack):
            raise BadInput(f"{name[1:]} does not hold an attack")
        found = held
    elif name in ADAPTIVE_ATTACKS:
        weights = [part for part in parts if part.startswith("eta=")]
        parts = [part for part in parts if part not in weights]
        found = ADAPTIVE_ATTACKS[name].attack(recipe, reduce(_changed, weights, Evasion(Con())).eta)
    elif name in NAMED_ATTACKS:
        found = NAMED_ATTACKS[name](recipe)
    else:
        raise BadInput(f"no attack is called {brief(name)!r}; {suggestion(name, NAMED_ATTACKS)}")
    return reduce(_changed, parts, found)


def recipe_in(path: Path) -> Recipe:
    """The recipe that a file holds."""
    held = _from_file(path)
    if not isinstance(held, Recipe):
        raise BadInput(f"{path} does not hold a recipe")
    return held


def _parts(changes: str) -> list[str]:
    """The changes between commas that stand outside all brackets."""
    parts, depth = [""], 0
    for letter in changes:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part]


def _changed(spec: S, change: str) -> S:
    key, equals, text = change.partition("=")
    if not equals or not key or not text:
        raise BadInput(f"{brief(change)!r} is not a change; write key=value")
    changed: S = edit(spec, key.strip(), text.strip(), VOCABULARY)
    return changed


def _from_file(path: Path) -> Spec:
    if not path.is_file():
        raise BadInput(f"there is no file {path}; @FILE names a file that holds a spec")
    try:
        found: Spec = read(path.read_text(encoding="utf-8"), VOCABULARY)
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not a text file") from None
    except BadInput as error:
        raise BadInput(f"{path} cannot be read: {error}") from None
    return found
