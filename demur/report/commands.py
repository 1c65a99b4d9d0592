"""The commands that make a run or a record again.

attack_command(record, source)      # demur attack RUN pgd-20 --n 100
"""

import shlex
from pathlib import Path

from demur.errors import BadInput
from demur.evaluate import AttackOptions, Evaluator
from demur.recipes import RECIPES, attack
from demur.runs import Record, Run
from demur.spec import digest


def label_is_current(record: Record, evaluator: Evaluator) -> bool:
    """Whether the record's label means the same attack today."""
    try:
        meant = attack(record.label, evaluator.run.recipe)
    except BadInput:
        return False
    return digest(meant) == str(record.metadata["attack"])


def attack_command(record: Record, evaluator: Evaluator) -> str:
    """The command that makes a record of the same images again."""
    about, usual = record.metadata, AttackOptions()
    n, images = about["n"], about["images"]
    options: list[str] = []
    if about["split"] != usual.split:
        options += ["--split", about["split"]]
    if n != next(len(s) for name, s in evaluator.splits.items() if name == about["split"]):
        options += ["--n", str(n)]
    if images != min(usual.keep_images, n):
        options += ["--keep-images", str(images)]
    if not about["features"]:
        options += ["--no-keep-features"]
    if label_is_current(record, evaluator):
        return shlex.join(["demur", "attack", run_argument(evaluator.run), record.label, *options])
    written = f"echo {shlex.quote(about['spec'])} > attack.txt"
    made = shlex.join(["demur", "attack", run_argument(evaluator.run), "@attack.txt", *options])
    return f"{written}\n{made}"


def train_command(run: Run) -> str:
    """The command that trains the run again: by its recipe's name, or by the file in its folder."""
    named = next((name for name, known in RECIPES.items() if known == run.recipe), None)
    words = ["demur", "train", named or f"@{run.path}/recipe.txt"]
    archive = run.trained and not run.finished  # into which nothing is trained
    where = Path("runs", run.name) if archive else run.path
    usual = where == Path("runs", run.name) and named == run.name
    return shlex.join(words if usual else [*words, "--out", str(where)])


def run_argument(run: Run) -> str:
    """The run as a command names it: by name inside a runs folder, else by its path."""
    return run.name if run.path.parent.name == "runs" else str(run.path)
