"""The check that both engines train the same weights."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import engine_check
import reports as reports_module
from demur.engine import FrozenModel
from demur.methods import PGDAT, RR, Method
from demur.nets import ResNet8
from demur.recipes import recipe
from engine_check import program
from tests.benchmarks.conftest import Script
from tests.test_cli import expect_error

CPU = torch.device("cpu")


@pytest.fixture
def one_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that takes seconds: one framework, one head, two steps, no compilation."""
    framework = recipe("digits-pgdat-rr", ["attack.steps=1", "bn=eval"]).method.framework
    assert isinstance(framework, PGDAT)
    monkeypatch.setattr(engine_check, "frameworks", lambda: [framework])
    monkeypatch.setattr(engine_check, "HEADS", (RR,))
    monkeypatch.setattr(engine_check, "STEPS", 2)
    equality = engine_check.equality
    small = {"method": Method(framework, RR()), "net": ResNet8(4), "batch_size": 16}
    monkeypatch.setattr(
        engine_check,
        "equality",
        lambda full, device, compiler: equality(replace(full, **small), device, "none"),
    )
    monkeypatch.setattr(engine_check, "MIN_TOLERANCE", 0.1)  # two steps vary more than twenty


def test_engines_that_agree_pass_the_check(script: Script, one_pair: None) -> None:
    code, out, err = script(program)
    assert code == 0, err
    verdicts = [line.split()[:2] for line in out.splitlines()[:4]]
    assert verdicts == 2 * [["same", "fp64"]] + 2 * [["same", "fp32"]]
    assert out.count("ema=0.99 awp=0.01") == 2
    assert "noise is the same on CPU and device: True" in out


def test_engines_that_differ_fail_the_check(
    script: Script, one_pair: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FrozenModel, "refresh", lambda self: None)
    code, out, err = script(program, "--only", "fp64", "--json")
    assert code == 1
    assert "the fast engine differs from the plain one" in err
    report = json.loads(out)
    assert {"machine", "steps"} <= report.keys()
    double, *_ = report["pairs"]
    assert (double["precision"], double["holds"]) == ("fp64", False)


def test_an_interrupted_check_resumes(
    script: Script, one_pair: None, in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 2
    compared: list[Any] = []

    def interrupted_equality(recipe: Any, device: Any, compiler: Any) -> engine_check.Equality:
        if len(compared) == limit:
            raise KeyboardInterrupt
        compared.append(recipe)
        return engine_check.Equality(
            **engine_check._identity(recipe), distance_to_plain=0.0, tolerance=1.0,
            distance_in_one_step=0.0, tolerance_in_one_step=1.0, captured=False,
        )  # fmt: skip

    monkeypatch.setattr(engine_check, "equality", interrupted_equality)
    arguments = ["--only", "rr,fp32,fp64", "-o", "check.json"]
    assert script(program, *arguments)[0] != 0
    saved = json.loads((in_empty_folder / "check.json").read_text())["pairs"]
    assert [pair["precision"] for pair in saved] == ["fp64", "fp64"]
    limit = 4
    assert script(program, *arguments)[0] == 0
    assert len(compared) == 4, "nothing was compared twice"
    pairs = json.loads((in_empty_folder / "check.json").read_text())["pairs"]
    assert pairs[:2] == saved
    assert [pair["precision"] for pair in pairs] == ["fp64", "fp64", "fp32", "fp32"]


def test_only_selects_the_compared_pairs(script: Script, in_empty_folder: Path) -> None:
    selected = engine_check.selected_recipes(("trades", "ccat", "rr", "fp32"))
    assert {engine_check._names(recipe) for recipe in selected} == {
        ("trades", "rr", "fp32"),
        ("ccat", "rr", "fp32"),
    }
    everything = [*engine_check.recipes("fp32"), *engine_check.recipes("fp64")]
    assert len(engine_check.selected_recipes(())) == len(everything)
    expect_error(
        script(program, "--only", "trade"),
        "no framework, head or precision is called 'trade'; did you mean trades",
    )
    expect_error(
        script(program, "--only", "ccat,snet"), "no framework and head combine as ccat, snet"
    )
    (in_empty_folder / "other.json").write_text("[]")
    expect_error(
        script(program, "-o", "other.json"),
        "other.json is not a report of this command; name another file",
    )
    assert (in_empty_folder / "other.json").read_text() == "[]"


def test_different_noise_on_the_device_fails_the_check(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine_check.noise_is_equal(CPU)
    monkeypatch.setattr(engine_check, "selected_recipes", lambda only: [])
    monkeypatch.setattr(engine_check, "noise_is_equal", lambda device: False)
    assert script(program)[0] == 1


def test_equality_fails_after_a_fallback_or_a_large_distance() -> None:
    same = engine_check.Equality("framework", "head", "fp64", 0.0, 1e-9, 0.0, 1e-9, captured=True)
    assert same.holds
    assert not replace(same, failure="no compiler").holds
    assert not replace(same, distance_to_plain=2e-9).holds
    assert not replace(same, distance_to_plain=float("nan")).holds
    assert not replace(same, distance_in_one_step=2e-9).holds


def disk_full(*words: Any) -> str:
    """Fail as on a full disk."""
    raise OSError(28, "No space left on device")


def test_a_report_that_cannot_be_written_is_still_printed(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_check, "selected_recipes", lambda only: [])
    monkeypatch.setattr(reports_module, "write_text", disk_full)
    code, out, err = script(program, "-o", "page")
    assert code == 2
    assert "noise is the same" in out
    assert "the disk is full" in err


def test_a_report_continues_after_a_part_could_not_be_written(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = reports_module.open_reports("page", "pairs")
    reports.keep({"pairs": []})
    assert Path("page").read_text() == '{\n  "pairs": []\n}\n'
    monkeypatch.setattr(reports_module, "write_text", disk_full)
    reports.keep({"pairs": [1]})
    assert capsys.readouterr().err == (
        "demur: page could not be written: No space left on device; continuing\n"
    )
    os.mkfifo("pipe")
    reports_module.open_reports("pipe", "pairs").keep(
        {"pairs": []}
    )  # writing would wait for a reader
