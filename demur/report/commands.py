"""The shell commands that reproduce a run or a record.

attack_command(record, loaded)      # demur attack RUN pgd-20 --n 100
"""

import shlex
from pathlib import Path

from demur.errors import BadInput
from demur.evaluate import LoadedRun, RecordOptions
from demur.recipes import RECIPES, attack
from demur.runs import Record, Run
from demur.spec import digest


def label_is_current(record: Record, loaded: LoadedRun) -> bool:
    """Return whether the record's label still names the same attack."""
    try:
        current = attack(record.label, loaded.run.recipe)
    except BadInput:
        return False
    return digest(current) == str(record.metadata["attack"])


def attack_command(record: Record, loaded: LoadedRun) -> str:
    """Return the command that makes the same record again, from a spec file where needed."""
    about, default = record.metadata, RecordOptions()
    n, images = about["n"], about["images"]
    options: list[str] = []
    if about["split"] != default.split:
        options += ["--split", about["split"]]
    if n != next(len(s) for name, s in loaded.splits.items() if name == about["split"]):
        options += ["--n", str(n)]
    if images != min(default.keep_images, n):
        options += ["--keep-images", str(images)]
    if not about["features"]:
        options += ["--no-keep-features"]
    if label_is_current(record, loaded):
        return shlex.join(["demur", "attack", run_argument(loaded.run), record.label, *options])
    write_spec = f"echo {shlex.quote(about['spec'])} > attack.txt"
    command = shlex.join(["demur", "attack", run_argument(loaded.run), "@attack.txt", *options])
    return f"{write_spec}\n{command}"


def train_command(run: Run) -> str:
    """Return the command that trains the run: by its recipe's name, or by its recipe file."""
    named = next((name for name, known in RECIPES.items() if known == run.recipe), None)
    words = ["demur", "train", named or f"@{run.path}/recipe.txt"]
    archive = run.trained and not run.has_weights  # an archive cannot be trained in place
    where = Path("runs", run.name) if archive else run.path
    is_default = where == Path("runs", run.name) and named == run.name
    return shlex.join(words if is_default else [*words, "--out", str(where)])


def run_argument(run: Run) -> str:
    """Return the run as a command argument: its name in a runs folder, else its path."""
    return run.name if run.path.parent.name == "runs" else str(run.path)
