"""demur retrofit: an R-Con head on a frozen net of somebody else's."""

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

import demur
from demur import Guard, LoadedRun, Run
from demur.attacks import Clean
from demur.calibrate import ChanceTest
from demur.errors import BadInput
from demur.evaluate import run_attack, values
from demur.metrics import Difference, auroc_difference
from demur.rejectors import Con, RCon
from demur.spec import importing
from demur.training.retrofitting import HeadComparison, _advice, _grade, retrofit_recipe
from tests.conftest import Command
from tests.own_images import write_folder

BRIEF = ["size=8", "epochs=2", "attack.steps=2", "batch_size=16"]


def load(num_classes: int) -> nn.Module:
    """A net that reads the mean of each channel and prefers the first class."""
    net = nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 6), nn.Identity(),
        nn.Linear(6, num_classes),
    )  # fmt: skip
    with torch.no_grad():
        first, last = net[2], net[4]
        assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
        first.weight.copy_(torch.cat([torch.eye(3), -torch.eye(3)]) * 4)
        last.weight.copy_(torch.cat([torch.eye(3), -torch.eye(3)], 1) * 4)
        first.bias.zero_()
        last.bias.copy_(torch.tensor([8.8, 0.0, 0.0]))  # too often the first class
    return net


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("own") / "photos", 150)


