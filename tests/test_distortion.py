"""Minimal distortion: the median score to reach, the mean distances, and the command."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from demur.attacks import CW, AcceptedError, Clean
from demur.calibrate import TPR, Median
from demur.errors import BadInput
from demur.evaluate import LoadedRun, RecordOptions, resolve_thresholds, run_attack
from demur.evaluate.binding import ThresholdResolver
from demur.output import prediction
from demur.paper.studies import (
    DistortionVerdicts,
    default_attacks,
    distances,
    distortion_attack,
    distortion_verdicts,
)
from demur.recipes import RECIPES, attack
from demur.rejectors import Con, RCon
from demur.rejectors.certainty import rcon
from demur.runs import Record, Run
from tests.conftest import Command
from tests.test_cli import expect_error

STUDY = ("paper", "study", "distortion")
RR_RUN, PLAIN_RUN = RECIPES["digits-pgdat-rr"], RECIPES["digits-pgdat"]
FAST = ":searches=2,steps=40,rate=0.05,constant=5"
COUNT = 24


def test_named_attacks_have_the_papers_settings() -> None:
    for name, norm in (
        ("cw", "L2"), ("cw-linf", "Linf"), ("cw-linf-adam", "Linf-adam"), ("cw-adaptive", "L2"),
        ("cw-adaptive-linf", "Linf"),
    ):  # fmt: skip
        found = distortion_attack(name, RR_RUN)
        settings = found.searches, found.steps, found.rate, found.constant
        assert (*settings, found.norm) == (9, 1000, 0.005, 0.01, norm)
    assert attack("cw-adaptive", RR_RUN) == CW(criterion=AcceptedError(RCon(), Median()))
    assert attack("cw-adaptive", PLAIN_RUN) == CW(criterion=AcceptedError(Con(), Median()))
    assert attack("cw-adaptive:rejector=Con()", RR_RUN) == attack("cw-adaptive", PLAIN_RUN)


def test_normal_beside_adaptive_in_both_norms() -> None:
    assert default_attacks(RR_RUN) == [
        "cw", "cw-adaptive:rejector=Con()", "cw-adaptive", "cw-linf",
        "cw-adaptive-linf:rejector=Con()", "cw-adaptive-linf",
    ]  # fmt: skip
    assert default_attacks(PLAIN_RUN) == ["cw", "cw-adaptive", "cw-linf", "cw-adaptive-linf"]
    with pytest.raises(BadInput, match="pgd-20 does not minimise the distortion; use cw"):
        distortion_attack("pgd-20", RR_RUN)


def test_the_median_is_of_correct_predictions_on_training_images(tiny_source: LoadedRun) -> None:
    fit, cal = (tiny_source.clean(split) for split in ("fit", "cal"))
    binding = ThresholdResolver(tiny_source.clean)
    for at, record in ((Median(), fit), (Median("cal"), cal), (TPR(0.5), cal)):
        right = rcon(record.output)[prediction(record.output) == record.y].double()
        t = binding.choose_threshold(RCon(), at)
        assert t in right.tolist()
        assert (right >= t).double().mean() == pytest.approx(0.5, abs=1 / len(right))
    assert binding.choose_threshold(RCon(), Median()) != binding.choose_threshold(
        RCon(), Median("cal")
    )


@pytest.fixture(scope="module")
def found(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, DistortionVerdicts]:
    """Normal and adaptive attacks on a private copy of the shared run."""
    copy = shutil.copytree(tiny_run.path, tmp_path_factory.mktemp("least") / "run")
    loaded = LoadedRun(Run(Path(copy)), torch.device("cpu"))
    made = {}
    before = run_attack(loaded, "clean", Clean(), RecordOptions(n=COUNT)).correct
    for name in ("cw", "cw-adaptive", "cw-linf", "cw-adaptive-linf"):
        cw = distortion_attack(name + FAST, loaded.run.recipe)
        record = run_attack(loaded, name + FAST, cw, RecordOptions(n=COUNT))
        made[name] = distortion_verdicts(record, cw, loaded.clean, before)
    return made


@pytest.mark.parametrize("norm", ["", "-linf"])
def test_success_means_a_score_above_the_median(
    norm: str, found: dict[str, DistortionVerdicts]
) -> None:
    adaptive = found[f"cw-adaptive{norm}"]
    output, y = adaptive.record.output, adaptive.record.y
    assert adaptive.threshold is not None
    accepted_errors = ((prediction(output) != y) & (rcon(output) >= adaptive.threshold)).numpy()
    assert np.array_equal(adaptive.broken, accepted_errors)
    assert adaptive.broken.mean() > 0.2, "many images become accepted errors"
    assert np.array_equal(adaptive.distance > 0, adaptive.moved), "failures are unchanged"


@pytest.mark.parametrize("norm", ["", "-linf"])
def test_an_accepted_error_needs_a_larger_distance(
    norm: str, found: dict[str, DistortionVerdicts]
) -> None:
    normal, adaptive = found[f"cw{norm}"], found[f"cw-adaptive{norm}"]
    both = normal.moved & adaptive.moved
    assert (adaptive.distance >= normal.distance)[both].mean() > 0.9
    lines = distances([normal, adaptive], RR_RUN.rejectors())
    assert [line.rejector_name for line in lines] == ["normal", "R-Con"]
    assert lines[0].ratio_to_normal is None
    assert lines[1].ratio_to_normal is not None
    assert lines[1].ratio_to_normal > 1


def test_means_by_hand() -> None:
    """Two images broken by a change, one without a change, one not broken."""
    nothing = torch.zeros(4)
    arrays = {"size_l2": torch.tensor([2.0, 4.0, 0.0, 0.0]), "y": nothing}
    record = Record(arrays, {"label": "cw", "digest": "d"})
    broken = np.array([True, True, True, False])
    before = np.array([True, True, False, True])
    one = DistortionVerdicts(record, CW(), None, broken, np.array([4.0, 16.0, 0.0, 0.0]), before)
    ruled = CW(criterion=AcceptedError(RCon(), 0.5))
    reached = np.array([True, False, True, False])
    far = DistortionVerdicts(record, ruled, 0.5, reached, np.array([12.0, 0, 5, 0]), before)
    never = DistortionVerdicts(record, CW("Linf"), None, ~broken & broken, np.zeros(4), before)
    normal, adaptive, failed = distances([one, far, never], RR_RUN.rejectors())
    assert (normal.mean, normal.median, normal.paper_mean) == (10.0, 10.0, 5.0)
    assert (normal.broken, normal.broken_clean) == (0.75, 0.25)
    assert (adaptive.mean, adaptive.unbroken) == (8.5, 2)
    assert adaptive.paper_mean == (12 + 16 + 5 + 0) / 4, (
        "a failure counts as under normal C&W, an image that was wrong before with its own distance"
    )
    assert distances([far], RR_RUN.rejectors())[0].paper_mean is None, "without normal C&W"
    assert adaptive.ratio_to_normal == 3.0, "on the one image that a change broke in both"
    assert (failed.mean, failed.median, failed.paper_mean, failed.broken) == (None, None, 0.0, 0.0)
    json.dumps([line.to_json() for line in (normal, adaptive, failed)])


def test_distances_are_squared_in_l2_and_in_255ths_in_linf(
    found: dict[str, DistortionVerdicts],
) -> None:
    two, largest = found["cw"], found["cw-linf"]
    assert np.allclose(two.distance, two.record.arrays["size_l2"].numpy() ** 2)
    assert np.allclose(largest.distance, 255 * largest.record.arrays["size_linf"].numpy())


def test_the_command_end_to_end(command: Command, tiny_run: Run, in_empty_folder: Path) -> None:
    shutil.copytree(tiny_run.path, in_empty_folder / "runs" / "tiny")
    changes = ":searches=2,steps=20,rate=0.1,constant=5"
    words = [*STUDY, "tiny", "cw" + changes, "cw-adaptive" + changes, "--n", "12"]
    code, out, err = command(*words, "--json")
    assert code == 0, err
    lines: list[dict[str, Any]] = json.loads(out)["distances"]
    assert [line["rejector_name"] for line in lines] == ["normal", "R-Con"]
    assert (
        lines[1]["threshold"]
        == resolve_thresholds(
            AcceptedError(RCon(), Median()),
            LoadedRun(Run(Path("runs/tiny")), torch.device("cpu")).clean,
        ).spec.threshold
    )
    code, out, _ = command(*words)
    assert code == 0
    for word in ("squared L2", "times normal", "paper: mean of all", "R-Con (cw-adaptive"):
        assert word in out, word
    expect_error(command(*STUDY, "tiny", "pgd-20"), "does not minimise the distortion")
    expect_error(command(*STUDY, "tiny", "cv"), "no attack is called 'cv'", "cw")
    expect_error(command(*STUDY, "tiny", "cw:step_size=3"), "no key 'step_size'")
    expect_error(command(*STUDY, "tiny", "--n", "0"), "asked for 0 images")
