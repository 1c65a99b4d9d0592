"""Guards in Python: what they read, what they decide, and how they are calibrated."""

import doctest
import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

import demur
from demur import TPR, BadInput, Con, Coupled, Guard, GuardResult, LoadedRun, RCon, Uncertified
from demur.calibrate import certify_threshold
from demur.files.image_files import decode_image, resize_pixels
from demur.guards.inputs import read_images
from demur.output import prediction
from demur.rejectors.certainty import con

Batch = tuple[Tensor, Tensor]


@pytest.fixture(scope="module")
def cal(tiny_source: LoadedRun) -> Batch:
    return tiny_source.splits["cal"].batch(slice(None))


@pytest.fixture(scope="module")
def x(tiny_source: LoadedRun) -> Tensor:
    return tiny_source.splits["test"].batch(slice(0, 40))[0]


def test_a_guard_decides_as_the_rule_of_its_net(tiny_guard: Guard, x: Tensor) -> None:
    result = tiny_guard(x)
    out = tiny_guard.output(x)
    assert torch.equal(torch.from_numpy(result.labels), prediction(out))
    assert torch.equal(torch.from_numpy(result.accepted), tiny_guard.rule.accepted(out))
    assert np.allclose(result.scores[:, 0], RCon()(out).numpy())
    assert np.allclose(result.probabilities.max(1), con(out).numpy())
    assert 0 < result.accepted.sum() < len(result)
    for accepted, reason in zip(result.accepted, result.reasons, strict=True):
        assert reason.startswith("accepted: R-Con" if accepted else "rejected: R-Con")


def test_rows_are_json_values(tiny_guard: Guard, x: Tensor) -> None:
    row = tiny_guard(x[:1]).rows()[0]
    assert set(row) == {"label", "class", "accepted", "confidence", "scores", "reason"}
    assert row["class"] == str(row["label"])
    assert set(row["scores"]) == {"R-Con"}


def test_a_batch_size_changes_nothing(tiny_guard: Guard, x: Tensor) -> None:
    whole, parts = tiny_guard(x), tiny_guard(x, batch_size=7)
    assert np.array_equal(whole.labels, parts.labels)
    assert np.allclose(whole.scores, parts.scores, atol=1e-6)


# ---------------------------------------------------------------------------------- thresholds


def test_the_threshold_is_the_certified_one(tiny_source: LoadedRun, cal: Batch) -> None:
    x, y = cal
    made = demur.guard(tiny_source.net, x, y, tpr=0.8)
    out = tiny_source.net(x)
    correct = (prediction(out) == y).numpy()
    found = certify_threshold(con(out).double().numpy(), correct, TPR(0.8))
    assert made.thresholds == found.thresholds
    assert made.certificate is not None
    assert made.certificate["sentence"] == found.sentence == made.calibration["sentence"]


def test_too_few_images_give_an_honest_threshold(tiny_source: LoadedRun, cal: Batch) -> None:
    x, y = cal[0][:30], cal[1][:30]
    made = demur.guard(tiny_source.net, x, y, tpr=0.95)
    out = tiny_source.net(x)
    expected = TPR(0.95).threshold(con(out).double().numpy(), (prediction(out) == y).numpy())
    assert made.certificate is None
    assert made.thresholds == (expected,)
    assert "without a guarantee" in made.calibration["sentence"]
    assert "give about" in made.calibration["shortfall"]
    with pytest.raises(Uncertified, match="no threshold gives"):
        demur.guard(tiny_source.net, x, y, risk=0.001)


def test_a_coupled_rejector_gives_two_thresholds(tiny_source: LoadedRun, cal: Batch) -> None:
    x, y = cal
    made = demur.guard(tiny_source.net, x, y, rejector=Coupled(), coverage=0.6)
    assert [part.rejector for part in made.scores] == [Con(), RCon()]
    result = made(x)
    both = (result.scores >= np.array(made.thresholds)).all(1)
    assert np.array_equal(result.accepted, both)
    assert made.calibration["coverage"]["value"] == pytest.approx(both.mean())


