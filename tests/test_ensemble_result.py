"""The result of both ensembles: counts, intervals, sanity checks, warnings, inputs of any kind."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from demur.attacks import APGD, PGD, AcceptedError, Chain, MeanChain, Square
from demur.attacks.balls import Linf
from demur.attacks.wrappers import ModelWithScore
from demur.audits import image_parts
from demur.audits.ensemble_result import Counts, EnsembleResult
from demur.audits.ensembles import AutoAttack, EnsembleEvaluation, RejectAutoAttack
from demur.audits.flags import MASKED
from demur.audits.masking import OnMasking
from demur.errors import BadInput
from demur.metrics import wilson
from demur.output import Output, as_output, prediction
from demur.rejectors import Con, ModelScore
from demur.rejectors.rule import Score
from demur.sanity import CHECKS
from tests.linear import LinearNet, centred_images, distance

EPS, COUNT = 0.08, 40
BALL = Linf(EPS)
RULE = AcceptedError(Con(), 0.4)


class Logits(nn.Module):
    """A linear net that returns logits in fp32, as other people's nets do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = LinearNet(0).float()
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return as_output(self.net(x)).logits


def images() -> tuple[Tensor, Tensor]:
    x = centred_images(COUNT).float()
    y = prediction(as_output(Logits()(x)))
    y[:3] = (y[:3] + 1) % 4  # three errors without an attack
    return x, y


def classifier(model: Any = None) -> AutoAttack:
    attack = AutoAttack(model or Logits(), eps=EPS, verbose=False)
    attack.chain, attack.names = Chain((APGD(BALL, steps=20), Square(BALL, queries=9))), ["a", "b"]
    attack.on_masking = OnMasking(attack.chain)
    return attack


def rejecting(rule: AcceptedError = RULE, model: Any = None) -> RejectAutoAttack:
    attack = RejectAutoAttack(model or Logits(), rule, eps=EPS, verbose=False)
    product: Any = replace(attack.chain.attacks[0], steps=20)  # type: ignore[call-arg]
    attack.chain = Chain((product,), rule, attack.chain.rank_by)
    attack.names, attack.on_masking = ["product"], OnMasking(attack.chain)
    return attack


@pytest.fixture(scope="module")
def plain() -> EnsembleResult:
    return classifier().evaluate(*images())


@pytest.fixture(scope="module")
def rejected() -> EnsembleResult:
    return rejecting().evaluate(*images())


class TestCounts:
    def test_of_a_linear_classifier_equal_the_closed_form(self, plain: EnsembleResult) -> None:
        x, y = images()
        safe = distance(LinearNet(0), x.double(), y, "Linf") > EPS
        assert plain.clean == Counts(COUNT - 3, 3, 0)
        assert plain.attacked == Counts(int(safe.sum()), int((~safe).sum()), 0)
        assert 5 < plain.attacked.accepted_right < COUNT - 8
        assert plain.attacked.interval("accepted_wrong") == wilson(int((~safe).sum()), COUNT)

    def test_of_a_rejector_equal_its_decisions_on_x_adv(self, rejected: EnsembleResult) -> None:
        x, y = images()
        for found, pixels in ((rejected.clean, x), (rejected.attacked, rejected.x_adv)):
            out = as_output(Logits()(pixels))
            accept, right = RULE.accept_rule.accepted(out), prediction(out) == y
            expected = (accept & right, accept & ~right, ~accept)
            assert found == tuple(int(part.sum()) for part in expected)
        assert BALL.contains(x, rejected.x_adv).all()
        assert rejected.attacked.accepted_wrong > rejected.clean.accepted_wrong

    def test_each_image_names_the_attack_that_broke_it(self, plain: EnsembleResult) -> None:
        rows = plain.to_numpy()
        assert (rows["broken_by"][:3] == "clean").all()
        assert ((rows["broken_by"] == "") == (rows["label"] == rows["y"])).all()
        assert "a" in rows["broken_by"]
        assert rows["clean_accepted"].all()
        assert set(plain.seconds) == {"a", "b"}
        assert plain.unbroken == plain.attacked.accepted_right


class TestPrinting:
    @pytest.mark.parametrize("name", ["plain", "rejected"])
    def test_the_table_fits_and_json_holds_the_same(
        self, name: str, request: pytest.FixtureRequest
    ) -> None:
        result = request.getfixturevalue(name)
        lines = str(result).splitlines()
        assert max(map(len, lines)) <= 80
        wrong = result.attacked.accepted_wrong
        assert any(f"{wrong:>5}  {100 * wrong / COUNT:.1f}%" in line for line in lines)
        assert any(line.startswith("rejected") for line in lines) == result.rejects
        values = json.loads(json.dumps(result.to_json()))
        assert values["attacked"]["accepted_wrong"]["count"] == wrong
        assert len(values["broken_by"]) == COUNT

    def test_all_checks_run_on_a_rejector_and_two_fewer_on_a_classifier(
        self, plain: EnsembleResult, rejected: EnsembleResult
    ) -> None:
        of_the_audit = 6  # slopes, jumps, changing answers, stuck losses, masking, unconfirmed
        assert len(rejected.sanity) == len(CHECKS) + of_the_audit
        assert len(plain.sanity) == len(CHECKS) - 2 + of_the_audit
        for result, missing in ((plain, []), (rejected, [MASKED])):  # one attack, by the gradient
            assert [check.kind for check in result.sanity if check.missing] == missing
            assert result.flags == []
            assert result.warnings == ()


