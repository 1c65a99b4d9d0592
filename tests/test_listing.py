"""demur list, demur --version, and the command that resumes an unfinished run."""

import json
import shlex
from pathlib import Path
from shutil import copytree, rmtree

import demur
from demur.cli.listing import describe
from demur.evaluate import LoadedRun
from demur.recipes import RECIPES, recipe
from demur.runs import Run
from demur.spec import lines
from demur.version import code_version
from tests.conftest import TINIEST, Command
from tests.test_cli import expect_error


def test_list_without_a_kind_lists_the_kinds(command: Command) -> None:
    code, out, _ = command("list")
    assert code == 0
    counts = {line.split()[0]: line.split()[1] for line in out.splitlines()}
    assert counts["recipes"] == str(len(RECIPES))
    assert counts["runs"] == "0"
    for kind in counts:
        assert kind == "runs" or command("list", kind)[0] == 0
    entries = json.loads(command("list", "--json")[1])
    assert {kind: str(about["entries"]) for kind, about in entries.items()} == counts
    expect_error(command("list", "nets", "folder"), "a folder goes with runs only")


def test_an_attack_or_a_rejector_is_found_by_its_name(command: Command) -> None:
    code, out, err = command("list", "reject-autoattack")
    assert code == 0, err
    assert "demur list attacks: RejectAutoAttack" in out
    assert "demur list rejectors" in command("list", "r-con")[1]


def test_runs_are_listed_with_their_state(command: Command, scored_source: LoadedRun) -> None:
    expect_error(command("list", "runs"), "runs is not a folder", "demur train RECIPE")
    copytree(scored_source.run.path, "runs/done")
    count = len(list(Path("runs/done/records").glob("*.json")))  # others may have added some
    copytree("runs/done", "elsewhere/archive")
    Path("elsewhere/archive/model.safetensors").unlink()
    for name, text in (("begun", lines(recipe("digits-pgdat"))), ("broken", "no recipe")):
        Path("runs", name).mkdir()
        Path("runs", name, "recipe.txt").write_text(text, encoding="utf-8")
    code, out, _ = command("list", "runs")
    assert code == 0
    begun, broken, done = out.splitlines()
    assert begun.split(maxsplit=1) == [
        "begun",
        f"not trained to the end, 0 records, {describe(recipe('digits-pgdat'))}",
    ]
    assert "runs/broken/recipe.txt cannot be read" in broken
    about = describe(scored_source.run.recipe)
    assert done.endswith(f"  finished, {count} records, {about}")
    code, out, _ = command("list", "runs", "elsewhere")
    assert out.startswith(f"archive  an archive, {count} records, ")
    entries = json.loads(command("list", "runs", "--json")[1])
    assert (entries["done"]["state"], entries["done"]["records"]) == ("finished", count)
    Path("empty").mkdir()
    expect_error(command("list", "runs", "empty"), "empty holds no run")


def test_the_version_equals_that_of_records(command: Command) -> None:
    counts = f"demur {demur.__version__}, code {code_version()}\n"
    assert command("--version") == (0, counts, "")


def test_an_unfinished_run_names_the_command_that_resumes_it(
    command: Command, tiny_run: Run
) -> None:
    folder = copytree(tiny_run.path, "runs/my tiny")
    Path(folder, "checkpoint.json").unlink()
    Path(folder, "records").mkdir(exist_ok=True)
    Path(folder, "records", "clean.json").touch()
    expect_error(command("score", "my tiny"), "train it again elsewhere with: demur train")
    brief = lines(recipe("digits-pgdat-rr", TINIEST))
    Path(folder, "recipe.txt").write_text(brief, encoding="utf-8")
    rmtree(Path(folder, "records"), ignore_errors=True)  # of the missing weights
    again = "demur train '@runs/my tiny/recipe.txt' --out 'runs/my tiny'"
    commands = (
        ("attack", "my tiny", "clean"),
        ("score", "my tiny"),
        ("paper", "study", "theory", "my tiny"),
    )
    for words in (*commands, ("export", "my tiny", "-o", "guard")):
        expect_error(command(*words), f"not trained to the end; resume it with: {again}")
    expect_error(command("score", "my tiny", "--data", "a b"), f"{again} --data 'a b'")
    assert f"# not trained to the end; resume it with: {again}\n" in command("list", "my tiny")[1]
    expect_error(command("score", "runs"), "runs is not a run; it holds runs, such as runs/")
    Path("empty").mkdir()
    expect_error(command("score", "empty"), "empty is not a run; recipe.txt is missing")
    code, _, err = command(*shlex.split(again)[1:])
    assert code == 0, err
    assert command("attack", "my tiny", "clean", "--n", "20")[0] == 0


def test_a_run_of_a_named_recipe_resumes_by_that_name(command: Command) -> None:
    for folder in ("runs/digits-pgdat", "far/runs/digits-pgdat"):
        Path(folder).mkdir(parents=True)
        Path(folder, "recipe.txt").write_text(lines(recipe("digits-pgdat")), encoding="utf-8")
    code, _, err = command("attack", "digits-pgdat", "clean")
    assert code == 2
    assert err.endswith("resume it with: demur train digits-pgdat\n")
    code, _, err = command("attack", "far/runs/digits-pgdat", "clean")
    assert code == 2
    assert err.endswith("resume it with: demur train digits-pgdat --out far/runs/digits-pgdat\n")


def test_recipes_fit_a_screen_and_are_described_in_words(command: Command) -> None:
    shown = command("list", "recipes")[1].splitlines()
    assert len(shown) <= 48
    line = next(line for line in shown if line.startswith("cifar10-pgdat-rr "))
    assert line.split(maxsplit=1)[1] == "PGD-AT with the RR head, ResNet-18, 110 epochs"
