"""The paper's adaptive objectives against formulas, their worst case, and the command."""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from demur import noise
from demur.attacks import PGD, AcceptedError, MultiTarget, WrongConfidence
from demur.attacks.attack import AttackBatch
from demur.attacks.attack_model import attack_model
from demur.data import CIFAR10
from demur.errors import BadInput
from demur.evaluate import LoadedRun, resolve_thresholds
from demur.output import Output
from demur.paper.adaptive import ETAS, AdaptivePlan, Measure, Trial, formula, marks, minima
from demur.recipes import ADAPTIVE_OBJECTIVES, NAMED_ATTACKS, RECIPES, attack, recipe
from demur.rejectors import Con, RCon
from demur.runs import Run
from demur.spec import show
from demur.training import train
from tests.cifar_files import use_small_set
from tests.conftest import Command
from tests.test_checkpoint_selection import BRIEF
from tests.test_cli import expect_error

STUDY = ("paper", "study", "adaptive")
RR_RUN, PLAIN_RUN = RECIPES["digits-pgdat-rr"], RECIPES["digits-pgdat"]
LOGITS, AUX = (2.0, 1.0, 0.0), 0.5
ETA, TARGET = 10.0, 2
QUICK = ("--n", "12", "--steps", "2", "--restarts", "1", "--etas", "1,10")


def toy() -> Output:
    logits = torch.tensor([LOGITS], dtype=torch.float64)
    return Output(logits, logits[:, :0], torch.tensor([[AUX]], dtype=torch.float64))


def by_hand(y: int, tau: float = 1.0) -> dict[str, float]:
    """Each objective at ETA for the toy output, from the paper's formulas."""
    p, p_tau = (
        [math.exp(v / t) / sum(math.exp(u / t) for u in LOGITS) for v in LOGITS] for t in (1.0, tau)
    )
    rcon = max(p_tau) / (1 + math.exp(-AUX))
    rr = -p_tau[y] * math.log(rcon) - (1 - p_tau[y]) * math.log(1 - rcon)
    ce, con = -math.log(p[y]), math.log(max(p[k] for k in range(3) if k != y))
    return {
        "ce-log-score": ce + ETA * math.log(rcon),
        "ce-rr": ce + ETA * rr,
        "con-rr": con + ETA * rr,
        "con-log-score": con + ETA * math.log(rcon),
        "targets-rr": math.log(p[TARGET]) + ETA * rr,
        "ce-score": ce + ETA * rcon,
    }


@pytest.mark.parametrize("name", ADAPTIVE_OBJECTIVES)
@pytest.mark.parametrize("y", [0, 1])
@pytest.mark.parametrize("tau", [1.0, 0.5])
def test_objectives_equal_their_formulas(name: str, y: int, tau: float) -> None:
    run = recipe("digits-pgdat-rr", [f"head.tau={tau}"])
    objective = ADAPTIVE_OBJECTIVES[name].objective(run, ETA)
    targets = [torch.tensor([TARGET])] * objective.n_inputs
    value = objective(toy(), torch.tensor([y]), *targets)
    assert value.item() == pytest.approx(by_hand(y, tau)[name])


def test_all_six_objectives_have_names_and_formulas() -> None:
    formulas = {name: formula(objective, RR_RUN) for name, objective in ADAPTIVE_OBJECTIVES.items()}
    assert formulas == {
        "ce-log-score": "CE + eta log R-Con",
        "ce-rr": "CE + eta L_RR",
        "con-rr": "L_Con + eta L_RR",
        "con-log-score": "L_Con + eta log R-Con",
        "targets-rr": "L_Con of each class + eta L_RR",
        "ce-score": "CE + eta R-Con",
    }
    for name in ADAPTIVE_OBJECTIVES:
        named = attack(f"adaptive-{name}:eta=10", RR_RUN)
        assert named == ADAPTIVE_OBJECTIVES[name].attack(RR_RUN, 10)
        inner = named.attack if isinstance(named, MultiTarget) else named
        assert isinstance(inner, PGD)
        assert (inner.steps, inner.restarts, inner.keep) == (500, 10, "max_objective")


def test_eta_is_set_everywhere_in_an_attack() -> None:
    named = attack("adaptive-targets-rr:steps=7,eta=3,eps=0.1", RR_RUN)
    assert isinstance(named, MultiTarget)
    assert isinstance(named.attack, PGD)
    assert (named.attack.steps, named.attack.ball.eps) == (7, 0.1)
    assert show(named).count("3.0") == 2, "in the objective and in the ranking of classes"
    assert named.rank_by == ADAPTIVE_OBJECTIVES["con-rr"].objective(RR_RUN, 3.0)
    for text, message in (("eta=ten", "eta must be a number"), ("eta=-1", "of at least 0"),
                        ("etta=1", "no key 'etta'")):  # fmt: skip
        with pytest.raises(BadInput, match=message):
            attack(f"adaptive-ce-rr:{text}", RR_RUN)


