"""The commands that make a run or a record again.

attack_command(record, source)      # demur attack RUN pgd-20 --n 100
"""

import shlex

from demur.errors import BadInput
from demur.evaluate import Order, Source
from demur.recipes import RECIPES, attack
from demur.runs import Record, Run
from demur.spec import digest


def still_named(record: Record, source: Source) -> bool:
    """Whether the record's label means the same attack today."""
    try:
        _, meant = attack(record.label, source.run.recipe.data)
    except BadInput:
        return False
    return digest(meant) == str(record.about["attack"])


def attack_command(record: Record, source: Source) -> str:
    """The command that makes a record of the same images again."""
    about, usual = record.about, Order()
    n, images = about["n"], about["images"]
    options: list[str] = []
    if about["split"] != usual.split:
        options += ["--split", about["split"]]
    if n != next(len(s) for name, s in source.splits.items() if name == about["split"]):
        options += ["--n", str(n)]
    if images != min(usual.keep_images, n):
        options += ["--keep-images", str(images)]
    if about["features"]:
        options += ["--keep-features"]
    if still_named(record, source):
        return shlex.join(["demur", "attack", source.run.name, record.label, *options])
    written = f"echo {shlex.quote(about['spec'])} > attack.txt"
    made = shlex.join(["demur", "attack", source.run.name, "@attack.txt", *options])
    return f"{written}\n{made}"


def train_command(run: Run) -> str:
    """The command that trains the run again: by its recipe's name, or by the file in its folder."""
    named = next((name for name, known in RECIPES.items() if known == run.recipe), None)
    folder = f"runs/{run.name}"
    words = ["demur", "train", named or f"@{folder}/recipe.txt"]
    return shlex.join(words if named == run.name else [*words, "--out", folder])