@pytest.fixture(autouse=True)
def my_nets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = ModuleType("my_nets")
    vars(module)["load"] = load
    monkeypatch.setitem(sys.modules, "my_nets", module)
    monkeypatch.setattr(importing, "_TYPED", set())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_command_learns_compares_and_exports(
    command: Command, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["retrofit", "my_nets:load", f"data={photos}", *BRIEF]
    code, out, err = command(*words)
    assert code == 0, err
    run = Run.open("retrofit-load")
    net, x = run.net(torch.device("cpu")), torch.rand(5, 3, 8, 8)
    own = load(3).eval()
    assert torch.equal(net(x).logits, own(x)), "the net keeps its weights"
    assert torch.equal(net(x).feature, own[:4](x)), "the head reads the penultimate layer"  # type: ignore[index]
    record = run_attack(LoadedRun(run, "cpu"), "clean", Clean())
    gap = auroc_difference(values(RCon(), record), values(Con(), record), record.correct)
    stored = json.loads((run.path / "retrofit.json").read_text())["comparisons"]
    assert stored[0]["difference"] == pytest.approx(gap._asdict())
    assert [line.partition(",")[0] for line in out.splitlines()[1:4]] == [
        "clean images", "PGD-20 on the net", "PGD-50 on each score itself",
    ]  # fmt: skip
    about = json.loads((run.path / "retrofit.json").read_text())
    assert out.startswith(f"verdict: {about['verdict']['grade']}. ")
    assert "training takes about 1 min on this machine" in err
    assert f"[{gap.lo:+.3f}, {gap.hi:+.3f}]" in out
    assert "DEMUR_MODULES=my_nets demur serve guards/retrofit-load" in err
    code, again, _ = command(*words, "--json")  # nothing is trained or attacked again
    assert json.loads(again)["comparisons"] == stored
    guard = Guard.load("guards/retrofit-load")
    assert guard.class_names == ("cat", "dog", "fish")
    assert np.array_equal(guard(x).labels, own(x).argmax(1).numpy())
    importing._TYPED.clear()  # another process
    with pytest.raises(BadInput, match="is code and is not imported for a file"):
        Guard.load("guards/retrofit-load")
    monkeypatch.setenv("DEMUR_MODULES", "my_nets")
    assert Guard.load("guards/retrofit-load").thresholds == guard.thresholds


def test_a_named_layer_and_the_python_function(photos: Path, tmp_path: Path) -> None:
    changes = ["epochs=1", *BRIEF[2:], "size=8"]
    found = demur.retrofit("my_nets:load", str(photos), tmp_path / "run", "2", changes)
    feature = found.run.net(torch.device("cpu"))(torch.rand(2, 3, 8, 8)).feature
    assert feature.shape == (2, 6)
    assert len(found.comparisons) == 3


def test_verdicts_follow_the_interval() -> None:
    def verdict(measure: str, lo: float, hi: float) -> str:
        gap = Difference((lo + hi) / 2, lo, hi, 0.5)
        return HeadComparison("clean images", measure, 0.5, 0.5, gap, 9, 20).verdict  # type: ignore[arg-type]

    assert verdict("AUROC", 0.01, 0.1) == verdict("accepted errors", -0.1, -0.01) == "better"
    assert verdict("AUROC", -0.1, -0.01) == verdict("accepted errors", 0.01, 0.1) == "worse"
    assert verdict("AUROC", -0.01, 0.1) == verdict("accepted errors", 0.0, 0.1)
    gap = Difference(0.0, -1.0, 1.0, 1.0)
    for correct, rare in ((0, "correct"), (20, "wrong")):
        one = HeadComparison("clean images", "AUROC", 0.5, 0.5, gap, correct, 20)
        assert one.sentence == (
            f"clean images, AUROC: too few {rare} predictions to compare "
            f"({correct} of 20 are correct)"
        )


@pytest.mark.parametrize(
    ("left", "errors", "gain", "grade", "advice"),
    [
        (0, 51, 0.1, "broken", "not worth it under attack"),  # of the issue: 85% accepted errors
        (5, 0, 0.1, "broken", "not worth it under attack"),  # it rejects, but no prediction holds
        (30, 51, 0.1, "suspicious", "not worth it under attack"),
        (30, 3, 0.1, "suspicious", "not worth it under attack"),  # 5%, but up to 12.4%
        (30, 1, 0.1, "no known sign of failure", "the head is worth it"),
        (30, 1, 0.0, "no known sign of failure", "not shown to be better than"),
        (30, 1, -0.1, "no known sign of failure", "worse than the net's own confidence"),
    ],
)
def test_the_grade_comes_first_and_limits_the_advice(
    left: int, errors: int, gain: float, grade: str, advice: str
) -> None:
    gap, none = Difference(gain, gain - 0.05, gain + 0.05, 0.5), Difference(0.0, -0.1, 0.1, 1.0)
    found = [
        HeadComparison("clean images", "AUROC", 0.9, 0.8, gap, 50, 60),
        HeadComparison("PGD-20 on the net", "AUROC", 0.9, 0.8, none, left, 60),
        HeadComparison("PGD-50", "accepted errors", errors / 60, 0.8, none, 0, 60),
    ]
    verdict = _grade(found, ChanceTest(50, 60, 5, 12, "test"))
    assert verdict.grade == grade
    assert advice in _advice(found, verdict.grade)
    assert f"{errors} of 60 images are wrong and accepted by R-Con" in str(verdict)


def test_a_net_at_chance_is_suspicious_even_if_no_attack_breaks_it() -> None:
    none = Difference(0.0, -0.1, 0.1, 1.0)
    found = [
        HeadComparison(name, measure, 0.0, 0.0, none, 12, 60)  # type: ignore[arg-type]
        for name, measure in (("clean", "AUROC"), ("PGD", "AUROC"), ("own", "accepted errors"))
    ]
    verdict = _grade(found, ChanceTest(12, 60, 5, 12, "test"))
    assert verdict.grade == "suspicious" and "not shown to be better than chance" in str(verdict)


def test_bad_retrofits_say_what_to_do(command: Command, photos: Path) -> None:
    for words, message in (
        (["my_nets:load", "size=8"], "needs images; name them with data=PATH"),
        (["my_nets.load", f"data={photos}"], "write module:name"),
        (["no_such_module:load", f"data={photos}", "size=8"], "cannot be imported"),
        (["my_nets:load", f"data={photos}", "head=NoHead()"], "a frozen net trains the head alone"),
    ):
        code, _, err = command("retrofit", *words)
        assert (code, message in err) == (2, True), err
    assert not Path("runs").exists()
    with pytest.raises(BadInput, match="under PGD; use framework=PGDAT"):
        from demur.training.retrofitting import training_attack

        training_attack(retrofit_recipe("my_nets:load", ["framework=Standard()"]))
