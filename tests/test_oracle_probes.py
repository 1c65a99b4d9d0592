"""Oracle probes find the information that outputs have, and nothing if they have none."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from sklearn import ensemble
from torch import Tensor

from demur import metrics
from demur.errors import BadInput
from demur.evaluate import LoadedRun, Row, ScoredRecord, archive, run_attack
from demur.evaluate.record_scores import values
from demur.evaluate.recording import RecordOptions
from demur.metrics import FloatArray
from demur.paper.studies import FEATURES, LINEAR, TREES, probe_scores, probe_sentence, why_unprobed
from demur.recipes import attack
from demur.rejectors import Con
from demur.runs import Record
from tests.conftest import Command

COUNT, CLASSES = 2000, 4
GradientBoosting = ensemble.HistGradientBoostingClassifier
FEWER = 700  # images, where no AUROC of a probe must be near 1/2


def record(right: Tensor, logits: Tensor, aux: Tensor, feature: Tensor | None = None) -> Record:
    """A record in which the predictions marked `right` are correct."""
    predicted = logits.argmax(-1)
    y = torch.where(right, predicted, (predicted + 1) % CLASSES)
    arrays = {"logits": logits, "aux": aux, "y": y}
    return Record(arrays | ({} if feature is None else {"feature": feature}), {"label": "made up"})


def random_outputs(
    seed: int = 0, count: int = COUNT
) -> tuple[Tensor, Tensor, Tensor, torch.Generator]:
    g = torch.Generator().manual_seed(seed)
    widths = (CLASSES, 1, 200)
    logits, aux, feature = (2 * torch.randn(count, width, generator=g) for width in widths)
    return logits, aux, feature, g


def area(score: FloatArray, made: Record) -> float:
    return float(metrics.auroc(score, made.correct))


def few_trees(**options: Any) -> Any:
    return GradientBoosting(**options | {"max_iter": 10})


def test_no_image_is_scored_by_a_model_fitted_to_it() -> None:
    """If correctness is random, a probe with N / 10 inputs has an AUROC of 1/2."""
    logits, aux, feature, g = random_outputs()
    made = record(torch.rand(COUNT, generator=g) < 0.5, logits, aux, feature)
    scores = probe_scores(made)
    assert set(scores) == {LINEAR, TREES, FEATURES}
    for name, score in scores.items():
        assert abs(area(score, made) - 0.5) < 0.05, name


def test_information_in_the_head_is_found() -> None:
    logits, aux, _, _ = random_outputs(count=FEWER)
    made = record(aux[:, 0] > 0, logits, aux)
    scores = probe_scores(made)
    assert set(scores) == {LINEAR, TREES}, "there are no features"
    assert abs(area(values(Con(), made), made) - 0.5) < 0.05
    for name, score in scores.items():
        assert area(score, made) > 0.99, name


def test_information_in_the_predicted_class_is_found() -> None:
    """The accuracy depends on the predicted class, not on the confidence."""
    logits, aux, _, g = random_outputs(count=FEWER)
    often = torch.tensor([0.9, 0.1, 0.5, 0.5])[logits.argmax(-1)]
    made = record(torch.rand(FEWER, generator=g) < often, logits, aux)
    for name, score in probe_scores(made).items():
        assert area(score, made) > area(values(Con(), made), made) + 0.1, name


def test_no_probe_is_better_if_confidence_is_sufficient() -> None:
    logits, aux, _, g = random_outputs(count=FEWER)
    sure = logits.softmax(-1).amax(-1)
    made = record(torch.rand(FEWER, generator=g) < sure, logits, aux)
    base = values(Con(), made)
    for name, score in probe_scores(made).items():
        assert metrics.auroc_difference(score, base, made.correct).lo <= 0, name


def test_information_in_features_alone_is_found_in_them() -> None:
    logits, aux, feature, _ = random_outputs()
    made = record(feature[:, 3] + feature[:, 5] > 0, logits, aux, feature)
    scores = probe_scores(made)
    assert area(scores[FEATURES], made) > 0.95
    assert abs(area(scores[LINEAR], made) - 0.5) < 0.05


def test_too_few_correct_or_wrong_predictions_are_not_probed() -> None:
    logits, aux, _, _ = random_outputs()
    for right in (99, COUNT - 99):
        made = record(torch.arange(COUNT) < right, logits, aux)
        assert why_unprobed(made).startswith(
            f"{right} of 2000 predictions are correct, and a probe needs"
        )
        with pytest.raises(BadInput, match="the record of made up cannot be probed"):
            probe_scores(made)
    assert why_unprobed(record(torch.arange(COUNT) < 100, logits, aux)) == ""


def test_the_command_shows_probes_and_what_they_found(
    own_source: LoadedRun, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = str(own_source.run.path)
    for text in ("clean", "pgd-20"):
        run_attack(own_source, text, attack(text, own_source.run.recipe), RecordOptions("test"))
    made = next(each for each in own_source.run.records() if each.label == "pgd-20")
    right = int(made.correct.sum())
    monkeypatch.setattr("demur.paper.studies.MIN_PER_OUTCOME", min(right, 300 - right))
    monkeypatch.setattr(ensemble, "HistGradientBoostingClassifier", few_trees)
    code, out, err = command("paper", "study", "probes", name)
    assert code == 0
    assert "clean (n=300) without probes" in " ".join(err.split())
    for words in ("KD", LINEAR, TREES, FEATURES, "T-Con (oracle)", "pgd-20 (n=300): "):
        assert words in out
    rows = json.loads(command("paper", "study", "probes", name, "--json")[1])["rows"]
    areas = {row["rejector"]: row["ranking"] for row in rows if row["attack"] == "pgd-20"}
    assert areas[LINEAR]["auroc"] == pytest.approx(area(probe_scores(made)[LINEAR], made))
    gap = areas[LINEAR]["auroc"] - areas["Con"]["auroc"]
    assert areas[LINEAR]["auroc_vs_con"]["value"] == pytest.approx(gap)


def test_scores_only_records_are_skipped(
    own_source: LoadedRun, command: Command, tmp_path: Path
) -> None:
    run_attack(own_source, "clean", attack("clean", own_source.run.recipe), RecordOptions("test"))
    archive(own_source, tmp_path / "bare", only=["R-Con"])
    code, out, err = command("paper", "study", "probes", str(tmp_path / "bare"))
    assert code == 0
    assert LINEAR not in out
    assert "clean (n=300) without probes: the record has only scores" in " ".join(err.split())


@pytest.mark.parametrize(
    ("ends", "rejector", "words"),
    [
        (
            (0.01, 0.03),
            LINEAR,
            "the outputs hold more information than confidence: AUROC +0.020 [+0.010",
        ),
        (
            (0.01, 0.03),
            FEATURES,
            "the features hold more information than confidence: AUROC +0.020 ",
        ),
        ((-0.01, 0.03), TREES, "no probe finds more information than confidence: AUROC +0.020 ["),
        ((-0.02, -0.01), TREES, "no probe reaches confidence, so this is inconclusive; use more"),
    ],
)
def test_the_sentence_is_of_the_best_probe(
    ends: tuple[float, float], rejector: str, words: str
) -> None:
    def row(name: str, auroc: float) -> Row:
        gap = metrics.Difference(0.02, *ends, 0.5)
        ranking = SimpleNamespace(auroc=auroc, auroc_vs_con=gap)
        return cast(Row, SimpleNamespace(rejector=name, ranking=ranking))

    rows = [row(LINEAR if rejector != LINEAR else TREES, 0.6), row(rejector, 0.7), row("Con", 0.9)]
    about = SimpleNamespace(attack="pgd", n=40)
    line = probe_sentence(cast(ScoredRecord, SimpleNamespace(summary=about, rows=rows)))
    assert line.startswith(f"pgd (n=40): {words}")


def test_folds_are_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ensemble, "HistGradientBoostingClassifier", few_trees)
    logits, aux, _, g = random_outputs(3)
    made = record(torch.rand(500, generator=g) < 0.5, logits[:500], aux[:500])
    first, again = probe_scores(made), probe_scores(made)
    assert all(np.array_equal(first[name], again[name]) for name in first)