def test_labels_can_be_read_by_the_command() -> None:
    for plan in (
        AdaptivePlan.of(RR_RUN),
        AdaptivePlan.of(PLAIN_RUN, etas=(0.123456789, 1e-7), steps=3),
    ):
        for name in plan.objectives:
            for eta in plan.etas:
                assert attack(plan.label(name, eta), plan.recipe) == plan.attack(name, eta)
        plain = attack(plan.baseline_label, plan.recipe)
        assert isinstance(plain, PGD)
        assert (plain.steps, plain.restarts) == (plan.steps, plan.restarts)
    assert AdaptivePlan.of(RR_RUN).label("ce-log-score", 10.0) == "adaptive-ce-log-score:eta=10"
    assert AdaptivePlan.of(RR_RUN).worst_label == "adaptive-worst"
    other = AdaptivePlan.of(RR_RUN, ["con-rr"], (1, 10), steps=5).worst_label
    assert other == "adaptive-worst:objectives=con-rr,etas=1+10,steps=5"


def test_a_net_without_a_head_is_attacked_through_its_confidence() -> None:
    plan = AdaptivePlan.of(PLAIN_RUN)
    assert plan.objectives == ("ce-log-score", "con-log-score", "ce-score")
    assert plan.rejectors == {"Con": Con()}
    objective = ADAPTIVE_OBJECTIVES["con-log-score"].objective(PLAIN_RUN, 2.0)
    p = torch.tensor(LOGITS, dtype=torch.float64).softmax(0)
    value = objective(toy(), torch.tensor([0]))
    assert value.item() == pytest.approx(math.log(p[1]) + 2 * math.log(p[0]))
    with pytest.raises(BadInput, match="con-rr needs L_RR and a second output"):
        AdaptivePlan.of(PLAIN_RUN, ["con-rr"])


def test_the_worst_case_succeeds_where_any_member_succeeds(tiny_source: LoadedRun) -> None:
    plan = AdaptivePlan.of(tiny_source.run.recipe, etas=(0.1, 30), steps=2, restarts=1)
    assert len(plan.worst.attacks) == 6 * 2
    assert plan.worst.criterion == AcceptedError(RCon(), plan.worst.criterion.threshold)  # type: ignore[attr-defined]
    chain = resolve_thresholds(plan.worst, tiny_source.clean).spec
    net, images = tiny_source.net, tiny_source.splits["test"]
    x, y = images.batch(slice(0, 6))
    attack_batch = AttackBatch(attack_model(net), x, y, torch.arange(6), None)
    with torch.no_grad():
        worst = chain.criterion(net(chain.run(attack_batch, 0)), y)
        counts = []
        for i, member in enumerate(chain.attacks):
            alone = member.run(attack_batch, noise.derive_seed(0, i))
            succeeded = chain.criterion(net(alone), y)
            assert worst[succeeded].all(), show(member)
            counts.append(int(succeeded.sum()))
    assert int(worst.sum()) >= max(counts) > 0


@dataclass(frozen=True)
class KnownTrial(Trial):
    """A trial with a given value."""

    figure: float = 0.0

    def value(self, rejector: str, measure: Measure) -> float:
        return self.figure


def known_trials(*figures: tuple[str, float, float]) -> list[Trial]:
    no_record: Any = None
    return [KnownTrial(name, name, eta, no_record, figure) for name, eta, figure in figures]


def test_the_smallest_value_of_each_objective_and_of_all_is_marked() -> None:
    trials = known_trials(
        ("a", 0.1, 0.7), ("a", 1, 0.6), ("a", 10, 0.9), ("b", 0.1, 0.5), ("b", 1, 0.4),
        ("b", 10, 0.4), ("c", 0.1, 0.8), ("c", 1, 0.8), ("c", 10, 0.81),
    )  # fmt: skip
    objective, overall = "objective", "all"
    assert marks(trials, "R-Con", "accuracy") == [
        "", objective, "", "", overall, overall, objective, objective, "",
    ]  # fmt: skip
    assert minima(trials, "R-Con")["auroc"] == {"value": 0.4, "objective": "b", "eta": 1}


# ---------------------------------------------------------------------------------- the command


@pytest.fixture
def run_here(tiny_run: Run, in_empty_folder: Path) -> Path:
    return Path(shutil.copytree(tiny_run.path, in_empty_folder / "runs" / "tiny"))


