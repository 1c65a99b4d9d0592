"""Peer comparison of RejectAutoAttack with simpler attacks: queries, curves, resuming."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import peer_rejection
from demur.attacks import AcceptedError, Attack, Chain, RejectAutoAttackEnsemble, UntargetedMargin
from demur.attacks.attack import AttackBatch
from demur.attacks.attack_model import attack_model
from demur.attacks.balls import Linf
from demur.data import Images
from demur.errors import BadInput
from demur.evaluate import LoadedRun, RecordOptions
from demur.methods import PGDAT, Method
from demur.output import prediction
from demur.recipes import VOCABULARY, recipe
from demur.rejectors import GDA, Con, Coupled, RCon, Rectifier, TooFewImages
from demur.rejectors.rule import Rejector
from demur.spec import read
from peer_rejection import (
    Budget,
    CountingModel,
    OrthogonalPGD,
    _criterion,
    _curve,
    compare_rejection_attacks,
    peer_rejection_svg,
    program,
    rules_by_name,
)
from reports import Reports
from tests.benchmarks.conftest import Script
from tests.linear import LinearNet, centred_images
from tests.test_cli import expect_error


def test_gradient_queries_are_counted() -> None:
    net = CountingModel(LinearNet())
    x, y = centred_images(6), torch.zeros(6, dtype=torch.long)
    net(x)
    assert net.queries == pytest.approx(2)
    found = attack_model(net).gradient(UntargetedMargin(), x, y)
    assert net.queries == pytest.approx(8)
    assert torch.equal(
        found.grad, attack_model(LinearNet()).gradient(UntargetedMargin(), x, y).grad
    )
    attack_model(net).value(UntargetedMargin(), x, y)
    assert net.queries == pytest.approx(10)


def test_orthogonal_pgd_finds_accepted_errors() -> None:
    net, x = LinearNet(1), centred_images(20, 1)
    y = (prediction(net(x)) + 1) % 4  # misclassified from the start, rejected
    rule = AcceptedError(Rectifier(), net(x).aux.max().sigmoid().item() + 0.05)
    assert not rule(net(x), y).any()
    assert rule(net(OrthogonalPGD(Linf(0.2), rule)(net, x, y)), y).float().mean() > 0.7


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attack with few steps."""
    original = RejectAutoAttackEnsemble.members

    def members(self: RejectAutoAttackEnsemble) -> dict[str, Attack]:
        attacks = original(self)
        return {name: replace(attacks[name], steps=4) for name in ("product", "balanced")}  # type: ignore[call-arg]

    monkeypatch.setattr(RejectAutoAttackEnsemble, "members", members)
    monkeypatch.setattr(peer_rejection, "STEPS", 4)


@pytest.mark.usefixtures("few_steps")
def test_the_report_has_accepted_errors_and_queries(own_source: LoadedRun) -> None:
    images = own_source.images(RecordOptions(n=16))
    rules: dict[str, Rejector] = {"Con": Con(), "Con+R-Con": Coupled()}
    report = compare_rejection_attacks(
        own_source, images, Linf(0.15), rules, Budget("fast", 2.0), lambda sentence: None
    )
    assert json.loads(json.dumps(report))["n"] == 16
    for name in rules:
        curves = report["rules"][name]["curves"]
        for curve in curves.values():
            queries, errors = zip(*curve, strict=True)
            assert list(queries) == sorted(queries)
            assert list(errors) == sorted(errors)
            assert errors[-1] < 16
        assert len(curves["reject-autoattack"]) == 2
        assert curves["reject-autoattack"][-1][1] > 0
        assert curves["product PGD"][-1][0] >= 2 * curves["reject-autoattack"][-1][0]
    assert b"<svg" in peer_rejection_svg(report)


