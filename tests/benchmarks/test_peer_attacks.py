"""Peer comparison of attacks: every pair runs and is evaluated by the same rules."""

import importlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import peer_adapters
from demur.attacks import CW, PGD, AutoAttackEnsemble
from demur.attacks.balls import Linf
from demur.evaluate import LoadedRun, RecordOptions
from demur.nets import RejectingNet
from demur.output import prediction
from demur.runs import Run
from peer_adapters import ART, PAIRS, PeerSetup, plain_copy, seeded
from peer_attacks import (
    COLUMNS,
    OURS,
    PeerEvaluator,
    cells,
    compare_attacks,
    peer_setup,
    program,
    sentences,
    show_peer_attacks,
    weaker,
)
from tests.benchmarks.conftest import Script

LIBRARIES = (ART, "foolbox", "pyautoattack", "torchattacks")
CPU = torch.device("cpu")


@pytest.fixture
def libraries() -> None:
    for name in LIBRARIES:
        module = "art" if name == ART else name
        pytest.importorskip(module, reason=f"pip install {name}", exc_type=ImportError)


@pytest.fixture
def run_here(tiny_run: Run, in_empty_folder: Path) -> Path:
    return Path(shutil.copytree(tiny_run.path, in_empty_folder / "runs" / "tiny"))


def short_setup(loaded: LoadedRun) -> PeerSetup:
    """A large ball, in which attacks succeed at once, and a small budget."""
    cw = CW("L2", searches=2, steps=8, rate=0.1, constant=1.0)
    return replace(peer_setup(loaded), ball=Linf(0.5), step=0.1, steps=3, queries=10, cw=cw)


def test_every_pair_runs(libraries: None, tiny_source: LoadedRun) -> None:
    images, log = tiny_source.images(RecordOptions(n=4)), list[str]()
    report = compare_attacks(tiny_source, images, PAIRS, short_setup(tiny_source), log.append)
    expected = [(name, by) for name, pair in PAIRS.items() for by in (OURS, *pair.peers)]
    assert [(line["attack"], line["by"]) for line in report["lines"]] == expected
    assert len(log) == len(expected)
    assert report["missing"] == []
    assert set(report["libraries"]) == set(LIBRARIES)
    assert {"device", "torch", "code", "threads"} <= report["machine"].keys()
    assert json.loads(json.dumps(report)) == report
    for line in report["lines"]:
        assert 0 <= line["right"] <= report["right_unattacked"], line
        assert line["outside"] == 0, line
        assert line["seconds"] > 0
        assert line["ready_s"] is None, "nothing is compiled on a CPU"
        assert len(cells(line)) == len(COLUMNS)
        if line["attack"] not in ("fab", "cw-l2"):
            assert line["largest"] <= 0.5 + 1e-6, line
            assert line["distance"] is None
        if line["by"] == OURS:
            assert (line["differ"], line["times_ours"]) == (0, 1)
    cw = [line for line in report["lines"] if line["attack"] == "cw-l2"]
    assert all(line["distance"] > 0 and line["distance_ours"] > 0 for line in cw)


def test_pairs_use_the_members_of_our_autoattack(tiny_source: LoadedRun) -> None:
    setup = peer_setup(tiny_source)
    for name in ("apgd-ce", "apgd-dlr", "apgd-t", "fab-t", "square"):
        assert PAIRS[name].ours(setup) == AutoAttackEnsemble(setup.ball).member(name)


def test_as_it_comes_uses_default_batches_and_trainable_weights(
    tiny_source: LoadedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[dict[str, int], set[bool]]] = []

    class FakeAutoAttack:
        def __init__(self, net: torch.nn.Module, **options: object) -> None:
            self.net = net
            self.apgd = self.fab = self.apgd_targeted = self.square = SimpleNamespace()

        def run_standard_evaluation(self, x: Tensor, y: Tensor, **batches: int) -> tuple[Tensor]:
            calls.append((batches, {weight.requires_grad for weight in self.net.parameters()}))
            return (x,)

    monkeypatch.setattr(
        peer_adapters, "library", lambda name: SimpleNamespace(AutoAttack=FakeAutoAttack)
    )
    setup, images = peer_setup(tiny_source), tiny_source.images(RecordOptions(n=4))
    for adapter in PAIRS["autoattack"].peers.values():
        adapter(setup)(*images.batch(slice(None)), 512)
    assert calls == [({"batch_size": 512}, {False}), ({}, {True})]


