"""Chosen thresholds, records that resume, and rows that agree with the definitions."""

import doctest
import inspect
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import demur
import demur.evaluate.recording as evaluation
from demur import metrics
from demur.attacks import CE, PGD, AcceptedError, Clean, PlusLogScore, Sum
from demur.attacks.balls import Linf
from demur.calibrate import TPR
from demur.errors import BadInput
from demur.evaluate import (
    LoadedRun,
    RecordOptions,
    RejectorEvaluation,
    resolve_thresholds,
    run_attack,
)
from demur.files.checked_files import write_json
from demur.methods import NoHead
from demur.nets import RejectingNet
from demur.output import Output, prediction
from demur.recipes import recipe
from demur.rejectors import Con, Coupled, RCon
from demur.rejectors.certainty import con, rcon, tcon
from demur.rejectors.rule import Rejector, Score
from demur.runs import Record, Run
from demur.training import train

ATTACK = PGD(Linf(0.1), steps=3)


@pytest.fixture
def loaded(tiny_run: Run, tmp_path: Path) -> LoadedRun:
    """A private copy of the shared run."""
    copy = shutil.copytree(tiny_run.path, tmp_path / "run")
    return LoadedRun(Run(Path(copy)), torch.device("cpu"))


# ------------------------------------------------------------------ public names


def test_a_device_may_be_given_by_name(tiny_run: Run) -> None:
    assert LoadedRun(tiny_run, "cpu").device == torch.device("cpu")
    with pytest.raises(BadInput, match="there is no device 'gpu'"):
        LoadedRun(tiny_run, "gpu")
    with pytest.raises(BadInput, match=r"^device must be a torch\.device or a name .*, not int$"):
        LoadedRun(tiny_run, 0)  # type: ignore[arg-type]


PUBLIC = [Run, Record, LoadedRun, RecordOptions, RejectorEvaluation, run_attack, resolve_thresholds]


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: str(public.__name__))
def test_examples_of_docstrings_run(
    public: object, scored_source: LoadedRun, in_empty_folder: Path
) -> None:
    shutil.copytree(scored_source.run.path, in_empty_folder / "runs" / "digits-pgdat-rr")
    doc = inspect.getdoc(public) or ""
    names = {name: getattr(demur, name) for name in demur.__all__} | {"torch": torch}
    test = doctest.DocTestParser().get_doctest(doc, names, str(public), None, None)
    assert "Example:" in doc
    assert test.examples
    said = list[str]()
    assert doctest.DocTestRunner().run(test, out=said.append).failed == 0, "".join(said)


# ------------------------------------------------------------------ thresholds


def test_thresholds_are_chosen_on_clean_cal_images(loaded: LoadedRun) -> None:
    attack = PGD(
        Linf(0.1), objective=PlusLogScore(RCon()), criterion=AcceptedError(RCon(), TPR(0.9))
    )
    bound = resolve_thresholds(attack, loaded.clean)
    cal = loaded.clean("cal")
    expected = metrics.threshold_at_tpr(rcon(cal.output).double().numpy(), cal.correct, 0.9)
    assert isinstance(bound.spec.criterion, AcceptedError)
    assert bound.spec.criterion.threshold == expected
    assert bound.thresholds == {"AcceptedError(RCon(), TPR(0.9))": expected}
    assert attack.criterion == AcceptedError(RCon(), TPR(0.9)), "the spec itself is frozen"


def test_a_fixed_threshold_needs_no_data() -> None:
    def no_data(split: str) -> object:
        raise AssertionError("data was read")

    attack = PGD(
        Linf(0.1), objective=CE() + PlusLogScore(Coupled()), criterion=AcceptedError(Coupled(), 0.5)
    )
    assert resolve_thresholds(attack, no_data).spec == attack  # type: ignore[arg-type]


class Centroid(Score):
    def __init__(self, centre: Tensor) -> None:
        self.centre = centre

    def __call__(self, out: Output) -> Tensor:
        away: Tensor = (out.feature - self.centre).norm(dim=1)
        return -away


