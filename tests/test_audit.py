"""The audit: one call, one command, one page; models in many forms."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from demur.attacks import APGD, FAB, MaxMinMargin, Square, autoattack
from demur.audits import AuditReport, audit, ensembles
from demur.audits.model_loading import load_model, official_net
from demur.data import CIFAR10
from demur.errors import BadInput
from demur.methods import RR, NoHead
from demur.nets import ResNet18, WideResNet
from demur.output import Output, as_output, prediction
from demur.rejectors import GDA, KNN, Con
from demur.rejectors.image_scores import ImageRejector, Query
from tests.conftest import Command
from tests.linear import centred_images
from tests.test_ensemble_result import Logits
from tests.test_hostile_names import MARKUP, Tags

EPS, COUNT = 0.15, 60


def few_games(*given: Any, **fields: Any) -> MaxMinMargin:
    return MaxMinMargin(*given, **fields | {"steps": 3, "restarts": 1})


@pytest.fixture(scope="module", autouse=True)
def short_attacks() -> Iterator[None]:
    """Few steps in every ensemble."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autoattack, "Square", partial(Square, queries=9))
        patch.setattr(autoattack, "APGD", partial(APGD, steps=8))
        patch.setattr(autoattack, "FAB", partial(FAB, steps=2))
        patch.setattr(autoattack, "MaxMinMargin", few_games)
        yield


def images() -> tuple[Tensor, Tensor]:
    x = centred_images(COUNT).float()
    y = prediction(as_output(Logits()(x)))
    y[:3] = (y[:3] + 1) % 4
    return x, y


@dataclass(frozen=True)
class Rounded(ImageRejector):
    """How little the net's answer changes when the image is rounded; it has no gradient."""

    def score(self, model: Query, images: Tensor, output: Output) -> Tensor:
        with torch.no_grad():
            return -(model((images * 16).round() / 16).logits - output.logits).abs().amax(-1)


@pytest.fixture(scope="module")
def report() -> AuditReport:
    return audit(Logits(), *images(), rejector=Con(), eps=EPS, version="fast", name="linear")