class Negative(Score):
    """The confidence with the wrong sign."""

    def __call__(self, out: Output) -> Tensor:
        return -Con()(out)


class Drawn(Score):
    """A score that is random, of an output that is not."""

    def __call__(self, out: Output) -> Tensor:
        return Con()(out) + 0.1 * torch.rand(len(out.logits))


def evaluated(attack: EnsembleEvaluation, x: Tensor, y: Tensor, **options: Any) -> EnsembleResult:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return attack.evaluate(x, y, **options)


class TestSaidAtOnce:
    def test_a_threshold_that_no_image_reaches(self) -> None:
        with pytest.warns(UserWarning, match=r"reaches the threshold 1e\+09 of Con"):
            result = rejecting(AcceptedError(Con(), 1e9)).evaluate(*images(), sanity=False)
        assert result.attacked == Counts(0, 0, COUNT)
        assert "no clean image reaches" in str(result).replace("\n" + " " * 16, " ")

    def test_a_model_that_is_no_better_than_chance(self) -> None:
        x, y = images()
        (warning,) = evaluated(classifier(), x, (y + 1) % 4, sanity=False).warnings
        assert warning.startswith(
            "the model gets 0 of 40 clean images right, no better than chance"
        )

    def test_a_pair_of_scores_that_rejects_everything(self) -> None:
        from demur.rejectors import Coupled

        low = Con()(as_output(Logits()(images()[0]))).median().item()
        pair = Coupled(Negative(), -low, Con())
        rule = AcceptedError(pair, low + 1e-3)
        found = evaluated(rejecting(rule), *images(), sanity=False).warnings
        assert any("accepts 0 of 40 clean images" in sentence for sentence in found)

    def test_a_score_with_the_wrong_sign(self) -> None:
        x, _ = images()
        order = Con()(as_output(Logits()(x))).argsort()
        y = prediction(as_output(Logits()(x)))
        y[order[:10]] = (y[order[:10]] + 1) % 4  # the least confident are wrong
        found = evaluated(rejecting(AcceptedError(Negative(), -0.9)), x, y, sanity=False).warnings
        assert any("Negative has the wrong sign" in sentence for sentence in found)
        assert evaluated(rejecting(), x, y, sanity=False).warnings == ()

    def test_a_rejector_that_is_random(self) -> None:
        (warning,) = evaluated(rejecting(AcceptedError(Drawn(), 0.4)), *images()).warnings
        assert warning.startswith("the rejector's scores are random, so one lucky pass counts")

    def test_a_model_without_a_gradient_is_left_to_square(self) -> None:
        def detached(x: Tensor) -> Tensor:
            return torch.as_tensor(Logits()(x)).detach()

        attack = classifier(detached)
        large = Linf(0.4)
        attack.chain = Chain((APGD(large, steps=2), Square(large, queries=60)))
        result = evaluated(attack, *images())
        assert "a was skipped" in result.warnings[1]
        assert set(result.broken_by) == {"clean", "b", ""}
        assert "gradients are zero" in {flag.kind for flag in result.flags}
        with pytest.raises(BadInput, match="no gradient"):
            attack.run_standard_evaluation(*images())

    def test_masked_gradients_are_flagged(self) -> None:
        def saturated(x: Tensor) -> Tensor:
            return 1e5 * torch.as_tensor(Logits()(x))

        attack = classifier(saturated)
        attack.chain = Chain((PGD(BALL, steps=5), Square(BALL, queries=20)))
        kinds = {flag.kind for flag in evaluated(attack, *images()).flags}
        assert {"gradients are zero", "accuracy is left at a large eps"} <= kinds


def noisy(x: Tensor) -> Tensor:
    """A model that adds noise to its input."""
    return Logits()(x + 0.05 * torch.randn_like(x))  # type: ignore[no-any-return]


def test_a_random_model_has_its_version() -> None:
    x, y = images()
    averaged = RejectAutoAttack(noisy, RULE, eps=EPS, verbose=False, version="rand")
    assert isinstance(averaged.chain, MeanChain)
    assert averaged.names == ["eot-loss", "eot-margin", "eot-t"]
    single = rejecting(model=noisy)
    with pytest.warns(UserWarning, match="version='rand'"):
        result = single.evaluate(x, y)
    assert "outputs are random" in {flag.kind for flag in result.flags}