class NearCentre(Rejector):
    """A rejector that must be fitted, to test binding with."""

    def fit(self, out: Output, y: Tensor) -> Score:
        return Centroid(out.feature.mean(0))


def test_rejectors_are_fitted_anywhere_in_a_spec(loaded: LoadedRun) -> None:
    objective = Sum(
        (CE(), PlusLogScore(NearCentre()), PlusLogScore(Coupled(gate=Con(), score=NearCentre())))
    )
    bound = resolve_thresholds(PGD(Linf(0.1), steps=2, objective=objective), loaded.clean).spec
    fit = loaded.clean("fit")
    assert isinstance(bound.objective, Sum)
    single, coupled = bound.objective.objectives[1:]
    assert isinstance(single, PlusLogScore)
    assert isinstance(coupled, PlusLogScore)
    assert isinstance(single.rejector, Centroid)
    assert torch.allclose(single.rejector.centre, fit.output.feature.mean(0))
    assert isinstance(coupled.rejector, Coupled)
    assert isinstance(coupled.rejector.score, Centroid)
    x, y = loaded.splits["test"].batch(slice(0, 4))
    assert bound(loaded.net, x, y).shape == x.shape
    with pytest.raises(BadInput, match="not fitted"):
        PGD(Linf(0.1), objective=objective)(loaded.net, x, y)


def test_an_attack_on_a_fitted_rejector_has_a_stable_digest(loaded: LoadedRun) -> None:
    attack = PGD(
        Linf(0.1), steps=1, keep="success", criterion=AcceptedError(NearCentre(), TPR(0.9))
    )
    first, second = (resolve_thresholds(attack, loaded.clean) for _ in range(2))
    assert first.thresholds == second.thresholds
    own = 'Custom("tests.test_evaluate:NearCentre")'
    assert list(first.thresholds) == [f"AcceptedError({own}, TPR(0.9))"]
    assert first.fitted == {own: loaded.clean("fit").digest}
    records = [run_attack(loaded, label, attack, RecordOptions(n=8)) for label in ("a", "b")]
    assert records[0].digest == records[1].digest
    assert records[1].label == "a", "the same attack under another label is not run again"


# ------------------------------------------------------------------ records


def test_a_record_holds_the_outputs_of_exactly_its_adversarial_examples(loaded: LoadedRun) -> None:
    record = run_attack(
        loaded, "pgd-3", ATTACK, RecordOptions(n=50, keep_images=50, keep_features=True)
    )
    x, y = loaded.splits["test"].batch(slice(0, 50))
    x_adv = record.arrays["x_adv"]
    out = loaded.net(x_adv)
    assert torch.equal(record.y, y)
    assert torch.allclose(record.output.logits, out.logits, atol=1e-5)
    assert torch.allclose(record.output.feature, out.feature, atol=1e-5)
    assert record.arrays["size_linf"].max() <= 0.1 * (1 + 1e-6)
    assert torch.allclose(record.arrays["size_linf"], (x_adv - x).abs().flatten(1).amax(1))
    assert record.correct.tolist() == (prediction(record.output) == y).tolist()


def test_a_record_has_metadata(loaded: LoadedRun) -> None:
    criterion = AcceptedError(RCon(), TPR(0.95))
    attack = PGD(Linf(0.1), steps=2, keep="success", criterion=criterion, seed=3)
    record = run_attack(loaded, "adaptive", attack, RecordOptions(n=20))
    metadata = record.metadata
    assert metadata["spec"].startswith("PGD(ball=Linf(eps=0.1), steps=2, step_size=None")
    assert metadata["weights"] == loaded.run.checkpoint["weights"]
    assert metadata["seed"] == 3
    assert metadata["n"] == 20
    assert list(metadata["thresholds"]) == ["AcceptedError(RCon(), TPR(0.95))"]
    for key in ("data", "code", "torch", "numpy", "device", "recipe", "epoch", "digest"):
        assert metadata[key], key