class TestAudit:
    def test_of_a_classifier_and_a_rejector(self, report: AuditReport) -> None:
        held_out = int(0.3 * COUNT)
        assert f"{held_out} held-out clean images (a random 30%" in report.rule
        assert report.autoattack.clean.n == COUNT - held_out
        assert report.accepted_errors is not None
        assert report.forced_rejections is not None
        wrong = report.accepted_errors.attacked.accepted_wrong
        assert report.accepted_errors.clean.accepted_wrong < wrong
        assert wrong <= report.autoattack.attacked.accepted_wrong
        assert report.forced_rejections.attacked.rejected > report.forced_rejections.clean.rejected
        assert report.flags == []
        left = report.accepted_errors.unbroken
        assert report.grade == "broken"  # an honest linear net, but hardly an image is left
        assert f"without an attack, {left} are left" in str(report.verdict)

    def test_the_threshold_accepts_the_share_on_given_images(self) -> None:
        x, y = images()
        given = audit(Logits(), x[:9], y[:9], rejector=Con(), cal=(x, y), eps=EPS, version="fast")
        score, right = Con()(Logits()(x)), prediction(as_output(Logits()(x))) == y
        assert given.threshold is not None
        assert (score[right] >= given.threshold).float().mean() >= 0.95
        assert given.autoattack.clean.n == 9
        assert "(given)" in given.rule

    def test_prints_saves_and_dumps(self, report: AuditReport, tmp_path: Path) -> None:
        lines = str(report).splitlines()
        assert max(map(len, lines)) <= 80
        assert lines[0].startswith("Audit of linear: Linf(0.15), 42 test images")
        json.dumps(report.to_json())
        report.save(tmp_path / "audit.html")
        page = (tmp_path / "audit.html").read_text()
        assert report.grade in page
        assert "<script" not in page
        assert "http" not in page

    def test_a_detector_is_a_function_of_images(self) -> None:
        def detector(x: Tensor) -> Tensor:
            return x.flatten(1).mean(1)

        found = audit(
            Logits(), *images(), rejector=detector, threshold=0.45, eps=EPS, version="fast"
        )
        assert "ModelScore() must reach 0.45, a given number" in found.rule
        assert found.autoattack.clean.n == COUNT

    def test_a_rejector_without_a_gradient_is_left_to_square(self) -> None:
        given: Any = {"rejector": Rounded(), "threshold": -0.5}
        x, y = (part[:12] for part in images())
        blind = audit(Logits(), x, y, version="black-box", eps=EPS, **given)
        assert "skipped" not in str(blind)
        assert blind.accepted_errors is not None
        assert "square" in blind.accepted_errors.seconds
        found = audit(Logits(), x, y, eps=EPS, **given)
        assert found.accepted_errors is not None
        assert found.forced_rejections is not None
        assert {"apgd-ce", "apgd-t", "fab-t", "square"} <= {*found.autoattack.seconds}
        assert "square" in found.accepted_errors.seconds
        assert [*found.forced_rejections.seconds] == ["square"]
        assert not {"product", "balanced", "product-t"} & {*found.accepted_errors.seconds}
        of_score, skipped, *_ = found.accepted_errors.warnings
        assert of_score.startswith("the score has no gradient for 12 of 12 images")
        assert skipped.startswith("product, balanced, product-t")
        assert "skipped: the score of Rounded has no gradient" in skipped
        assert not any("the gradient is zero" in sentence for sentence in found.warnings)
        fast = str(audit(Logits(), x, y, eps=0.02, version="fast", **given).verdict)
        assert "Not tried: attacks by the gradient of the score" in fast
        assert "RejectAutoAttack raised" not in fast, "no attack of it ran"

    def test_what_is_no_number_is_found_before_the_attacks(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ensembles.EnsembleEvaluation, "_run", lambda *_: pytest.fail("late"))
        x, y = images()

        def others(given: Tensor) -> Tensor:
            return (given != x[-1]).flatten(1).any(1)

        def detector(given: Tensor) -> Tensor:
            return given.flatten(1).mean(1).where(others(given), torch.nan)

        def model(given: Tensor) -> Tensor:
            return torch.as_tensor(Logits()(given)).where(others(given)[:, None], torch.nan)

        sentence = "the rejector's score is not a number for 1 of 60 images; a score must be"
        with pytest.raises(BadInput, match=sentence):
            audit(Logits(), x, y, rejector=detector, threshold=0.1, eps=EPS, version="fast")
        with pytest.raises(BadInput, match=sentence):
            audit(Logits(), x, y, rejector=detector, cal=(x, y), eps=EPS, version="fast")
        with pytest.raises(BadInput, match="the model's logits are not a number"):
            audit(model, x, y, eps=EPS, version="fast")

    def test_a_rejector_that_is_fitted_gets_images_of_its_own(self) -> None:
        from tests.linear import LinearNet

        x, y = images()[0], torch.arange(COUNT) % 4
        net, given = LinearNet(0).float().eval(), {"cal": (x, y), "version": "fast"}
        found = audit(net, x[:9], y[:9], rejector=GDA(), eps=EPS, **given)  # type: ignore[arg-type]
        assert "fitted on 30 other images" in found.rule

    def test_a_random_model_gets_its_version(self) -> None:
        def noisy(x: Tensor) -> Tensor:
            return torch.as_tensor(Logits()(x + 0.05 * torch.randn_like(x)))

        found = audit(noisy, *(part[:8] for part in images()), eps=EPS)
        assert list(found.autoattack.seconds) == ["eot-loss", "eot-margin", "eot-t"]
        assert "the model is randomised" in str(found)
        assert "outputs are random" not in {flag.kind for flag in found.flags}  # they are averaged

    def test_wrong_arguments_raise_one_sentence(self) -> None:
        x, y = images()
        with pytest.raises(BadInput, match="'R-Con' is no rejector"):
            audit(Logits(), x, y, rejector="R-Con")  # type: ignore[arg-type]
        with pytest.raises(BadInput, match="is no model; write a run"):
            audit("resnet18", x, y)
        with pytest.raises(BadInput, match="no version 'quick'"):
            audit(Logits(), x, y, version="quick")
        with pytest.raises(BadInput, match="too few to hold some out"):
            audit(Logits(), x[:4], y[:4], rejector=Con())
        with pytest.raises(BadInput, match="labels must be from 0 to 3, but these range from"):
            audit(Logits(), x, y, rejector=Con(), cal=(x[:2], torch.tensor([0, 9])))
        with pytest.raises(BadInput, match="no calibration image is classified correctly"):
            audit(Logits(), x, (prediction(as_output(Logits()(x))) + 1) % 4, rejector=Con())
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"rejector": Con}, "is no rejector; pass an object"),
            ({"threshold": 0.5}, "belongs to a rejector"),
            ({"rejector": Con(), "threshold": "0.5"}, "must be a number, not '0.5'"),
            ({"rejector": Con(), "cal": x}, r"must be a pair \(images, labels\)"),
            ({"rejector": KNN()}, "return Output"),
            ({"device": "gpu"}, "there is no device 'gpu'"),
            ({"bs": 2.5}, "a whole number"),
            ({"eps": "8/255"}, "eps must be a number"),
            ({"state_folder": __file__}, "is a file; name a folder"),
        ]
        for options, message in wrong:
            with pytest.raises(BadInput, match=message):
                audit(Logits(), x, y, **options)

    def test_a_failing_detector_is_named(self) -> None:
        def broken(x: Tensor) -> Tensor:
            return torch.zeros(1 // 0)

        with pytest.raises(BadInput, match=r"the detector fails on images of shape .*by zero"):
            audit(Logits(), *images(), rejector=broken, threshold=0.5)

    def test_few_calibration_images_are_said(self) -> None:
        x, y = images()
        found = audit(Logits(), x, y, rejector=Con(), cal=(x[:5], y[:5]), eps=EPS, version="fast")
        assert "2 of 2 correct predictions (95% asked) on 5 clean" in found.rule
        assert "only roughly" in found.rule


MODULE = """
import torch
from tests.test_ensemble_result import Logits
from tests.test_hostile_names import MARKUP, Tags

def factory():
    return Logits()

def logits(x):
    return Logits()(x)

class Net(Logits):
    pass

class Wide(Logits):
    def __init__(self, width):
        super().__init__()

class Twins(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

def detector(x):
    return x.flatten(1).mean(1)

wrapped = torch.nn.Sequential(torch.nn.Identity(), Logits())
number = 3
"""


@pytest.fixture
def module(in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (in_empty_folder / "own_code.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(in_empty_folder))
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    return in_empty_folder


class TestModels:
    @pytest.mark.parametrize("name", ["factory", "logits", "Net", "wrapped"])
    def test_whatever_can_be_imported_is_a_model(self, module: Path, name: str) -> None:
        x, _ = images()
        assert torch.equal(as_output(load_model(f"own_code:{name}")(x)).logits, Logits()(x))

    @pytest.mark.parametrize("file", ["w.safetensors", "w.pt"])
    def test_checkpoints_with_prefixes_and_containers(self, module: Path, file: str) -> None:
        other = {name: 2 * tensor for name, tensor in Logits().state_dict().items()}
        if file.endswith("pt"):
            torch.save(
                {"epoch": 3, "state_dict": {f"module.{k}": v for k, v in other.items()}}, file
            )
        else:
            save_file(other, file)
        x, _ = images()
        for name in ("factory", "wrapped"):  # Sequential(normalize, net) with weights of the net
            model = load_model(f"own_code:{name}", file)
            assert torch.allclose(as_output(model(x)).logits, 2 * Logits()(x))

    def test_what_is_no_model_or_checkpoint_raises_one_sentence(self, module: Path) -> None:
        torch.save({"weights": Logits()}, "code.pt")
        torch.save({"other": torch.zeros(2)}, "other.pt")
        torch.save(nn.Linear(2, 2).state_dict(), "w.pt")
        torch.save({"epoch": 3, "ema": {"weight": torch.zeros(2)}}, "epoch.pt")
        Path("noise.pt").write_bytes(b"nonsense")
        wrong = [
            ("own_code", None, "is no model"),
            ("own_code:nothing", None, "cannot be imported"),
            ("no_such_code:net", None, "cannot be imported"),
            ("own_code:number", None, "gives int"),
            ("own_code:Wide", None, "fails with TypeError"),
            ("own_code:Twins", "w.pt", "fits 2 parts"),
            ("own_code:factory", "epoch.pt", "its entries are epoch, ema"),
            ("timm:resnet18", None, "no weights of its own; give --checkpoint"),
            ("timm:resnet18", "w.pt", "timm"),
            ("rectified-rejection", None, "give --checkpoint"),
            ("rectified-rejection", "other.pt", "is not of PreActResNet18"),
            ("own_code:factory", "code.pt", "more than weights"),
            ("own_code:factory", "noise.pt", "noise.pt"),
            ("own_code:factory", "other.pt", "it lacks net.aux"),
            ("own_code:logits", "other.pt", "needs a torch module"),
            ("own_code:factory", "none.pt", "is no file"),
        ]
        for text, checkpoint, message in wrong:
            with pytest.raises(BadInput, match=message):
                load_model(text, checkpoint)

    def test_timm_nets_get_their_normalisation(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        class Net(nn.Module):
            pretrained_cfg = {"mean": (0.5,), "std": (0.25,)}

            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.ones(1))

            def forward(self, x: Tensor) -> Tensor:
                return self.scale * x.flatten(1)

        timm: Any = ModuleType("timm")
        timm.create_model = lambda name, pretrained: Net()
        monkeypatch.setitem(sys.modules, "timm", timm)
        save_file({"scale": torch.tensor([2.0])}, tmp_path / "net.safetensors")
        model, (x, _) = load_model("timm:net", tmp_path / "net.safetensors"), images()
        assert torch.allclose(as_output(model(x)).logits, 2 * ((x - 0.5) / 0.25).flatten(1))


OFFICIAL = {  # our names, and those of the Rectified-Rejection repository
    "trunk.stem.weight": ("conv1.weight", "conv1.weight"),
    "trunk.stages.1.0.norm1.weight": ("layer2.0.bn1.weight", "block2.layer.0.bn1.weight"),
    "trunk.stages.0.0.conv2.weight": ("layer1.0.conv2.weight", "block1.layer.0.conv2.weight"),
    "trunk.stages.1.0.shortcut.weight": (
        "layer2.0.shortcut.0.weight", "block2.layer.0.convShortcut.weight",
    ),
    "trunk.norm.running_var": ("bn.running_var", "bn1.running_var"),
    "classify.bias": ("linear.bias", "fc.bias"),
    "aux.layers.1.running_mean": ("dense.1.running_mean", "dense.1.running_mean"),
}  # fmt: skip


@pytest.mark.parametrize(("spec", "wide"), [(ResNet18(width=4), 0), (WideResNet(10, 1), 1)])
@pytest.mark.parametrize("head", [RR(), NoHead()])
def test_official_checkpoints_load(spec: Any, wide: int, head: Any) -> None:
    net = spec.build(CIFAR10().domain, head, seed=3).eval()
    theirs = {}
    for name, tensor in net.state_dict().items():
        stage = "layer{}." if not wide else "block{}.layer."
        if name.startswith("normalise"):
            continue
        if name.startswith("trunk.stages."):
            number, rest = name.removeprefix("trunk.stages.").split(".", 1)
            short = "convShortcut" if wide else "shortcut.0"
            rest = rest.replace("norm", "bn").replace("shortcut", short)
            official = stage.format(int(number) + 1) + rest
        else:
            names = {"trunk.stem": "conv1", "trunk.norm": ("bn", "bn1")[wide],
                     "classify": ("linear", "fc")[wide], "aux.layers": "dense"}  # fmt: skip
            start = next(prefix for prefix in names if name.startswith(prefix))
            official = str(names[start]) + name.removeprefix(start)
        if name in OFFICIAL:
            assert official == OFFICIAL[name][wide]
        theirs[official] = tensor
    x = torch.rand(2, 3, 32, 32)
    found, expected = official_net(theirs).eval()(x), net(x)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.aux, expected.aux)


class TestCommand:
    def test_audits_a_module_on_a_file(self, module: Path, command: Command) -> None:
        x, y = images()
        np.savez("images.npz", x=x.numpy(), y=y.numpy(), cal_x=x.numpy(), cal_y=y.numpy())
        words = ["audit", "own_code:factory", "--data", "images.npz", "--eps", "15/100",
                 "--n", "12", "--version", "fast", "--rejector", "Con"]  # fmt: skip
        words += ["--state", "state"]
        code, out, err = command(*words, "-o", "page.html", "--device", "cpu")
        assert code == 0, err
        assert "attacked, accepted errors" in out
        assert "Audit of own_code:factory" in Path("page.html").read_text()
        assert len(list(Path("state").iterdir())) == 3
        code, out, _ = command(*words)
        assert code == 0
        assert "resumed: " in out
        assert "initially: " not in out
        code, out, _ = command(*words, "--json")  # resumes
        assert code == 0
        assert json.loads(out)["n"] == 12

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--data", "none.npz"], "is no file"),
            (["--data", "digit"], "did you mean digits"),
            (["--data", "digits", "--eps", "eight"], "a number or a fraction"),
            (["--data", "digits", "--tpr", "2"], "give a share"),
            (["--data", "digits", "--rejector", "PGD(Linf(0.1))"], "is not a rejector"),
            (["--data", "digits", "--n", "0"], "at least 1"),
            (["--data", "digits", "-o", "page.pdf"], "page.pdf is no .html, .md or .json file"),
            (["--data", ""], "--data is empty"),
            (["--data", "own_code.py.npz"], "is no file"),
            (["--data", "half.npz"], "only one of cal_x and cal_y"),
            (["--data", "words.npz"], "labels must be integers"),
            (["--data", "short.npz", "--n", "5"], "labels; give one per image"),
            (["--data", "junk.npz"], "is no .npz file"),
            (["--data", "digits", "--eps", "-1"], "eps must be a number of at least 0"),
        ],
    )
    def test_wrong_words_give_one_sentence(
        self, module: Path, command: Command, words: list[str], message: str
    ) -> None:
        x, y = (part.numpy() for part in images())
        np.savez("half.npz", x=x, y=y, cal_x=x)
        np.savez("short.npz", x=x, y=y[:-3])
        np.savez("words.npz", x=x, y=np.full(len(y), "cat"))
        Path("junk.npz").write_text("junk")
        code, out, err = command("audit", "own_code:factory", *words)
        assert (code, out) == (2, "")
        assert message in err

    def test_help_says_that_a_model_is_code(self, command: Command) -> None:
        _, out, _ = command("audit", "--help")
        assert "A model is code." in out


def test_a_page_holds_no_markup_of_a_name(report: AuditReport, tmp_path: Path) -> None:
    for name in MARKUP:
        replace(report, model=name, rule=name, warnings=(name,)).save(tmp_path / "audit.html")
        assert not Tags((tmp_path / "audit.html").read_text()).handlers
