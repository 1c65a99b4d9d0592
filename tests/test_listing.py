"""demur list, with and without a kind; runs; the version; the command that goes on with a run."""

import json
import shlex
from pathlib import Path
from shutil import copytree, rmtree

import demur
from demur.evaluate import Evaluator
from demur.recipes import RECIPES, recipe
from demur.runs import Run
from demur.spec import lines
from demur.version import code_version
from tests.conftest import Command
from tests.test_cli import refused


def test_a_list_of_nothing_is_a_list_of_kinds(command: Command) -> None:
    code, out, _ = command("list")
    assert code == 0
    told = {line.split()[0]: line.split()[1] for line in out.splitlines()}
    assert told["recipes"] == str(len(RECIPES))
    assert told["runs"] == "0"
    for kind in told:
        assert kind == "runs" or command("list", kind)[0] == 0
    held = json.loads(command("list", "--json")[1])
    assert {kind: str(about["entries"]) for kind, about in held.items()} == told
    refused(command("list", "nets", "folder"), "only runs are listed from a folder")


def test_runs_are_listed_with_how_far_they_are(command: Command, scored_source: Evaluator) -> None:
    refused(command("list", "runs"), "runs is no folder", "demur train RECIPE")
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
    assert begun.split(maxsplit=1) == ["begun", "not trained to the end, 0 records, digits-pgdat"]
    assert "runs/broken/recipe.txt cannot be read" in broken
    changes = (
        "net.width, method.framework.attack.ball.eps, method.framework.attack.steps and 2 more"
    )
    assert done.endswith(f"  finished, {count} records, digits-pgdat-rr with other {changes}")
    code, out, _ = command("list", "runs", "elsewhere")
    assert out.startswith(f"archive  an archive, {count} records, ")
    held = json.loads(command("list", "runs", "--json")[1])
    assert (held["done"]["state"], held["done"]["records"]) == ("finished", count)
    Path("empty").mkdir()
    refused(command("list", "runs", "empty"), "empty holds no run")


def test_the_version_is_that_of_records(command: Command) -> None:
    told = f"demur {demur.__version__}, code {code_version()}\n"
    assert command("--version") == (0, told, "")


def test_an_unfinished_run_names_the_command_that_goes_on(command: Command, tiny_run: Run) -> None:
    folder = copytree(tiny_run.path, "runs/my tiny")
    Path(folder, "checkpoint.json").unlink()
    rmtree(Path(folder, "records"), ignore_errors=True)  # of weights that are to come
    again = "demur train '@runs/my tiny/recipe.txt' --out 'runs/my tiny'"
    for words in (("attack", "my tiny", "clean"), ("score", "my tiny"), ("theory", "my tiny")):
        refused(command(*words), f"not trained to the end; go on with it by: {again}")
    refused(command("score", "my tiny", "--data", "a b"), f"{again} --data 'a b'")
    assert f"# not trained to the end; go on with it by: {again}\n" in command("show", "my tiny")[1]
    code, _, err = command(*shlex.split(again)[1:])
    assert code == 0, err
    assert command("attack", "my tiny", "clean", "--n", "20")[0] == 0


def test_a_run_by_a_name_goes_on_by_that_name(command: Command) -> None:
    for folder in ("runs/digits-pgdat", "far/runs/digits-pgdat"):
        Path(folder).mkdir(parents=True)
        Path(folder, "recipe.txt").write_text(lines(recipe("digits-pgdat")), encoding="utf-8")
    code, _, err = command("attack", "digits-pgdat", "clean")
    assert code == 2
    assert err.endswith("go on with it by: demur train digits-pgdat\n")
    code, _, err = command("attack", "far/runs/digits-pgdat", "clean")
    assert code == 2
    assert err.endswith("by: demur train digits-pgdat --out far/runs/digits-pgdat\n")