class TestInputs:
    """The same images in every form give the same result."""

    def numpy_pair(self) -> tuple[Any, Any]:
        x, y = images()
        return x.numpy(), y.numpy()

    def int_labels(self) -> tuple[Any, Any]:
        x, y = images()
        return x.numpy(), y.tolist()

    def loader(self) -> tuple[Any, Any]:
        return DataLoader(TensorDataset(*images()), batch_size=7), None

    @pytest.mark.parametrize("form", ["numpy_pair", "int_labels", "loader"])
    @pytest.mark.parametrize("bytes_per_part", [None, 1100])
    def test_any_form_in_any_parts(
        self, form: str, bytes_per_part: int | None, plain: EnsembleResult,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        if bytes_per_part:
            monkeypatch.setattr(image_parts, "PART_BYTES", bytes_per_part)
        result = classifier().evaluate(*getattr(self, form)(), sanity=False)  # type: ignore[misc]
        assert torch.equal(result.x_adv, plain.x_adv)
        assert result.broken_by == plain.broken_by

    def test_a_memory_mapped_file_to_a_file_and_resumed(
        self, tmp_path: Path, plain: EnsembleResult, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        x, y = self.numpy_pair()
        np.save(tmp_path / "x.npy", x)
        mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
        monkeypatch.setattr(image_parts, "PART_BYTES", 2000)
        files: dict[str, Any] = {
            "state_path": tmp_path / "state",
            "x_adv_path": tmp_path / "adv.npy",
        }
        result = classifier().evaluate(mapped, y, **files, sanity=False)
        assert np.array_equal(np.load(tmp_path / "adv.npy"), plain.x_adv.numpy())
        assert torch.equal(result.x_adv, plain.x_adv)
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "adv.npy", "state", "state.1", "x.npy",
        ]  # fmt: skip
        again = classifier()
        monkeypatch.setattr(again.chain.attacks[0].__class__, "run", None)  # must not run again
        assert again.evaluate(mapped, y, **files, sanity=False).broken_by == plain.broken_by

    def test_uint8_pixels_are_divided_by_255(self) -> None:
        levels = (255 * images()[0]).round().byte().numpy()
        ((x, y),) = image_parts.image_parts(levels, np.zeros(COUNT, np.int32))
        assert torch.equal(x, torch.from_numpy(levels).float() / 255)
        assert y.dtype == torch.int64

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda x, y: (x, None), "labels are missing"),
            (lambda x, y: (x, y[:-1]), "40 images, but 39 labels"),
            (lambda x, y: (x.repeat(3, 1).transpose(0, 2, 3, 1), y), "look like N, H, W, C"),
            (lambda x, y: ([], None), "there are no images"),
            (lambda x, y: ("images", None), "not str"),
            (lambda x, y: ([x[:2]], None), "each batch must be a pair"),
            (lambda x, y: ([{"image": x, "label": y}], None), "keys 'image', 'label'; give pairs"),
            (lambda x, y: (iter([(x, y)]), y), "yields images and labels; leave y out"),
            (lambda x, y: (x, y[0]), "not a single number"),
            (lambda x, y: (x.astype(np.complex64), y), r"floats in \[0, 1\]"),
            (lambda x, y: (255 * x, y), r"pixels must lie in \[0, 1\]"),
        ],
    )
    def test_what_is_no_image_set_raises_one_sentence(
        self, change: Callable[..., tuple[Any, Any]], message: str
    ) -> None:
        with pytest.raises(BadInput, match=message):
            classifier().evaluate(*change(*self.numpy_pair()))

    def test_nothing_is_left_of_a_failed_evaluation(self, tmp_path: Path) -> None:
        x, y = images()
        with pytest.raises(BadInput):
            classifier().evaluate(2 * x, y, x_adv_path=tmp_path / "adv.npy")
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(BadInput, match="is no folder"):
            classifier().evaluate(x, y, x_adv_path=tmp_path / "no" / "adv.npy")
        options: list[dict[str, Any]] = [{"x_adv_path": tmp_path}, {"state_path": tmp_path}]
        for option in options:
            with pytest.raises(BadInput, match="is a folder; name a file"):
                classifier().evaluate(x, y, **option)
        assert list(tmp_path.iterdir()) == []


def test_long_members_say_how_long_they_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("demur.audits.ensemble_state.LINE_SECONDS", 0.0)
    attack = classifier()
    attack.verbose = True
    attack.evaluate(*images(), bs=10, sanity=False)
    printed = capsys.readouterr().out
    assert "a: 10 of 37 images" in printed
    assert " s left" in printed
    assert "after b: " in printed


def test_a_detector_reports_ties_of_its_steps() -> None:
    def steps(x: Tensor) -> Tensor:
        return (40 * x.flatten(1).mean(1)).round() / 40

    model = ModelWithScore(Logits(), steps)
    result = evaluated(rejecting(AcceptedError(ModelScore(), 0.4), model), *images())
    assert "scores are tied" in {flag.kind for flag in result.flags}
    assert any("surrogate" in flag.remedy for flag in result.flags)