@pytest.mark.usefixtures("few_steps")
def test_an_interrupted_report_resumes(
    own_source: LoadedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, budget = own_source.images(RecordOptions(n=10)), Budget("fast", 0.5)
    saved: list[str] = []
    reports = Reports(lambda report: saved.append(json.dumps(report)))

    def compare(rules: dict[str, Rejector], reports: Reports, n: int = 10) -> dict[str, Any]:
        ball, first = Linf(0.15), images.first(n)
        return compare_rejection_attacks(
            own_source, first, ball, rules, budget, lambda _: None, reports
        )

    compare({"Con": Con()}, reports)
    (first,) = map(json.loads, saved)
    resumed = compare({"Con": Con(), "R-Con": RCon()}, Reports(earlier=first))
    assert list(resumed["rules"]) == ["Con", "R-Con"]
    assert resumed["rules"]["Con"] == first["rules"]["Con"]
    monkeypatch.setattr(peer_rejection, "_curve", lambda *args: [(1.0, 0)])
    assert compare({"Con": Con()}, Reports(earlier=first))["rules"] == first["rules"]
    with pytest.raises(BadInput, match="has another n and is not overwritten; name another file"):
        compare({"Con": Con()}, Reports(earlier=first), n=5)
    changed = first | {"machine": first["machine"] | {"code": "other"}}
    with pytest.raises(BadInput, match="has another code and is not overwritten"):
        compare({"Con": Con()}, Reports(earlier=changed))


@pytest.mark.usefixtures("few_steps")
def test_the_reported_counts_are_the_accepted_errors(own_source: LoadedRun) -> None:
    images = own_source.images(RecordOptions(n=40))
    rule = _criterion(own_source, Con(), 40)
    chain = RejectAutoAttackEnsemble(Linf(0.15), rule, version="fast").chain()
    curve = _curve(own_source, images, rule, iter(chain.attacks), None)
    x, y = images.batch(slice(None))
    x_adv = x
    for member, attack in enumerate(chain.attacks):
        left = ~rule(own_source.net(x_adv), y)
        batch = AttackBatch(
            attack_model(own_source.net), x[left], y[left], images.index[left], None
        )
        x_adv = x_adv.clone()
        x_adv[left] = Chain((attack,), rule).run(batch, member)
        assert curve[member][1] == int(rule(own_source.net(x_adv), y).sum())


@pytest.mark.usefixtures("few_steps")
def test_eps_sets_the_radius(own_source: LoadedRun, script: Script) -> None:
    arguments = (str(own_source.run.path), "--n", "6", "--only", "Con")
    code, out, err = script(program, *arguments, "--times", "0", "--eps", "16/255", "--json")
    assert code == 0, err
    assert json.loads(out)["ball"] == "Linf(16/255)"
    for eps in ("-1", "far"):
        code, out, err = script(program, *arguments, "--eps", eps)
        assert (code, out) == (2, "")
        assert len(err.strip().splitlines()) == 1


def test_wrong_arguments_are_one_sentence(own_source: LoadedRun, script: Script) -> None:
    run = str(own_source.run.path)
    expect_error(
        script(program, run, "--only", "Con,Kon"), "the run has no rejector 'Kon'", "mean Con"
    )
    expect_error(script(program, run, "--version", "slow"), "standard or fast")
    expect_error(script(program, run, "--times", "inf"), "--times is inf; give a finite number")
    expect_error(script(program, run, "--times", "-1"), "'--times'")
    expect_error(script(program, run, "--figure", "."), ". is a folder; name a file")


# ------------------------------------------------------------------ rejectors of a net


def test_default_rejectors_follow_the_head() -> None:
    def default(name: str, *changes: str) -> list[str]:
        return list(rules_by_name((), recipe(name, changes)))

    product = ["Con", "R-Con", "Con+R-Con", "Energy", "GDA"]
    assert default("digits-pgdat-rr") == product
    assert rules_by_name(product, recipe("digits-pgdat-rr"))["Con+R-Con"] == Coupled()
    assert default("digits-pgdat") == ["Con", "Energy", "GDA"]
    assert default("digits-pgdat-rr", "head.construction=con")[:2] == ["Con", "Con (trained)"]
    assert rules_by_name(["R-Con"], recipe("digits-pgdat-rr", ["head.tau=2"])) == {
        "R-Con": RCon(2.0)
    }
    for head, own in [("SNet", "SNet"), ("ATRO", "ATRO"), ("CARL", "CARL"), ("EBD", "Energy")]:
        method = Method(PGDAT(), read(f"{head}()", VOCABULARY))
        with_head = replace(recipe("digits-pgdat"), method=method)
        assert own in rules_by_name((), with_head)
        assert list(rules_by_name((), with_head)) == list(
            dict.fromkeys(("Con", own, "Energy", "GDA"))
        )
        for name in ("R-Con", "Con+R-Con", "A"):
            with pytest.raises(BadInput, match="the run has no rejector"):
                rules_by_name(["Con", name], with_head)


def test_all_rejectors_are_fitted_before_the_first_attack(
    own_source: LoadedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_few(self: GDA, *given: object) -> None:
        raise TooFewImages("too few images of class 3")

    monkeypatch.setattr(GDA, "fit", too_few)
    monkeypatch.setattr(peer_rejection, "_curve", lambda *args: pytest.fail("an attack ran"))
    rules: dict[str, Rejector] = {"Con": Con(), "GDA": GDA()}
    images = own_source.images(RecordOptions(n=5))
    with pytest.raises(TooFewImages):
        compare_rejection_attacks(own_source, images, Linf(0.15), rules, Budget(), lambda _: None)


@pytest.mark.parametrize("to", ["--json", "--figure=curves.svg"])
def test_a_failing_rejector_does_not_lose_the_results_of_others(
    to: str, own_source: LoadedRun, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    def curve(loaded: LoadedRun, images: Images, rule: AcceptedError, *rest: object) -> list[Any]:
        if rule.rejector != Con():
            raise BadInput("an error")
        return [(1.0, 3)]

    monkeypatch.setattr(peer_rejection, "_curve", curve)
    run = str(own_source.run.path)
    arguments = (run, "--n", "6", "--only", "Con,Energy")
    code, out, err = script(program, *arguments, to, "-o", "report.json")
    assert code == 2
    assert "an error" in err
    assert list(json.loads(Path("report.json").read_text())["rules"]) == ["Con"]
    if to == "--json":
        assert list(json.loads(out)["rules"]) == ["Con"]
    else:
        assert "3 at 1" in out
        assert Path("curves.svg").is_file()


def test_report_and_figure_need_two_files(own_source: LoadedRun, script: Script) -> None:
    run = str(own_source.run.path)
    code, _, err = script(program, run, "-o", "one", "--figure", "./one")
    assert code == 2
    assert "one cannot take both the report and the picture" in err
    assert not Path("one").exists()
