"""Worst-score records in tables, pages, audits, certificates and guards."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import Tensor, nn

from demur import BadInput, Con, Coupled, Digits, Energy, Guard, Linf, RCon, WorstScore, audit
from demur.attacks import AcceptedError, Clean
from demur.audits.audit_report import _Audit
from demur.calibrate import TPR, Coverage, Risk, Uncertified, certify_threshold
from demur.evaluate import LoadedRun, RecordOptions, RejectorEvaluation, run_attack, values
from demur.evaluate.accepted_errors import worst_cases
from demur.evaluate.certificates import attack_under, issue, issued_certificates, retests
from demur.metrics import BoolArray, FloatArray, WorstCase
from demur.metrics.rejection import NEVER_ACCEPTED
from demur.report import plot
from demur.report.page import page_text
from demur.report.scored_runs import ScoredRun
from demur.runs import Run
from demur.spec import show
from demur.verification import verify
from tests.conftest import Command

N = 24
ATTACK = "worst-score:steps=3,targets=1"


@pytest.fixture(scope="module")
def loaded(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> LoadedRun:
    """A run with a clean record, and worst-score records of R-Con and Con on fewer images."""
    copy = shutil.copytree(tiny_run.path, tmp_path_factory.mktemp("worst") / "run")
    loaded = LoadedRun(Run(Path(copy)), torch.device("cpu"))
    run_attack(loaded, "clean", Clean(), RecordOptions(n=40))
    for rejector in (RCon(), Con()):
        attack = WorstScore(Linf(0.15), rejector, steps=3, targets=1)
        label = f"{ATTACK},rejector={show(rejector)}"
        run_attack(loaded, label, attack, RecordOptions(n=N, keep_images=0))
    return loaded


# ------------------------------------------------ numbers


def test_the_interval_of_the_aurc_covers() -> None:
    """Of 200 samples the 95% interval misses the true AURC at most 20 times."""
    generator = np.random.default_rng(2)

    def case(n: int) -> WorstCase:
        clean = generator.normal(size=n)
        return WorstCase.of(clean, clean + generator.normal(size=n) - 1)

    true, misses = case(200_000).aurc, 0
    for _ in range(200):
        low, high = case(200).aurc_interval()
        misses += not low <= true <= high
    assert misses <= 20


def test_no_threshold_accepts_an_image_that_a_gate_rejects() -> None:
    case = WorstCase.of([-np.inf, 0.4, 0.8], [-np.inf, 0.6, -np.inf])
    assert case.accepted_errors(-np.inf) == pytest.approx(1 / 3)
    assert case.curve.coverage.tolist() == pytest.approx([1 / 3, 2 / 3])
    assert case.augrc == pytest.approx((1 + 1 + 0) / 9)
    assert case.clean.min() == NEVER_ACCEPTED


# ------------------------------------------------ tables and pages


def test_score_shows_accepted_errors_and_no_ranking_of_the_mixture(
    loaded: LoadedRun, command: Command
) -> None:
    found = json.loads(command("score", str(loaded.run.path), "--json")[1])
    assert not any("worst-score" in row["attack"] for row in found["rows"])
    assert not any("worst-score" in row["attack"] for row in found["attacks"])
    assert [row["rejector"] for row in found["worst_case"]] == ["R-Con", "Con"]
    first, second = found["worst_case"]
    cal, evaluation = loaded.clean("cal"), RejectorEvaluation.of(loaded)
    record = next(r for r in loaded.run.records("test") if "RCon" in r.metadata["spec"])
    score = values(evaluation.scores["R-Con"], record)
    for point, level in zip(first["points"], (0.95, 0.9, 0.8, 0.6), strict=True):
        at = TPR(level).threshold(values(evaluation.scores["R-Con"], cal), cal.correct)
        assert point["threshold"] == at
        assert point["share"] == pytest.approx((~record.correct & (score >= at)).mean())
        assert point["lo"] <= point["share"] <= point["hi"]
    assert first["threshold_from"] == f"held-out cal images, clean, n={len(cal.y)}"
    gap = first["augrc_vs_con"]["value"]
    assert gap == pytest.approx(first["augrc"] - second["augrc"])
    assert second["augrc_vs_con"] is None
    text = command("score", str(loaded.run.path))[1]
    assert "Accepted errors under worst-score" in text
    assert "a stronger attack may find more" in text.lower()


def test_a_table_of_worst_cases_is_verified(
    loaded: LoadedRun, command: Command, tmp_path: Path
) -> None:
    table = json.loads(command("score", str(loaded.run.path), "--json")[1])
    folder = tmp_path / "both"
    shutil.copytree(loaded.run.path, folder / "run")
    (folder / "scores.json").write_text(json.dumps(table))
    assert not verify(folder).findings
    table["worst_case"][0]["augrc"] += 0.01
    (folder / "scores.json").write_text(json.dumps(table))
    assert verify(folder).findings


def test_a_worst_score_record_needs_the_clean_one(
    tiny_run: Run, tmp_path: Path, command: Command
) -> None:
    shutil.copytree(tiny_run.path, tmp_path / "run")
    own = LoadedRun(Run(tmp_path / "run"), torch.device("cpu"))
    attack = WorstScore(Linf(0.15), RCon(), steps=1, targets=1)
    run_attack(own, "worst-score", attack, RecordOptions(n=5))
    code, _, message = command("score", str(own.run.path))
    assert code == 2
    assert f"demur attack {own.run.path} clean" in message


def test_the_page_has_the_curve_and_the_explorer_its_scores(loaded: LoadedRun) -> None:
    evaluation, records = RejectorEvaluation.of(loaded), loaded.run.records("test")
    worst = worst_cases(evaluation, loaded, records)
    clean = next(record for record in records if record.label == "clean")
    text = page_text([ScoredRun(loaded, evaluation, [evaluation.score_record(clean)], worst)])
    assert "Accepted errors at every threshold" in text
    assert "R-Con, worst-score" in text
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    (run,) = data["runs"]
    assert [entry["rejector"] for entry in run["worst"]] == ["R-Con", "Con"]
    assert not any("worst" in record["attack"] for record in run["records"])


def test_the_plot_draws_the_curve_inside_its_band() -> None:
    pytest.importorskip("matplotlib").use("agg")
    clean = np.linspace(0, 1, 50)
    axes = plot.worst_case({"R-Con": WorstCase.of(clean, clean[::-1])})
    ((line,), (band,)) = axes.lines, axes.collections
    ends = np.asarray(band.get_paths()[0].vertices, dtype=float)
    for x, y in np.asarray(line.get_xydata(), dtype=float):
        at = ends[np.isclose(ends[:, 0], x)][:, 1]
        assert at.min() - 1e-9 <= y <= at.max() + 1e-9
    with pytest.raises(BadInput, match="there is nothing to draw"):
        plot.worst_case({})


# ------------------------------------------------ the attack


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :3] + torch.rand(len(x), 3)


def test_a_randomised_model_is_refused() -> None:
    with pytest.raises(BadInput, match="version=rand"):
        WorstScore(Linf(0.1), Con(), steps=2)(Noisy(), torch.rand(3, 1, 4, 4), torch.arange(3))


def test_restarts_leave_out_images_that_reach_the_threshold() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3))
    asked = list[int]()
    net.register_forward_hook(lambda *call: asked.append(len(call[1][0])))
    x, y = torch.rand(8, 1, 4, 4), torch.arange(8) % 3
    once = WorstScore(Linf(0.2), Energy(), steps=3)
    first, queries = once(net, x, y), len(asked)
    same = WorstScore(Linf(0.2), Energy(), steps=3, restarts=3, threshold=-1e9)
    asked.clear()
    second = same(net, x, y)
    wrong = net(first).argmax(-1) != y
    assert torch.equal(first[wrong], second[wrong])
    assert wrong.all() == (len(asked) - 1 == queries)
    more = WorstScore(Linf(0.2), Energy(), steps=3, restarts=3)(net, x, y)
    score = torch.logsumexp(net(more), -1) - torch.logsumexp(net(first), -1)
    assert (score[wrong] >= -1e-5).all()


# ------------------------------------------------ audits


@pytest.fixture(scope="module")
def digits_net() -> tuple[nn.Module, Tensor, Tensor]:
    x, y = Digits().load()["test"].batch(slice(0, 20))
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval(), x, y


def test_the_part_of_an_audit_counts_every_threshold(
    digits_net: tuple[nn.Module, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = partial(WorstScore, steps=5, targets=2)
    monkeypatch.setattr("demur.audits.audit_report.WorstScore", few)
    task = _Audit("Linf", 0.1, "fast", 7, 0, None, None, False, "net", None, "", "")
    net, x, y = digits_net
    task.begin(net, Con(), x, y)
    row = task.worst_case(x, y, AcceptedError(Con(), 0.2))
    x_adv = few(Linf(0.1), Con())(net, x, y)
    wrong = net(x_adv).argmax(-1) != y
    reached = net(x_adv).softmax(-1).amax(-1)
    assert [point.tpr for point in row.points] == [0.95, 0.9, 0.8, 0.6]
    for point in row.points:
        assert point.share == pytest.approx((wrong & (reached >= point.threshold)).double().mean())
    assert "AUGRC" in row.sentence and row.n == 20


@pytest.mark.parametrize("given", [{}, {"rejector": Con(), "version": "rand"}], ids=str)
def test_an_audit_refuses_worst_score_before_any_attack(
    digits_net: tuple[nn.Module, Tensor, Tensor], given: dict[str, Any]
) -> None:
    with pytest.raises(BadInput, match="worst-score needs a rejector"):
        audit(*digits_net, eps=0.1, worst_score=True, **given)


@pytest.mark.exhaustive
def test_an_audit_prints_the_curve(digits_net: tuple[nn.Module, Tensor, Tensor]) -> None:
    report = audit(*digits_net, rejector=Con(), eps=0.1, version="fast", worst_score=True)
    assert "worst-score, TPR-80" in str(report)
    assert report.to_json()["worst_case"]["n"] == report.autoattack.attacked.n


# ------------------------------------------------ guarantees under attack


def attacked_images(
    n: int, generator: np.random.Generator
) -> tuple[FloatArray, BoolArray, FloatArray]:
    """Clean scores with ties, correctness, and worst scores, whose risk falls with the score."""
    score = np.round(generator.random(n), 2)
    correct = generator.random(n) < 0.8 + 0.2 * score
    worst = np.where(generator.random(n) < 0.5, np.round(generator.random(n) ** 4, 2), -np.inf)
    return score, correct, np.where(correct, worst, np.maximum(worst, score))


def risk_at(t: float, score: FloatArray, worst: FloatArray) -> float:
    accepted = (score >= t) | (worst >= t)
    return float((worst >= t).sum() / max(1, accepted.sum()))


def broken_guarantees(splits: int, n: int = 300, level: float = 0.25) -> tuple[int, int]:
    """How often the risk on other images exceeds the certified level, and how often one is."""
    generator = np.random.default_rng(4)
    score, _, worst = attacked_images(400_000, generator)
    broken = certified = 0
    for _ in range(splits):
        images = attacked_images(n, generator)
        try:
            made = certify_threshold(*images[:2], Risk(level), worst=images[2], under="a test")
        except Uncertified:
            continue
        certified += 1
        broken += risk_at(made.thresholds[0], score, worst) > level
    return broken, certified


@pytest.mark.parametrize(
    "splits", [60, pytest.param(400, marks=pytest.mark.exhaustive)], ids=["quick", "full"]
)
def test_a_risk_under_attack_is_broken_in_at_most_one_of_twenty_splits(splits: int) -> None:
    broken, certified = broken_guarantees(splits)
    assert certified > splits / 3
    assert broken <= binom.ppf(0.999, splits, 0.05)


def test_the_counts_of_a_certificate_are_those_of_its_definition() -> None:
    score, correct, worst = attacked_images(600, np.random.default_rng(5))
    made = certify_threshold(score, correct, Risk(0.3), worst=worst, under="a test")
    (at,) = made.thresholds
    everyone = certify_threshold(score, correct, Risk(0.3), 0.5, worst=worst).n
    assert made.n == everyone < 600
    rate = made.accepted_wrong / made.accepted
    assert rate == pytest.approx(risk_at(at, score, worst), abs=0.05)
    assert "under a test with 95% confidence" in made.sentence
    assert made.sentence.endswith("; a stronger attack may break this")
    clean = certify_threshold(score, correct, Risk(0.4))
    assert clean.under == "" and "stronger" not in clean.sentence


@pytest.mark.parametrize("guarantee", [TPR(0.9), Coverage(0.5)], ids=repr)
def test_only_a_risk_is_certified_under_attack(guarantee: TPR | Coverage) -> None:
    score, correct, worst = attacked_images(50, np.random.default_rng(0))
    with pytest.raises(BadInput, match="only the risk of one score"):
        certify_threshold(score, correct, guarantee, worst=worst)
    with pytest.raises(BadInput, match="only the risk of one score"):
        certify_threshold(np.stack([score, score], 1), correct, Risk(0.1), worst=worst)


def test_a_certificate_under_worst_score_is_stored_retested_and_verified(
    loaded: LoadedRun, command: Command, tmp_path: Path
) -> None:
    _, text, _ = command(
        "calibrate", str(loaded.run.path), "--risk", "0.9", "--under", ATTACK,
        "--confidence", "0.6", "--json",
    )  # fmt: skip
    stored = json.loads(text)
    assert stored["under"] == "WorstScore(Linf(0.15), RCon(), steps=3, targets=1)"
    assert "a stronger attack may break this" in stored["sentence"]
    made = next(one for one in issued_certificates(loaded.run) if one.metadata["under"])
    evaluation = RejectorEvaluation.of(loaded)
    found = {
        one.metadata["sentence"]: lines
        for one, lines in retests(loaded, evaluation.scores, loaded.run.records("test"))
    }
    lines = found[made.metadata["sentence"]]
    assert [(line.attack, line.covered) for line in lines] == [
        ("clean", False), (f"{ATTACK},rejector=RCon()", True),
    ]  # fmt: skip
    assert lines[1].trials >= lines[1].hits
    assert not verify(loaded.run.path).findings
    copy = Path(shutil.copytree(loaded.run.path, tmp_path / "changed"))
    (path,) = (copy / "certificates").glob("*.json")
    values_ = json.loads(path.read_text())
    values_["accepted_wrong"] -= 1
    path.write_text(json.dumps(values_))
    assert verify(copy).findings


def test_worst_score_attacks_the_certified_rejector(loaded: LoadedRun) -> None:
    label, attack = attack_under(loaded, "worst-score", "Con")
    assert label == "worst-score:rejector=Con"
    assert isinstance(attack, WorstScore) and attack.rejector == Con()
    other = attack_under(loaded, f"{ATTACK},rejector=RCon()", "Con")
    with pytest.raises(BadInput, match="no worst-score attack on Con"):
        issue(loaded, "Con", Risk(0.9), 0.6, *other)
    coupled = attack_under(loaded, ATTACK, "Con+R-Con")
    assert isinstance(coupled[1], WorstScore) and isinstance(coupled[1].rejector, Coupled)
    with pytest.raises(BadInput, match="only the risk of one score"):
        issue(loaded, "Con+R-Con", Risk(0.9), 0.6, *coupled)


def test_a_guard_and_its_card_say_under_which_attack(loaded: LoadedRun, tmp_path: Path) -> None:
    guard = Guard.from_run(loaded, risk=0.9, confidence=0.6, under=ATTACK, accept_chance=True)
    assert guard.certificate is not None and guard.certificate["under"].startswith("WorstScore(")
    guard.save(tmp_path / "guard")
    card = (tmp_path / "guard" / "README.md").read_text()
    assert "A stronger attack, or another radius, may break it." in card
    assert "nothing about attacked images" not in card
    assert not verify(tmp_path / "guard").findings
    again = Guard.load(tmp_path / "guard")
    assert again.calibration["sentence"] == guard.calibration["sentence"]
    with pytest.raises(BadInput, match="no worst-score attack"):
        Guard.from_run(loaded, risk=0.9, under="pgd-20:steps=1", accept_chance=True)