def test_batch_size_does_not_change_a_record(loaded: LoadedRun) -> None:
    whole = run_attack(loaded, "a", ATTACK, RecordOptions(n=60, batch_size=60))
    shutil.rmtree(loaded.run.records_folder)
    parts = run_attack(loaded, "a", ATTACK, RecordOptions(n=60, batch_size=7))
    assert whole.digest == parts.digest
    assert torch.allclose(whole.arrays["x_adv"], parts.arrays["x_adv"], atol=1e-6)


def test_a_killed_attack_resumes_where_it_stopped(
    loaded: LoadedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = RecordOptions(n=60, batch_size=20)
    whole = run_attack(loaded, "a", ATTACK, options)
    shutil.rmtree(loaded.run.records_folder)
    calls: list[int] = []
    real = PGD.perturb

    def counted(self: PGD, *args: object, **kwargs: object) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(PGD, "perturb", counted)
    with pytest.raises(KeyboardInterrupt):
        run_attack(loaded, "a", ATTACK, options)
    assert loaded.run.records() == []
    resumed = run_attack(loaded, "a", ATTACK, options)
    assert len(calls) == 4  # two done, one killed, one left
    assert torch.equal(whole.output.logits, resumed.output.logits)
    assert not list(loaded.run.records_folder.glob(".making*"))


def test_a_damaged_batch_is_made_again(loaded: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.test_runs import spoil

    options = RecordOptions(n=40, batch_size=20)
    whole = run_attack(loaded, "a", ATTACK, options)
    shutil.rmtree(loaded.run.records_folder)

    def stop(*args: object) -> dict[str, Tensor]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(evaluation._Recording, "_arrays", stop)
        with pytest.raises(KeyboardInterrupt):
            run_attack(loaded, "a", ATTACK, options)
    (part,) = loaded.run.records_folder.glob(".making*/parts*/0-20-*")
    spoil(part)
    assert torch.equal(whole.output.logits, run_attack(loaded, "a", ATTACK, options).output.logits)


def test_an_existing_record_is_read_and_not_made_again(
    loaded: LoadedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_attack(loaded, "a", ATTACK, RecordOptions(n=20))
    monkeypatch.setattr(PGD, "perturb", None)
    again = run_attack(loaded, "a", ATTACK, RecordOptions(n=20))
    assert torch.equal(first.output.logits, again.output.logits)


def test_bad_options_raise_one_sentence(loaded: LoadedRun) -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"split": "tset"}, "did you mean test"),
        ({"n": 0}, "asked for 0"),
        ({"n": 4000}, "has 300"),
        ({"batch_size": 0}, "at least 1"),
    )
    for options, words in cases:
        with pytest.raises(BadInput, match=words):
            run_attack(loaded, "a", ATTACK, RecordOptions(**options))


# ------------------------------------------------------------------ scoring


def test_rows_agree_with_the_definitions(scored_source: LoadedRun) -> None:
    evaluation = RejectorEvaluation.of(scored_source)
    assert list(evaluation.scores) == list(scored_source.run.recipe.rejectors())
    for record in scored_source.run.records():
        scored = evaluation.score_record(record)
        rows = {(row.rejector, row.protocol): row for row in scored.rows}
        assert len(rows) == 2 * len(evaluation.scores) + 1
        correct = record.correct
        score = rcon(record.output).double().numpy()
        deploy, paper = rows["R-Con", "deploy"], rows["R-Con", "paper"]
        accepted = score >= evaluation.thresholds["R-Con"]
        assert deploy.point.coverage == accepted.mean()
        assert deploy.point.accuracy == correct[accepted].mean()
        assert deploy.point.accepted_wrong == (accepted & ~correct).mean()
        assert deploy.point.tpr == accepted[correct].mean()
        assert paper.point == metrics.paper_stats(score, correct)
        assert deploy.ranking.auroc == paper.ranking.auroc == metrics.auroc(score, correct)
        assert deploy.accuracy_interval.lo <= deploy.point.accuracy <= deploy.accuracy_interval.hi
        assert paper.threshold_from != deploy.threshold_from
        oracle = rows["T-Con (oracle)", "paper"]
        truth = tcon(record.output, record.y).double().numpy()
        assert oracle.ranking.auroc == metrics.auroc(truth, correct)
        assert oracle.ranking.auroc > paper.ranking.auroc
        assert ("T-Con (oracle)", "deploy") not in rows
        assert rows["Con", "paper"].ranking.auroc_vs_con.value == 0
        for name in evaluation.scores:
            stats = metrics.stats_of_verdicts(evaluation.accepted(name, record), correct)
            assert rows[name, "deploy"].point._replace(threshold=0) == stats._replace(threshold=0)
        for protocol in ("paper", "deploy"):
            own, base = rows["R-Con", protocol], rows["Con", protocol]
            gap = own.accuracy_vs_con
            assert gap.value == own.point.accuracy - base.point.accuracy
            assert gap.lo <= gap.value <= gap.hi
            assert base.accuracy_vs_con[:3] == (0, 0, 0)