def test_a_fitted_rejector_needs_images_to_fit_to(tiny_source: LoadedRun, cal: Batch) -> None:
    x, y = cal
    with pytest.raises(BadInput, match="give x_fit and y_fit"):
        demur.guard(tiny_source.net, x, y, rejector="KD(sigma=0.01)")
    x_fit, y_fit = tiny_source.splits["fit"].batch(slice(0, 300))
    made = demur.guard(tiny_source.net, x, y, rejector="KD(sigma=0.01)", x_fit=x_fit, y_fit=y_fit)
    assert made(x[:4]).score_names == ("KD(sigma=0.01)",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tpr": 0.9, "risk": 0.1}, "give one of tpr, coverage and risk"),
        ({"tpr": 1.5}, "give a share between 0 and 1"),
        ({"rejector": "RCn"}, "did you mean RCon"),
        ({"rejector": "TPR(0.9)"}, "is not a rejector"),
        ({"class_names": ["a", "b"]}, "class_names has 2 names"),
        ({"class_names": ["a"] * 10}, "1 of them different"),
        ({"mean": [0.5]}, "only one of mean and std"),
        ({"mean": [0.5, 0.5], "std": [1, 1]}, "1 numbers, one per channel"),
        ({"temperature": 0}, "temperature must be"),
        ({"eps": 8}, "eps must be"),
    ],
)
def test_wrong_options_are_one_sentence(
    tiny_source: LoadedRun, cal: Batch, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        demur.guard(tiny_source.net, *cal, **options)


def test_a_foreign_model_is_normalised_and_may_return_logits(cal: Batch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    x, y = cal
    make = partial(demur.guard, accept_chance=True)
    plain = make(net, (x - 0.3) / 2 + 0.4, y)
    made = make(net, x, y, mean=[0.3], std=[2.0])
    shifted = make(lambda images: net((images - 0.3) / 2), x, y)
    assert np.allclose(made(x).scores, shifted(x).scores)
    assert not np.allclose(made(x).scores, plain(x).scores)
    assert torch.allclose(made.classifier()(x), net((x - 0.3) / 2))


def test_an_output_that_is_not_a_number_is_rejected(tiny_guard: Guard, x: Tensor) -> None:
    from dataclasses import replace

    broken = replace(tiny_guard, model=lambda images: torch.full((len(images), 10), torch.nan))
    broken = replace(broken, scores=(broken.scores[0]._replace(rejector=Con(), score=Con()),))
    result = broken(x[:2])
    assert not result.accepted.any()
    assert result.reasons[0] == "rejected: a score is not a number"
    assert result.rows()[0]["confidence"] is None


def test_a_guard_of_a_run_has_the_figures_of_its_records(scored_source: LoadedRun) -> None:
    made = Guard.from_run(scored_source, coverage=0.7)
    assert [figures["attack"] for figures in made.reported_rates] == ["clean", "pgd-3"]
    clean = scored_source.run.records()[0]
    assert made.reported_rates[0]["images"] == len(clean.y)
    assert made.reported_rates[0]["accuracy"]["value"] == pytest.approx(clean.correct.mean())
    assert made.scores[0].rejector == RCon()
    with pytest.raises(BadInput, match="the run has no rejector"):
        Guard.from_run(scored_source, rejector="nothing")


@pytest.mark.parametrize("public", [Guard, GuardResult, demur.guard], ids=lambda p: p.__name__)
def test_examples_of_public_docstrings_run(public: Any) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(public, globs={})
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


# ---------------------------------------------------------------------------------- inputs

SHAPE = (3, 4, 5)
PIXELS: NDArray[np.uint8] = np.random.default_rng(0).integers(0, 256, (4, 5, 3)).astype(np.uint8)


def png(pixels: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def forms(folder: Path) -> dict[str, Any]:
    """The same image in every form."""
    path = folder / "image.png"
    path.write_bytes(png(PIXELS))
    floats = PIXELS.astype(np.float32) / 255
    return {
        "Pillow": Image.fromarray(PIXELS), "path": path, "text": str(path), "bytes": png(PIXELS),
        "array": PIXELS, "float array": floats, "double array": floats.astype(np.float64),
        "big-endian array": floats.astype(">f8"), "long double array": floats.astype(np.longdouble),
        "read-only array": np.asarray(Image.fromarray(PIXELS)),
        "channels first": PIXELS.transpose(2, 0, 1), "list": [PIXELS], "batch": PIXELS[None],
        "tensor": torch.from_numpy(PIXELS.transpose(2, 0, 1).copy()),
        "float tensor": torch.from_numpy(floats.transpose(2, 0, 1).copy())[None],
        "tensor with channels last": torch.from_numpy(PIXELS),
        "transparent": Image.fromarray(PIXELS).convert("RGBA"),
    }  # fmt: skip


def test_every_form_of_an_image_is_the_same_image(tmp_path: Path) -> None:
    expected = torch.from_numpy(PIXELS).permute(2, 0, 1)[None] / 255
    for name, image in forms(tmp_path).items():
        batch = read_images(image, SHAPE, resize=False)
        assert torch.allclose(batch.x, expected, atol=1e-7), name
        assert batch.notes == ("",)


def test_several_images_of_several_forms(tmp_path: Path) -> None:
    every = list(forms(tmp_path).values())
    simple = [image for image in every if not isinstance(image, list)]
    assert len(read_images(simple, SHAPE, resize=False).x) == len(simple)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((4, 6, 3), np.uint8), "this guard does not resize"),
        (np.full((4, 5, 3), 1.5), r"floats must lie in \[0, 1\]"),
        (np.full((4, 5, 3), -0.1), r"floats must lie in \[0, 1\]"),
        (np.full((4, 5, 3), np.nan), r"floats must lie in \[0, 1\]"),
        (np.zeros((4, 5, 3), np.int64), "uint8 or floats"),
        (np.zeros((4, 5, 3), np.bool_), "uint8 or floats"),
        (np.zeros((4, 5, 2), np.uint8), "takes 3 channels"),
        (np.zeros((5,), np.uint8), "an image has shape H, W, C"),
        (np.zeros((0, 4, 5, 3), np.uint8), "there are no images"),
        ([], "there are no images"),
        ([PIXELS, b"nothing"], "image 1: the image is damaged"),
        (b"", "damaged or not an image"),
        (png(PIXELS)[:60], "damaged or not an image"),
        ("nowhere.png", "nowhere.png is missing"),
        (7, "cannot be read from int"),
        ([7], "int is not an image"),
        (Image.new("I;16", (5, 4)), "more than 8 bits"),
        (Image.new("F", (5, 4)), "more than 8 bits"),
    ],
)  # fmt: skip
def test_what_is_no_image_is_one_sentence(image: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_images(image, SHAPE, resize=False)


def test_a_pipe_and_a_folder_are_no_images(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(BadInput, match="and not a file"):
            read_images(path, SHAPE, resize=False)


def test_a_bomb_is_not_decoded() -> None:
    file = io.BytesIO()
    Image.new("1", (9000, 9000)).save(file, "PNG")
    with pytest.raises(BadInput, match=r"9000 x 9000 pixels and may have at most 64,000,000"):
        decode_image(file.getvalue(), 3)
    with pytest.raises(BadInput, match="may have at most 10"):
        decode_image(png(PIXELS), 3, max_pixels=10)


def test_another_size_is_resized_and_the_reason_says_so(
    tiny_guard: Guard, x: Tensor, tiny_source: LoadedRun
) -> None:
    from dataclasses import replace

    resizing = replace(tiny_guard, resize=True)
    large = x[:1].repeat_interleave(4, 2).repeat_interleave(4, 3)
    result = resizing(large)
    assert result.reasons[0].endswith("; resized from 32 x 32 to 8 x 8")
    assert "resized" not in resizing(x[:1]).reasons[0]
    pixels = (large[0].permute(1, 2, 0) * 255).byte().numpy()
    assert np.allclose(resizing(pixels).scores, result.scores, atol=0.05)


def test_resizing_is_pillows() -> None:
    expected = np.asarray(Image.fromarray(PIXELS).resize((2, 3), Image.Resampling.BILINEAR))
    assert np.array_equal(resize_pixels(PIXELS, 3, 2), expected)
    assert resize_pixels(PIXELS, 4, 5) is PIXELS


def test_exif_orientation_turns_the_image() -> None:
    image, file = Image.fromarray(PIXELS), io.BytesIO()
    exif = image.getexif()
    exif[0x0112] = 3  # upside down
    image.save(file, "PNG", exif=exif)
    assert np.array_equal(decode_image(file.getvalue(), 3), PIXELS[::-1, ::-1])


def test_a_reason_has_enough_digits_to_be_true() -> None:
    from demur.guards.decision import _compared

    assert _compared(0.166104, "<", 0.166107) == "0.166104 < 0.166107"
    assert _compared(0.5, ">=", 0.5) == "0.5 >= 0.5"
    assert _compared(0.25, "<", 0.5) == "0.25 < 0.5"