def test_both_protocols_run_and_reuse_records(command: Command, run_here: Path) -> None:
    words = (*STUDY, "tiny", *QUICK, "--objectives", "ce-log-score,targets-rr")
    code, out, err = command(*words, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["rejector"] == "R-Con"
    paper = found["paper"]["trials"]
    assert [(trial["objective"], trial["eta"]) for trial in paper] == [
        ("ce-log-score", 1), ("ce-log-score", 10), ("targets-rr", 1), ("targets-rr", 10),
    ]  # fmt: skip
    figures = [
        row["point"]["accuracy"] for t in paper for row in t["rows"] if row["rejector"] == "R-Con"
    ]
    assert found["paper"]["least"]["R-Con"]["accuracy"]["value"] == min(figures)
    assert set(found["paper"]["least"]) == {"R-Con", "Con"}
    (worst,) = (
        r for r in found["deploy"]["rows"] if (r["rejector"], r["protocol"]) == ("R-Con", "deploy")
    )
    assert worst["point"]["n"] == 12
    written = {path: path.stat().st_mtime_ns for path in (run_here / "records").iterdir()}
    assert sum("adaptive-worst" in path.name for path in written) == 2
    code, out, _ = command(*words)
    assert code == 0
    for word in ("CE + eta log R-Con", "**", "R-Con: AUROC", "deploy:", "wrong and accepted by"):
        assert word in out, word
    assert written == {path: path.stat().st_mtime_ns for path in (run_here / "records").iterdir()}
    typed = "adaptive-ce-log-score:eta=10,steps=2,restarts=1"
    assert command("attack", "tiny", typed, "--n", "12")[0] == 0
    assert written == {path: path.stat().st_mtime_ns for path in (run_here / "records").iterdir()}


def test_one_protocol_runs_only_its_own_attacks(command: Command, run_here: Path) -> None:
    words = (*STUDY, "tiny", *QUICK, "--objectives", "ce-score", "--json")
    for protocol, other in (("deploy", "paper"), ("paper", "deploy")):
        code, out, err = command(*words, "--protocol", protocol)
        assert code == 0, err
        assert protocol in json.loads(out)
        assert other not in json.loads(out)


def test_bad_arguments_exit_with_a_message(command: Command, run_here: Path) -> None:
    before = sorted(path.name for path in (run_here / "records").glob("*test*"))
    expect_error(command(*STUDY, "tinny"), "there is no run 'tinny'")
    expect_error(command(*STUDY, "tiny", "--protocol", "papr"), "did you mean paper")
    expect_error(command(*STUDY, "tiny", "--objectives", "ce-rrr"), "no objective", "ce-rr")
    expect_error(command(*STUDY, "tiny", "--etas", "1,x"), "--etas is '1,x'; give numbers")
    expect_error(command(*STUDY, "tiny", "--etas=-1"), "eta must be a number of at least 0, not -1")
    expect_error(command(*STUDY, "tiny", "--etas", "inf"), "eta must be a number")
    expect_error(command(*STUDY, "tiny", "--etas", ","), "nothing to try")
    expect_error(command(*STUDY, "tiny", "--steps", "0"), "steps must be a whole number")
    expect_error(command(*STUDY, "tiny", "--restarts", "0"), "restarts must be a whole number")
    expect_error(command(*STUDY, "tiny", "--n", "9999"), "has 300")
    assert before == sorted(path.name for path in (run_here / "records").glob("*test*"))


def test_without_cal_images_only_the_papers_protocol_runs(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_small_set(CIFAR10, monkeypatch, tmp_path / "data")
    brief = [*BRIEF, "split=paper", "epochs=1", "head=NoHead()"]
    train(recipe("cifar10-pgdat-rr", brief), Path("runs/paper"), data_folder=tmp_path / "data")
    words = (*STUDY, "paper", "--data", str(tmp_path / "data"), *QUICK[2:])
    code, out, err = command(*words, "--n", "10", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert "deploy" not in found
    assert {trial["objective"] for trial in found["paper"]["trials"]} == {
        "ce-log-score", "con-log-score", "ce-score",
    }  # fmt: skip
    message = " ".join(err.split())
    assert "no cal images were held out for this run" in message
    assert "without L_RR: no second output" in message
    expect_error(command(*words, "--protocol", "deploy"), "no threshold can be deployed")


def test_defaults_are_the_papers() -> None:
    plan = AdaptivePlan.of(RR_RUN)
    assert list(plan.etas) == list(ETAS) == [0.1, 0.3, 1, 3, 10, 30, 100]
    assert (plan.steps, plan.restarts) == (500, 10)
    assert set(plan.objectives) == set(ADAPTIVE_OBJECTIVES)
    assert all(f"adaptive-{name}" in NAMED_ATTACKS for name in ADAPTIVE_OBJECTIVES)
    assert isinstance(plan.worst.attacks[-1], MultiTarget)
    assert ADAPTIVE_OBJECTIVES["con-rr"].base_objective == WrongConfidence()