def test_the_coupled_score_ranks_images_that_pass_the_gate_first(scored_source: LoadedRun) -> None:
    evaluation = RejectorEvaluation.of(scored_source)
    record = scored_source.run.records()[-1]
    row = next(r for r in evaluation.score_record(record).rows if r.rejector == "Con+R-Con")
    out = record.output
    ranked = np.where(con(out) >= 0.5, rcon(out).double(), -np.inf)
    assert np.isneginf(ranked).any()
    assert row.ranking.auroc == metrics.auroc(ranked, record.correct)


def test_rows_are_json(scored_source: LoadedRun) -> None:
    import json

    evaluation = RejectorEvaluation.of(scored_source)
    rows = evaluation.score_record(scored_source.run.records()[0]).rows
    assert len(rows) > 4
    for row in rows:
        plain = json.loads(json.dumps(row.to_json(), allow_nan=False))
        assert plain["point"]["n"] == 300
        assert set(plain["ranking"]["auroc_interval"]) == {"lo", "hi"}


def test_only_records_of_these_weights_are_scored(scored_source: LoadedRun, tmp_path: Path) -> None:
    copy = Run(Path(shutil.copytree(scored_source.run.path, tmp_path / "run")))
    import json

    metadata = json.loads((copy.path / "checkpoint.json").read_text())
    del metadata["metadata_digest"]
    write_json(copy.path / "checkpoint.json", metadata | {"weights": "0" * 64})
    assert copy.records() == []


def test_a_net_without_a_head_is_scored_without_rcon(tmp_path: Path) -> None:
    spec = recipe("digits-standard", ["epochs=1", "width=4", "validation_attack=Clean"])
    assert spec.method.head == NoHead()
    loaded = LoadedRun(train(spec, tmp_path / "run"), torch.device("cpu"))
    run_attack(loaded, "clean", Clean(), RecordOptions(n=60))
    evaluation = RejectorEvaluation.of(loaded)
    assert not {"R-Con", "Con+R-Con", "A"} & set(evaluation.scores)
    assert {"Con", "Energy", "KD", "GDA"} <= set(evaluation.scores)


def test_records_without_features_are_scored_by_rejectors_without_features(
    scored_source: LoadedRun, tmp_path: Path
) -> None:
    copy = shutil.copytree(scored_source.run.path, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "records")
    loaded = LoadedRun(Run(Path(copy)), torch.device("cpu"))
    record = run_attack(loaded, "clean", Clean(), RecordOptions(keep_features=False))
    evaluation = RejectorEvaluation.of(loaded)
    assert "KD" not in evaluation.scores, "no rejector is fitted that no record has features for"
    assert {row.rejector for row in evaluation.score_record(record).rows} >= {
        "Con",
        "R-Con",
        "Entropy",
    }
    run_attack(loaded, "pgd-3", PGD(Linf(0.15), steps=3), RecordOptions(n=20))
    evaluation = RejectorEvaluation.of(loaded)
    assert "KD" in evaluation.scores
    assert "KD" not in {row.rejector for row in evaluation.score_record(record).rows}


def test_the_net_is_in_eval_mode_without_gradients(tiny_net: RejectingNet) -> None:
    assert not tiny_net.training
    assert not any(p.requires_grad for p in tiny_net.parameters())
