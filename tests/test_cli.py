"""The command line: fixed commands, one sentence and exit code 2 for bad input, fast help."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from demur.cli.commands import app
from demur.data.cifar import PUBLISHED, Published
from demur.runs import Run
from tests import forked
from tests.cifar_files import small, write
from tests.conftest import Answer, Command
from tests.test_runs import spoil

COMMANDS = {
    "attack", "audit", "calibrate", "compare", "data", "demo", "leaderboard", "list", "paper",
    "report", "sweep", "retrofit", "score", "train", "export", "predict", "serve", "verify",
    "guard",
}  # fmt: skip
INNER = (
    "paper table", "paper figure", "paper study", "paper study adaptive", "paper study distortion",
    "paper study probes", "paper study theory", "paper study recipes", "leaderboard add",
    "leaderboard build", "leaderboard verify",
)  # fmt: skip


@pytest.fixture
def run_here(tiny_run: Run, in_empty_folder: Path) -> Path:
    """The shared run under runs/tiny."""
    return Path(shutil.copytree(tiny_run.path, in_empty_folder / "runs" / "tiny"))


def test_the_list_of_commands_is_fixed() -> None:
    shown = [command for command in app.registered_commands if not command.hidden]
    commands = {c.name or getattr(c.callback, "__name__", "") for c in shown}
    groups = [group.typer_instance for group in app.registered_groups]
    assert commands | {group.info.name for group in groups if group} == COMMANDS


def test_the_help_has_titled_groups_in_the_order_of_use(command: Command) -> None:
    code, out, _ = command("--help")
    assert code == 0
    titles = re.findall(r"^╭─ (\w+) ─", out, re.MULTILINE)
    assert titles == ["Options", "Train", "Attack", "Judge", "Ship", "Paper"]
    shown = re.findall(r"^│ (\w+)  +\S", out, re.MULTILINE)
    assert set(shown) == COMMANDS - {"data", "guard"}  # which messages and guides name
    assert len(shown) <= 17
    assert "demur guard info, diff and recalibrate" in out
    assert shown.index("train") < shown.index("attack") < shown.index("score")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("table 2 --from results", "paper table 2 --from results"),
        ("table -h", "paper table -h"),
        ("figure tau --scale smoke", "paper figure tau --scale smoke"),
        ("adaptive RUN --steps 3", "paper study adaptive RUN --steps 3"),
        ("distortion RUN cw", "paper study distortion RUN cw"),
        ("theory 'my run' --json", "paper study theory 'my run' --json"),
        ("show digits-pgdat epochs=3", "list digits-pgdat epochs=3"),
        ("explore RUN", "report RUN"),
        ("archive RUN -o copy --only Con", "export --archive RUN -o copy --only Con"),
    ],
)  # fmt: skip
def test_an_old_spelling_is_answered_by_the_new_one(old: str, new: str, command: Command) -> None:
    code, out, err = command(*shlex.split(old))
    assert (code, out) == (2, "")
    assert err.endswith(f" has a new name; write demur {new}\n")
    assert err.count("\n") == 1


def test_a_mode_of_a_command_has_its_own_options(command: Command) -> None:
    for line, sentence in (
        ("export RUN --only Con", "no such option: --only"),
        ("export RUN --archive -o c --tpr 0.9", "no such option: --tpr"),
        ("export --archive RUN", "missing option '-o'"),
    ):
        expect_error(command(*line.split()), sentence)
    code, out, _ = command("export", "--archive", "--help")
    assert code == 0
    assert "demur export --archive" in out
    assert "--only" in out


def test_tables_figures_and_studies_are_listed_by_the_group_paper(command: Command) -> None:
    for kind, names in (("table", ("2", "13", "text", "verdicts")), ("figure", ("tau", "xi"))):
        code, out, _ = command("paper", kind)
        assert code == 0
        assert {line.split()[0] for line in out.splitlines()} >= set(names)
    titles = json.loads(command("paper", "table", "--json")[1])
    assert titles["5"] == "The temperature of the RR loss"
    assert "methods-cifar10" in command("paper", "study", "recipes")[1]


@pytest.mark.parametrize("name", [*sorted(COMMANDS), *INNER])
def test_every_command_has_help_with_an_example(name: str, command: Command) -> None:
    code, out, _ = command(*name.split(), "--help")
    assert code == 0
    assert f"Example: demur {name}" in " ".join(out.split())


def test_help_imports_nothing_large() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "demur", "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    imported = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "numpy", "scipy", "sklearn", "matplotlib", "pandas", "PIL"}


def expect_error(answer: Answer, *words: str) -> None:
    """Assert exit code 2 and one sentence on stderr that contains all words."""
    code, out, err = answer
    assert code == 2, (out, err)
    sentence = " ".join(err.split())
    for word in words:
        assert word in sentence, sentence
    assert "Traceback" not in err
    assert out == ""


def test_unknown_names_suggest_the_nearest_known_ones(command: Command, run_here: Path) -> None:
    expect_error(command("train", "digits-pgdat-r"), "no recipe is called", "digits-pgdat-rr")
    expect_error(command("train", "digits-pgdat-rr", "epoch=3"), "no key 'epoch'", "epochs")
    expect_error(command("train", "digits-pgdat-rr", "epochs"), "write key=value")
    expect_error(command("train", "@missing.txt"), "there is no file missing.txt")
    expect_error(command("attack", "tiny", "pdg-20"), "no attack is called", "pgd-20")
    expect_error(command("attack", "tiny", "pgd-20:epz=0.1"), "no key 'epz'", "eps")
    expect_error(command("attack", "tinny", "pgd-20"), "there is no run 'tinny'", "tiny")
    expect_error(command("score", "nothing"), "there is no run")
    expect_error(command("score", "tiny", "--protocol", "papr"), "did you mean paper")
    expect_error(command("list", "recipe"), "did you mean recipes")
    expect_error(command("list", "digits"), "no kind, recipe or run is called", "digits-pgdat")
    expect_error(command("list", "tinny"), "did you mean tiny?")
    expect_error(command("attack", "tiny", "pgd-20", "--split", "tests"), "did you mean test")


def test_wrong_values_are_reported_with_the_allowed_values(command: Command) -> None:
    for change, words in (
        ("epochs=ten", "epochs must be a whole number of at least 1, not 'ten'"),
        ("epochs=0", "Recipe.epochs must be a whole number of at least 1, not 0"),
        ("epochs=2.5", "Recipe.epochs must be a whole number of at least 1, not 2.5"),
        ("momentum=2", "Recipe.momentum must be a number between 0 and 1"),
        ("head.stop_con=some", "must be one of correct, all, none"),
        ("peak=-1", "peak must be a number above 0"),
        ("head=Linf(1)", "must be a Head"),
        ("weight_decay=1/0", "cannot work out"),
    ):
        expect_error(command("train", "digits-pgdat-rr", change), words)
    assert not Path("runs").exists(), "something was written"


def test_malformed_input_gives_one_sentence(command: Command, run_here: Path) -> None:
    for change, words in (
        ("validation_attack=PGD", "PGD lacks ball; it takes ball"),
        ("validation_attack.objective=-CE()", "only a number can be negative"),
        ("weight_decay=1" + 400 * "0", "weight_decay must be a number"),
        ("seed=99999999999999999999", "below 2^63"),
        ("seed=-1", "of at least 0"),
        ("epochs=", "write key=value"),
        ("=3", "write key=value"),
        ("épochs=3", "no key"),
        ("net=ResNet8(width=4,width=5)", "the same field twice"),
        ("attack.keep=success", "use bn=eval"),
    ):
        expect_error(command("train", "digits-pgdat-rr", change, "--out", "new"), words)
    Path("binary").write_bytes(bytes(range(128, 256)))
    Path("folder").mkdir()
    expect_error(command("train", "@binary"), "not a text file")
    expect_error(command("train", "@folder"), "there is no file")
    expect_error(command("train", "digits-pgdat-rr", "--out", "binary"), "is a file")
    expect_error(command("train", "digits-pgdat-rr", "--out", "binary/below"), "binary")
    expect_error(command("attack", "tiny", "clean:eps=1"), "no key 'eps'", "nothing to choose from")
    assert command("attack", "tiny", "clean", "--n", "20")[0] == 0
    expect_error(command("report", "tiny", "-o", "folder"), "folder")


def test_nested_changes_and_long_labels_work(command: Command, run_here: Path) -> None:
    label = (
        "pgd-10:objective=PlusLogScore(RCon(),eta=10,base_objective=UntargetedMargin()),restarts=2,seed="
        + 17 * "1"
    )
    code, _, err = command("attack", "tiny", label, "--n", "10")
    assert code == 0, err
    code, out, _ = command("score", "tiny", "--protocol", "deploy")
    assert code == 0
    assert label in out
    assert "…" not in out, "a figure was cut"


def test_attack_and_score_do_not_wait_for_the_lock_of_a_finished_run(
    command: Command, run_here: Path
) -> None:
    assert command("attack", "tiny", "clean", "--n", "30")[0] == 0
    assert command("score", "tiny")[0] == 0
    hold = "from demur.files.checked_files import exclusive_lock\nimport pathlib, time\n"
    hold += (
        f"with exclusive_lock(pathlib.Path({str(run_here)!r})):\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    other = forked.popen(["-c", hold])
    assert other.stdout.readline() == "held\n"
    assert command("score", "tiny")[0] == 0
    assert command("attack", "tiny", "pgd-10", "--n", "30")[0] == 0
    other.kill()
    other.wait()


def test_a_missing_gpu_is_reported_before_anything_is_written(command: Command) -> None:
    expect_error(command("train", "digits-pgdat", "--device", "cuda:99"), "cuda:99", "--device cpu")
    expect_error(
        command("train", "digits-pgdat", "--device", "gpu"), "use --device auto, cpu or cuda"
    )
    assert not Path("runs").exists()


def test_training_into_a_run_of_another_recipe_fails(command: Command, run_here: Path) -> None:
    before = sorted(p.name for p in run_here.iterdir())
    answer = command("train", "digits-pgdat-rr", "epochs=2", "--out", "runs/tiny")
    expect_error(answer, "another recipe", "epochs: 2 asked, 6 found")
    assert sorted(p.name for p in run_here.iterdir()) == before


def test_damaged_files_are_reported_with_both_digests(command: Command, run_here: Path) -> None:
    assert command("attack", "tiny", "clean", "--n", "30")[0] == 0
    (record,) = (run_here / "records").glob("clean-test-*.npz")
    spoil(record, 50)
    expect_error(command("score", "tiny"), record.name, "expected digest", "found")
    spoil(run_here / "model.safetensors")
    expect_error(
        command("attack", "tiny", "pgd-10"), "model.safetensors", "expected digest", "found"
    )


def test_an_unfinished_run_cannot_be_attacked_or_scored(command: Command, run_here: Path) -> None:
    (run_here / "checkpoint.json").unlink()
    expect_error(command("attack", "tiny", "clean"), "not trained to the end", "demur train")
    expect_error(command("score", "tiny"), "not trained to the end")


def test_score_without_records_names_the_attack_command(command: Command, run_here: Path) -> None:
    expect_error(command("score", "tiny"), "tiny has no record", "demur attack tiny pgd-20")


def test_bad_counts_fail(command: Command, run_here: Path) -> None:
    expect_error(command("attack", "tiny", "clean", "--n", "0"), "asked for 0 images")
    expect_error(command("attack", "tiny", "clean", "--n", "9999"), "has 300")
    expect_error(command("attack", "tiny", "clean", "--batch-size", "0"), "at least 1")
    expect_error(command("attack", "tiny", "clean", "--keep-images", "-1"), "0 or more")


def test_show_prints_resolved_recipes_and_list_prints_every_kind(
    command: Command, run_here: Path
) -> None:
    code, out, _ = command("list", "digits-pgdat-rr", "head.weight=0.5", "attack.eps=8/255")
    assert code == 0
    assert "weight=0.5" in out
    assert "Linf(eps=8/255)" in out
    assert "momentum=0.9" in out, "defaults are shown too"
    code, out, _ = command("list", "tiny")
    assert code == 0
    assert "# checkpoint:" in out
    kinds = "recipes attacks objectives criteria rejectors nets data methods"
    for kind in kinds.split():
        code, out, _ = command("list", kind)
        assert code == 0
        assert out.strip()
        assert json.loads(command("list", kind, "--json")[1])


def test_attack_and_score_end_to_end(command: Command, run_here: Path) -> None:
    code, out, err = command("attack", "tiny", "clean", "pgd-10:eps=0.1,restarts=2", "--n", "60")
    assert code == 0, err
    assert out == ""
    assert "pgd-10:eps=0.1,restarts=2" in err
    code, out, _ = command("score", "tiny", "--all")
    assert code == 0
    for word in ("paper:", "deploy:", "coverage", "accepted & wrong", "R-Con", "T-Con", "n=60"):
        assert word in out, word
    code, out, _ = command("score", "tiny", "--json", "--protocol", "deploy")
    scores = json.loads(out)
    assert [a["attack"] for a in scores["attacks"]] == ["clean", "pgd-10:eps=0.1,restarts=2"]
    assert {row["protocol"] for row in scores["rows"]} == {"deploy"}
    assert all(row["point"]["n"] == 60 for row in scores["rows"])


def test_an_attack_can_be_read_from_a_file(command: Command, run_here: Path) -> None:
    Path("mine.txt").write_text(
        "PGD(Linf(0.05),\n    steps=2, objective=CE() + PlusLogScore(Energy()))\n"
    )
    code, _, err = command("attack", "tiny", "@mine.txt", "--n", "20")
    assert code == 0, err
    Path("wrong.txt").write_text("RCon()")
    expect_error(command("attack", "tiny", "@wrong.txt"), "does not hold an attack")


def test_training_twice_uses_the_same_folder(command: Command) -> None:
    words = ("train", "digits-standard", "epochs=1", "width=4", "validation_attack=Clean")
    code, _, err = command(*words)
    assert code == 0, err
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("digits-standard-")
    code, _, err = command(*words)
    assert code == 0
    assert "trained already" in err


def test_ctrl_c_says_how_to_resume(in_empty_folder: Path) -> None:
    words = ["train", "digits-pgdat-rr", "epochs=50", "width=4", "--out", "run"]
    process = forked.popen(["-m", "demur", *words])
    deadline = time.monotonic() + 60
    while not Path("run/recipe.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command resumes" in err
    assert "Traceback" not in err


# ---------------------------------------------------------------------------------- demur data


@pytest.fixture
def small_sets(monkeypatch: pytest.MonkeyPatch, in_empty_folder: Path) -> dict[str, Published]:
    """CIFAR as small files that cannot be downloaded."""
    sets = {name: small(published) for name, published in PUBLISHED.items()}
    for name, published in sets.items():
        nowhere = replace(published, archive="http://127.0.0.1:9/nowhere")
        monkeypatch.setitem(PUBLISHED, name, nowhere)
    monkeypatch.setenv("PATH", str(in_empty_folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_empty_folder / "cache"))
    monkeypatch.delenv("DEMUR_DATA", raising=False)
    return sets


def test_the_data_command_has_help_with_an_example(command: Command) -> None:
    code, out, _ = command("data", "get", "--help")
    assert code == 0
    assert "Example: demur data get cifar10" in " ".join(out.split())


def test_data_get_skips_a_complete_data_set(
    command: Command, small_sets: dict[str, Published]
) -> None:
    expect_error(command("data", "get", "digits"), "no data set to download is called 'digits'")
    expect_error(command("data", "get", "cifar10", "--data", "here"), "could not be fetched")
    write(small_sets["cifar10"], Path("here"), "binary")
    code, out, err = command("data", "get", "cifar10", "--data", "here")
    assert (code, out) == (0, "")
    assert "CIFAR-10 is in here/cifar-10-batches-bin: already there and complete" in err