def test_a_missing_library_is_named_and_skipped(
    libraries: None, script: Script, run_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, target = importlib.import_module, "peer_adapters.import_module"

    def without_foolbox(name: str) -> Any:
        if name == "foolbox":
            raise ImportError(name)
        return original(name)

    monkeypatch.setattr(target, without_foolbox)
    arguments = ("tiny", "--n", "6", "--only", "pgd-10", "-o", "out.json")
    code, out, err = script(program, *arguments)
    assert code == 0, err
    assert "foolbox is not installed and left out: pip install foolbox" in out
    report = json.loads(Path("out.json").read_text())
    assert [line["by"] for line in report["lines"]] == [OURS, "torchattacks", ART]
    assert (report["n"], report["run"]) == (6, "tiny")
    monkeypatch.setattr(target, lambda name: without_foolbox("foolbox"))
    code, out, err = script(program, *arguments[:-2], "--json")
    assert code == 0, err
    assert [line["by"] for line in json.loads(out)["lines"]] == [OURS]
    assert len(json.loads(out)["missing"]) == 3


def test_wrong_arguments_are_one_sentence(script: Script, run_here: Path) -> None:
    for arguments, sentence in (
        (("tiny", "--only", "pgd-11"), "there is no attack 'pgd-11' to compare; did you mean"),
        (("tinny",), "there is no run 'tinny'"),
        (("tiny", "--n", "0"), "asked for 0 images"),
        (("tiny", "-o", "."), ". is a folder; name a file"),
    ):
        code, out, err = script(program, *arguments)
        assert (code, out) == (2, "")
        assert sentence in " ".join(err.split())
    code, _, err = script(program)
    assert code == 2
    assert err == "demur: missing argument 'RUN'; see python benchmarks/peer_attacks.py -h\n"


def test_names_with_markup_are_printed_literally(capsys: pytest.CaptureFixture[str]) -> None:
    about = {"run": "a[/b]c[red]:x:", "ball": "Linf(0.1)", "n": 3, "right_unattacked": 2}
    machine = {"device": "cpu", "torch": "2", "threads": 1}
    lines = {"lines": [], "missing": [], "notes": ["[/b] is not installed"]}
    show_peer_attacks(about | {"machine": machine} | lines)
    out = capsys.readouterr().out
    assert "a[/b]c[red]:x:" in out
    assert "[/b] is not installed" in out


class BrightnessNet(torch.nn.Module):
    """Predicts class 1 for bright images."""

    def forward(self, x: Tensor) -> Tensor:
        bright = x.mean((1, 2, 3)) - 0.5
        return torch.stack((-bright, bright), 1)


def test_images_outside_the_ball_are_not_broken(tiny_source: LoadedRun) -> None:
    images = tiny_source.images(RecordOptions(n=4))
    x, y = images.batch(slice(None))
    correct = prediction(tiny_source.net(x)) == y
    assert correct.all(), "these four are classified correctly"
    x_adv = PGD(Linf(0.5), steps=10)(tiny_source.net, x, y)
    radius = float((x_adv - x).abs().amax())
    for eps, distance, left, outside in (
        (radius, None, 0, 0), (1e-4, None, 4, 4), (1e-4, "Linf", 4, 0), (1e-4, "squared L2", 0, 0),
    ):  # fmt: skip
        loaded = PeerEvaluator(tiny_source.net, images, correct, Linf(eps), distance)  # type: ignore[arg-type]
        result = loaded.evaluate(x_adv, 1.0, None)
        assert result.wrong.all()
        assert int((~result.broken).sum()) == left
        assert int(result.outside.sum()) == outside
        theirs, ours = loaded.distances(result, result)
        assert theirs == ours
        assert (theirs is None) == (distance is None)
    out_of_range = loaded.evaluate(x_adv + 2, 1.0, None)
    assert out_of_range.outside.all()
    assert not out_of_range.broken.any()


def test_black_images_of_failed_foolbox_attacks_become_clean_images(libraries: None) -> None:
    setup = PeerSetup(BrightnessNet().eval(), Linf(0.1), 0.02, classes=2)
    x, y = torch.rand(3, 1, 4, 4), torch.zeros(3, dtype=torch.int64)
    craft = peer_adapters._by_foolbox(
        setup, lambda model, x, y, epsilons: (x, torch.zeros_like(x)), None
    )
    assert torch.equal(craft(x, y, 2), x)


def test_seeded_repeats_draws_and_restores_the_global_generator() -> None:
    before = torch.get_rng_state()
    draws = []
    for _ in range(2):
        with seeded(CPU):
            draws.append(torch.rand(3))
    assert torch.equal(*draws)
    assert torch.equal(torch.get_rng_state(), before)


def peer_row(by: str, **changes: object) -> dict[str, Any]:
    return {
        "attack": "fab", "by": by, "right": 10, "seconds": 2.0, "ready_s": None, "times_ours": 2.0,
        "largest": 0.2, "outside": 0, "differ": 0, "distance": 0.1, "distance_ours": 0.1,
    } | changes  # fmt: skip


def test_the_report_names_attacks_of_ours_that_are_weaker() -> None:
    same = {"lines": [peer_row(OURS), peer_row("foolbox")], "missing": ["gone"], "notes": ["note"]}
    assert weaker(same) == []
    verdict, *rest = sentences(same)
    assert verdict.startswith("none of our attacks leaves more than 1 more image correct")
    assert rest == ["gone", "note"]
    worse = {"lines": [peer_row(OURS, right=12), peer_row("foolbox", distance_ours=0.11)]}
    assert weaker(worse) == [
        "fab leaves 2 more images correct than foolbox's",
        "fab needs changes 10.0% larger than foolbox's",
    ]
    assert cells(peer_row(OURS, ready_s=1.0, outside=3)) == (
        "fab", OURS, "10", "", "2.0", "1.0", "", "0.2000, 3 outside", "0.1000", "",
    )  # fmt: skip


def test_a_plain_copy_has_the_same_output_with_torch_convolutions(tiny_net: RejectingNet) -> None:
    plain = plain_copy(tiny_net)
    kinds = {type(module) for module in plain.modules() if isinstance(module, torch.nn.Conv2d)}
    assert kinds == {torch.nn.Conv2d}
    assert {type(m) for m in tiny_net.modules() if isinstance(m, torch.nn.Conv2d)} != kinds
    x = torch.rand(5, *tiny_net.domain.shape)
    for ours, theirs in zip(tiny_net(x), plain(x), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert not any(parameter.requires_grad for parameter in plain.parameters())
