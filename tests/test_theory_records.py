"""The theory on records: the xi objective, stored runs, and the command."""

import json
import math
import shutil
from collections import Counter
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from demur.attacks import PGD, XiObjective
from demur.attacks.balls import Linf
from demur.data import Images
from demur.errors import BadInput
from demur.nets import RejectingNet
from demur.output import Output
from demur.paper import theorems as theory
from demur.paper.theory import TheoryReport, outputs_at
from demur.paper.theory import theory as theory_of
from demur.recipes import NAMED_ATTACKS, recipe
from demur.runs import Run
from demur.spec import lines
from tests.conftest import Command
from tests.test_cli import expect_error

STUDY = ("paper", "study", "theory")
ROOT = Path(__file__).parent.parent
STORED_RECIPES = sorted((ROOT / "results").glob("**/recipe.txt"))


def stores_outputs(run: Path) -> bool:
    """Whether any record of test images holds logits; its arrays are not read."""
    files = (run / "records").glob("*-test-*.npz")
    return any("logits.npy" in ZipFile(path).namelist() for path in files)


STORED = [  # runs with an A and with outputs
    path.parent
    for path in STORED_RECIPES
    if "RR(" in path.read_text() and stores_outputs(path.parent)
]
ARCHIVE = ROOT / "results" / "methods-cifar10" / "pgdat-rr-seed0"
SOME = settings(deadline=None, max_examples=60)


