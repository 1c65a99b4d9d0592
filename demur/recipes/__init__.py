"""Recipes and named attacks: what a user types for a training run or an attack."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TypeVar

from demur.attacks import ATTACKS, CRITERIA, OBJECTIVES, Attack, PlusLogScore
from demur.attacks.balls import L1, L2, Linf
from demur.calibrate import OPERATING_POINTS
from demur.data import AUGMENTS, DATASETS, OwnImages
from demur.data.sources import LAYOUTS
from demur.errors import BadInput, shorten, suggestion
from demur.files.checked_files import MEGABYTE, read_regular_file
from demur.methods import FRAMEWORKS, HEADS, LABELS, Method
from demur.nets import NETS, FactoryNet
from demur.recipes.attacks import (
    ADAPTIVE_ATTACKS,
    ADAPTIVE_OBJECTIVES,
    NAMED_ATTACKS,
    AdaptiveObjective,
    LiveMapping,
    attack_group,
)
from demur.recipes.training import RECIPES, OneCycle, Piecewise, Recipe, Schedule
from demur.rejectors import REJECTORS, Con, Rejector
from demur.spec import (
    Spec,
    Vocabulary,
    edit,
    find_name,
    read,
    replace_specs,
    required_fields,
    show,
    specs_in,
    typed,
)
from demur.spec.importing import allow_import, is_import_path

__all__ = [
    "ADAPTIVE_OBJECTIVES", "NAMED_ATTACKS", "RECIPES", "SCHEDULES", "VOCABULARY",
    "AdaptiveObjective", "AnyName", "OneCycle", "Piecewise", "Recipe", "aimed_at", "as_rejector",
    "attack", "attack_group", "recipe", "rejector_name", "rejectors_named", "split_changes",
    "with_changes",
]  # fmt: skip

S = TypeVar("S", bound=Spec)
SCHEDULES: list[type[Schedule]] = [Piecewise, OneCycle]
MAX_TEXT = MEGABYTE  # bytes of a file that holds a spec

_LISTS: tuple[Sequence[type[Spec]], ...] = (
    (Linf, L2, L1, Recipe, Method), DATASETS, AUGMENTS, NETS, ATTACKS, OBJECTIVES, CRITERIA,
    REJECTORS, OPERATING_POINTS, FRAMEWORKS, HEADS, LABELS, SCHEDULES,
)  # fmt: skip


# every class that the text of a spec may name
VOCABULARY: Vocabulary = LiveMapping(lambda: {c.__name__: c for group in _LISTS for c in group})


def recipe(name: str, changes: str | Iterable[str] = ()) -> Recipe:
    """Look up a recipe by name and apply changes to it.

    Args:
        name: A key of `RECIPES` (`demur list recipes`), or "@FILE" for a file with a recipe.
        changes: One text "key=value" or several; a dotted key sets a field of a field, as in
            "head.weight=0.5".

    Returns:
        The changed recipe.

    Raises:
        BadInput: If the name, a key or a value is unknown.

    Example:
        >>> from demur import recipe
        >>> recipe("digits-pgdat-rr", ["epochs=2", "head.weight=0.5"]).epochs
        2
    """
    if name.startswith("@"):
        found = read_recipe(Path(name[1:]))
    elif name in RECIPES:
        found = RECIPES[name]
    else:
        raise BadInput(f"no recipe is called {shorten(name)!r}; {suggestion(name, RECIPES)}")
    return with_changes(found, [changes] if isinstance(changes, str) else changes)


def with_changes(recipe: Recipe, changes: Iterable[str]) -> Recipe:
    """Recipe after changes of the form key=value.

    A change that needs another one, such as labels=ADR() and ema=0.995, may stand before it.
    """
    pending = list(changes)
    while pending:
        errors: dict[str, BadInput] = {}
        for change in pending:
            try:
                recipe = _apply_change(recipe, change)
            except BadInput as error:
                errors[change] = error
        if len(errors) == len(pending):
            raise next(iter(errors.values()))
        pending = list(errors)
    return recipe


def attack(text: str, recipe: Recipe) -> Attack:
    """Attack described by `name:key=value,...` or `@FILE:key=value,...` for a run of `recipe`."""
    name, _, changes = text.partition(":")
    parts = split_changes(changes)
    if name.startswith("@"):
        spec = _read_file(Path(name[1:]))
        if not isinstance(spec, Attack):
            raise BadInput(f"{name[1:]} does not hold an attack; write one, such as PGD(Linf(0.1))")
        found = spec
    elif name in ADAPTIVE_ATTACKS:
        # eta has several places in these objectives, so it is set when the attack is made
        etas = [part for part in parts if part.startswith("eta=")]
        parts = [part for part in parts if part not in etas]
        eta = reduce(_apply_change, etas, PlusLogScore(Con())).eta
        found = ADAPTIVE_ATTACKS[name].attack(recipe, eta)
    elif name in NAMED_ATTACKS:
        found = NAMED_ATTACKS[name](recipe)
    else:
        raise BadInput(f"no attack is called {shorten(name)!r}; {suggestion(name, NAMED_ATTACKS)}")
    return reduce(_apply_change, parts, found)


AnyName = str | Rejector | type[Rejector]


def rejectors_named(given: AnyName | Iterable[AnyName], recipe: Recipe) -> dict[str, Rejector]:
    """Rejectors by their name in tables, for a net of `recipe`.

    Given are one or several: a class, an instance, or texts, separated by commas, with a name of
    `demur score` (R-Con), a spec (Energy(tau=2)) or the user's own (myrej:Gini(power=2)).
    """
    found: dict[str, Rejector] = {}
    for one in [given] if isinstance(given, str | Rejector | type) else given:
        for part in split_changes(one) if isinstance(one, str) else [one]:
            known = recipe.rejectors()
            name = find_name(part.strip(), known) if isinstance(part, str) else None
            spec = known[name] if name else as_rejector(part, known)
            found[name or rejector_name(spec)] = spec
    return found


def aimed_at(text: str, attack: Attack, rejectors: Sequence[Rejector]) -> list[tuple[str, Attack]]:
    """The attack on each rejector, with its text; itself if it has none or its text names one."""
    own = [spec for spec in specs_in(attack) if isinstance(spec, Rejector)]
    if not own or not rejectors or re.search(r"[:,.]\s*rejector\s*=", text):
        return [(text, attack)]
    start = f"{text}{',' if ':' in text else ':'}rejector="
    aimed = [replace_specs(attack, dict.fromkeys(own, one)) for one in rejectors]
    custom = r'^Custom\("([^"]*)"(?:, )?'  # typed as Con, or myrej:Gini(power=2)
    typed = [re.sub(custom, r"\1(", show(one)).removesuffix("()") for one in rejectors]
    return [(start + text, new) for text, new in zip(typed, aimed, strict=True)]


def as_rejector(given: object, known: Iterable[str] = ()) -> Rejector:
    """The rejector that a class, an instance or a typed text names."""
    found = given
    if isinstance(given, str):
        words = {cls.__name__ for cls in REJECTORS} | {*known}
        if re.fullmatch(r"\s*[\w+-]+\s*", given) and not find_name(given.strip(), VOCABULARY):
            what = "the run has no rejector" if known else "no rejector is called"
            raise BadInput(f"{what} {shorten(given)!r}; {suggestion(given, words)}")
        found = read(typed(given), VOCABULARY)
    elif isinstance(given, type) and issubclass(given, Rejector):
        if lacking := required_fields(given):
            raise BadInput(f"{given.__name__} lacks {' and '.join(lacking)}; give an instance")
        found = given()
    if not isinstance(found, Rejector):
        raise BadInput(
            f"{shorten(str(given))!r} is not a rejector; name a subclass of demur.Rejector, "
            "such as Con() or one of demur list rejectors"
        )
    return found


def rejector_name(rejector: Rejector) -> str:
    """The name of a rejector in tables: its class with the settings that are not defaults."""
    return rejector.display_name or short_name(rejector)


def short_name(spec: Spec) -> str:
    """The spec without the modules of own classes: Con, Gini(power=2)."""
    return re.sub(r'Custom\("[^":]*:([^"]*)"(?:, )?', r"\1(", show(spec)).removesuffix("()")


def read_recipe(path: Path) -> Recipe:
    """Recipe in a file; raises BadInput if the file holds no recipe."""
    spec = _read_file(path)
    if not isinstance(spec, Recipe):
        raise BadInput(f"{path} does not hold a recipe; write one as demur list RECIPE prints it")
    return spec


def split_changes(changes: str) -> list[str]:
    """Changes separated by commas outside of all brackets."""
    parts, depth = [""], 0
    for letter in changes:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part]


def _apply_change(spec: S, change: str) -> S:
    key, equals, text = change.partition("=")
    if not equals or not key or not text:
        raise BadInput(f"{shorten(change)!r} is not a change; write key=value")
    key, text = key.strip(), text.strip()
    if isinstance(spec, Recipe) and key == "data" and (images := _own_images(text)):
        if isinstance(spec.data, OwnImages):
            images = replace(images, size=spec.data.size, eps=spec.data.eps)
        return replace(spec, data=images)
    if isinstance(spec, Recipe) and key == "eps" and isinstance(spec.data, OwnImages):
        return spec.with_eps(edit(spec.data, key, text, VOCABULARY).eps)  # type: ignore[return-value]
    if isinstance(spec, Recipe) and key == "net" and is_import_path(text):
        allow_import(text)  # typed by the user, unlike what a recipe file names
        return replace(spec, net=FactoryNet(text))
    edited: S = edit(spec, key, typed(text), VOCABULARY)
    return edited


def _own_images(text: str) -> OwnImages | None:
    """Images at a path; None for a data set of the vocabulary, such as CIFAR10()."""
    if re.fullmatch(r"\w+\(.*\)", text, re.DOTALL) or find_name(text, VOCABULARY):
        return None
    if not Path(text).exists():
        if not is_import_path(text):
            raise BadInput(
                f"data={shorten(text)} is no data set of demur list data, and no such folder or "
                f"file exists; give {LAYOUTS}"
            )
        allow_import(text)  # typed by the user, as in net=
    return OwnImages(text)


def _read_file(path: Path) -> Spec:
    if not path.is_file():
        raise BadInput(f"there is no file {path}; @FILE names a file that holds a spec")
    content = read_regular_file(path, MAX_TEXT, "@FILE names a file that holds a spec")
    try:
        spec: Spec = read(content.decode(), VOCABULARY)
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not a text file; @FILE names a file that holds a spec") from None
    except BadInput as error:
        raise BadInput(f"{path} cannot be read: {error}") from None
    return spec