def output_and_labels(seed: int, spread: float = 2.0) -> tuple[Output, Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits, aux = (spread * torch.randn(40, width, generator=g) for width in (5, 1))
    return Output(logits, logits[:, :0], aux), torch.randint(0, 5, (40,), generator=g)


class TestXiObjective:
    @SOME
    @given(st.integers(0, 10**6), st.sampled_from([0.25, 1.0, 3.0]))
    def test_is_the_xi_of_the_theory(self, seed: int, tau: float) -> None:
        out, y = output_and_labels(seed)
        a = out.aux[:, 0].double().sigmoid().numpy()
        inputs = theory.theory_inputs_at(out.logits.numpy(), y.numpy(), a, tau)
        assert XiObjective(tau)(out, y).numpy() == pytest.approx(inputs.xi, abs=2e-6)

    @pytest.mark.parametrize(("logit", "wrong"), [(18.0, False), (-18.0, True)])
    def test_value_and_gradient_are_accurate_if_a_is_nearly_a_star(
        self, logit: float, wrong: bool
    ) -> None:
        logits = torch.tensor([[30.0, 0.0]])
        aux = torch.tensor([[logit]], requires_grad=True)
        value = XiObjective()(Output(logits, logits[:, :0], aux), torch.tensor([int(wrong)]))
        (grad,) = torch.autograd.grad(value.sum(), aux)
        value = value.detach()
        assert float(value) == pytest.approx(2 / (1 + math.exp(18)), rel=1e-4)
        assert float(grad) == pytest.approx((1 if wrong else -1) * float(value), rel=1e-4)

    def test_a_correct_prediction_has_no_gradient_in_the_logits(self) -> None:
        logits = torch.tensor([[2.0, 0.0, 1.0]], requires_grad=True)
        out = Output(logits, logits[:, :0], torch.zeros(1, 1))
        (grad,) = torch.autograd.grad(XiObjective()(out, torch.tensor([0])).sum(), logits)
        assert not grad.any(), "A* is constant at 1 while the prediction is correct"

    def test_the_attack_increases_xi(self, tiny_net: RejectingNet, test_images: Images) -> None:
        x, y = test_images.batch(slice(0, 60))
        objective, attack = XiObjective(), PGD(Linf(0.15), steps=10, objective=XiObjective())
        before, after = (objective(tiny_net(images), y) for images in (x, attack(tiny_net, x, y)))
        assert after.mean() > before.mean() + 0.1
        assert (after >= before - 1e-3).float().mean() > 0.9

    def test_a_net_without_a_head_raises(
        self, tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
    ) -> None:
        with pytest.raises(BadInput, match="needs a net with an auxiliary head"):
            PGD(Linf(0.1), objective=XiObjective())(tiny_net.classifier().eval(), *batch)

    def test_the_named_attack_takes_the_temperature_of_the_head(self) -> None:
        named = NAMED_ATTACKS["xi"](recipe("digits-pgdat-rr", ["head.tau=0.5"]))
        assert isinstance(named, PGD)
        assert (named.steps, named.keep, named.objective) == (50, "max_objective", XiObjective(0.5))


@pytest.fixture(scope="module")
def archive_report() -> TheoryReport:
    return theory_of(Run(ARCHIVE))


class TestRecords:
    @pytest.mark.parametrize("folder", STORED, ids=lambda path: path.name)
    def test_no_image_of_any_stored_record_violates_a_statement(self, folder: Path) -> None:
        for record in [one for one in Run(folder).records() if not one.scores_only]:
            tried: Counter[str] = Counter()  # at some tau few images meet the premise
            for tau in (0.0, 0.25, 1.0, 2.0):
                inputs = outputs_at(record, tau)
                for name, claim in (
                    ("Lemma 1", theory.lemma1(inputs)),
                    ("Theorem 1", theory.theorem1(inputs)),
                    ("Theorem 1 at 1/2", theory.theorem1(inputs, 0.5)),
                    ("Theorem 1 behind 0.8", theory.theorem1_above(inputs, 0.8)),
                    ("the oracle", theory.oracle(inputs)),
                ):
                    where = f"{name} fails on {record.label} of {folder.name}: a bug"
                    assert not claim.violated.any(), where
                    tried[name] += int(claim.premise.sum())
            assert min(tried.values()) >= len(record.y) // 100, f"hardly tried: {tried}"

    def test_the_report_agrees_with_the_record(self, archive_report: TheoryReport) -> None:
        records = [record for record in Run(ARCHIVE).records() if len(record.y) == 10_000]
        attacked = next(one for one in archive_report.records if one.attack == "pgd-10")
        record = next(record for record in records if record.label == "pgd-10")
        assert (attacked.n, attacked.record) == (10_000, record.digest)
        at_zero, *_, at_one, _ = attacked.at_tau
        assert (at_zero.tau, at_one.tau) == (0, 1)
        assert at_zero.randomised == at_zero.sampled == record.correct.mean()
        inputs = outputs_at(record, 1.0)
        assert (
            at_one.inside.value == (inputs.con * (2 - 2 * abs(inputs.a - inputs.a_star)) > 1).mean()
        )
        assert at_one.without_head.value == attacked.oracle.coverage.value
        assert attacked.oracle.accuracy.value == 1
        assert attacked.xi.small.value == (inputs.xi <= 0.1).mean()
        assert all(t.calibrated >= t.t for t in attacked.calibration)
        for at in attacked.at_tau:
            assert abs(at.sampled - at.randomised) <= 6 * at.sampling_error

    def test_the_counts_of_the_page_are_those_of_its_run(
        self, archive_report: TheoryReport
    ) -> None:
        page = (ROOT / "docs" / "theory.md").read_text()
        assert f"`demur paper study theory {ARCHIVE.relative_to(ROOT)} " in page
        for statement in ("Lemma 1", "Theorem 1"):
            checks = [one for record in archive_report.records for one in record.checks]
            applied = sum(one.applied for one in checks if one.statement == statement)
            assert f"| violations of {statement} | 0 | 0 of {applied:,} cases |" in page

    def test_scores_only_records_are_left_out_and_named(self, command: Command) -> None:
        mixed = ROOT / "results" / "paper-cifar10" / "pgdat-rr-seed0"
        code, out, _ = command(*STUDY, str(mixed))
        assert code == 0
        assert "left out, since only their scores are stored: pgd-10:eps=16/255, pgd-10-l2" in out
        without = ROOT / "results" / "brief-cifar10" / "pgdat-rr-seed0"
        expect_error(command(*STUDY, str(without)), "has only scores", "train the recipe again")

    def test_shares_are_consistent(self, archive_report: TheoryReport) -> None:
        for record in archive_report.records:
            for at in record.at_gamma:
                assert at.inside.value == pytest.approx(at.past.value * at.inside_of_past.value)
                assert at.right_of_accepted.value >= at.inside_of_past.value - 1e-12
            for fixed in record.at_xi:
                assert fixed.inside.value <= min(fixed.confident.value, fixed.accurate.value)
        assert archive_report.violations == 0


@pytest.fixture
def run_here(tiny_run: Run, in_empty_folder: Path) -> Path:
    return Path(shutil.copytree(tiny_run.path, in_empty_folder / "runs" / "tiny"))


class TestCommand:
    def test_a_run_without_weights_or_data(self, command: Command) -> None:
        code, out, err = command(*STUDY, str(ARCHIVE), "--gamma", "0.8", "-o", "theory.svg")
        assert code == 0, err
        for words in ("Lemma 1", "0 / ", "same of 20 bins", "-> 0", "0.8 (0.75)", "T-Con > 1/2",
                      "A_tau", "0.0474", "about 50%"):  # fmt: skip
            assert words in out, words
        assert "…" not in out, "a figure was cut"
        sentence = " ".join(out.split())
        assert "no record of the attack on xi" in sentence
        assert "demur train @" in sentence
        assert Path("theory.svg").read_text().startswith("<?xml")

    def test_json_has_everything(self, command: Command) -> None:
        code, out, _ = command(*STUDY, str(ARCHIVE), "--json", "--rho", "0.4")
        found = json.loads(out)
        assert code == 0
        assert found["violations"] == 0
        assert found["difficulty"][0] | {"n1": 0} == {
            "xi": 0.1, "rho": 0.4, "n1": 0, "n2": 20.0, "n_sub": 19,
        }  # fmt: skip
        with_logits = [r for r in Run(ARCHIVE).records() if not r.scores_only]
        assert [one["n"] for one in found["records"]] == [len(r.y) for r in with_logits]
        assert set(found["records"][0]["at_tau"][0]["inside"]["interval"]) == {"lo", "hi"}

    def test_the_whole_ball(self, command: Command, run_here: Path) -> None:
        expect_error(
            command(*STUDY, "tiny"), "no record yet", "demur attack runs/tiny clean pgd-10"
        )
        few = ("--n", "60", "--device", "cpu")
        assert command("attack", "tiny", "clean", "pgd-10", *few)[0] == 0
        code, out, _ = command(*STUDY, "tiny")
        assert code == 0
        assert "demur attack runs/tiny xi" in " ".join(out.split())
        other = "pgd-10:eps=0.5"
        assert command("attack", "tiny", "xi:steps=10", other, *few)[0] == 0
        code, out, _ = command(*STUDY, "tiny")
        assert code == 0
        assert "throughout Linf(0.15), n=60" in out
        found = json.loads(command(*STUDY, "tiny", "--json")[1])
        (ball,) = found["worst_case_xi"]
        assert ball["records"] == ["clean", "pgd-10", "xi:steps=10"], "eps=0.5 leaves the ball"
        for low in ball["stays_low"]:
            assert low["attacked"]["value"] <= low["clean"]["value"]
        assert ball["stays_low"][0]["attacked"]["value"] < ball["stays_low"][0]["clean"]["value"]

    def test_bad_requests_get_one_sentence(self, command: Command, in_empty_folder: Path) -> None:
        expect_error(command(*STUDY, "nothing"), "there is no run")
        expect_error(command(*STUDY, str(ARCHIVE), "--gamma", "0.5"), "gamma is 0.5", "above 0.5")
        expect_error(command(*STUDY, str(ARCHIVE), "--rho", "0"), "rho is 0")
        expect_error(command(*STUDY, str(ARCHIVE), "-o", "a.png"), "SVG file; name it a.svg")
        Path("plain").mkdir()
        Path("plain/recipe.txt").write_text(lines(recipe("digits-pgdat")))
        expect_error(command(*STUDY, "plain"), "R-Con is con * A", "train with head=RR()")

    def test_a_violation_ends_with_code_1(
        self, command: Command, run_here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert command("attack", "tiny", "clean", "--n", "60", "--device", "cpu")[0] == 0
        assert command(*STUDY, "tiny")[0] == 0
        claim = theory.Claim(np.array([True]), np.array([False]))
        monkeypatch.setattr(theory, "lemma1", lambda inputs: claim)
        code, _, err = command(*STUDY, "tiny")
        assert code == 1
        assert "a bug" in err


def test_the_theory_needs_no_torch() -> None:
    assert "torch" not in Path(theory.__file__).read_text()
