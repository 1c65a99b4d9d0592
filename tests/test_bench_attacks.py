"""Our attacks beside other libraries': every pair runs, and the judge is the same for all."""

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

from demur.attacks import CW, PGD, AutoAttackEnsemble
from demur.balls import Linf
from demur.bench import peer_adapters
from demur.bench.peer_adapters import PeerSetup, seeded
from demur.bench.peer_attacks import PeerEvaluator, compare_attacks, ground
from demur.bench.peer_pairs import PAIRS
from demur.bench.plain_copy import plain_copy
from demur.evaluate import AttackOptions, Evaluator
from demur.nets import RejectingNet
from demur.output import prediction
from demur.report.peer_attacks import COLUMNS, OURS, cells, sentences, weaker
from demur.runs import Run
from tests.conftest import Command

LIBRARIES = ("foolbox", "pyautoattack", "torchattacks")
CPU = torch.device("cpu")


@pytest.fixture
def libraries() -> None:
    for name in LIBRARIES:
        pytest.importorskip(name, reason=f"pip install {name}", exc_type=ImportError)


@pytest.fixture
def run_here(tiny_run: Run, in_empty_folder: Path) -> Path:
    return Path(shutil.copytree(tiny_run.path, in_empty_folder / "runs" / "tiny"))


def brief(evaluator: Evaluator) -> PeerSetup:
    """A ball in which images break at once, and little work."""
    cw = CW("L2", searches=2, steps=15, rate=0.05, constant=1.0)
    return replace(ground(evaluator), ball=Linf(0.5), step=0.1, steps=4, queries=20, cw=cw)


def test_every_pair_runs(libraries: None, tiny_source: Evaluator) -> None:
    images, said = tiny_source.images(AttackOptions(n=4)), list[str]()
    report = compare_attacks(tiny_source, images, PAIRS, brief(tiny_source), said.append)
    expected = [(name, by) for name, pair in PAIRS.items() for by in (OURS, *pair.peers)]
    assert [(line["attack"], line["by"]) for line in report["lines"]] == expected
    assert len(said) == len(expected)
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
    near = [line for line in report["lines"] if line["attack"] == "cw-l2"]
    assert all(line["distance"] > 0 and line["distance_ours"] > 0 for line in near)


def test_members_are_those_of_our_autoattack(tiny_source: Evaluator) -> None:
    on = ground(tiny_source)
    for name in ("apgd-ce", "apgd-dlr", "apgd-t", "fab-t", "square"):
        assert PAIRS[name].ours(on) == AutoAttackEnsemble(on.ball).member(name)


def test_as_it_comes_nothing_is_made_easier(
    tiny_source: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[dict[str, int], set[bool]]] = []

    class Theirs:
        def __init__(self, net: torch.nn.Module, **asked: object) -> None:
            self.net = net
            self.apgd = self.fab = self.apgd_targeted = self.square = SimpleNamespace()

        def run_standard_evaluation(self, x: Tensor, y: Tensor, **batches: int) -> tuple[Tensor]:
            ran.append((batches, {weight.requires_grad for weight in self.net.parameters()}))
            return (x,)

    monkeypatch.setattr(peer_adapters, "library", lambda name: SimpleNamespace(AutoAttack=Theirs))
    on, images = ground(tiny_source), tiny_source.images(AttackOptions(n=4))
    for adapter in PAIRS["autoattack"].peers.values():
        adapter(on)(*images.batch(slice(None)), 512)
    assert ran == [({"batch_size": 512}, {False}), ({}, {True})]


def test_a_missing_library_is_said_and_the_rest_goes_on(
    libraries: None, command: Command, run_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, place = importlib.import_module, "demur.bench.peer_adapters.import_module"

    def without_foolbox(name: str) -> Any:
        if name == "foolbox":
            raise ImportError(name)
        return found(name)

    monkeypatch.setattr(place, without_foolbox)
    words = ("bench", "attacks", "tiny", "--n", "6", "--only", "pgd-10", "-o", "out.json")
    code, out, err = command(*words)
    assert code == 0, err
    assert "foolbox is left out, it is not installed: pip install foolbox" in out
    report = json.loads(Path("out.json").read_text())
    assert [line["by"] for line in report["lines"]] == [OURS, "torchattacks"]
    assert (report["n"], report["run"]) == (6, "tiny")
    monkeypatch.setattr(place, lambda name: without_foolbox("foolbox"))
    code, out, err = command(*words[:-2], "--json")
    assert code == 0, err
    assert [line["by"] for line in json.loads(out)["lines"]] == [OURS]
    assert len(json.loads(out)["missing"]) == 2


def test_wrong_requests_are_refused(command: Command, run_here: Path) -> None:
    for words, sentence in (
        (("tiny", "--only", "pgd-11"), "no attack to compare is called 'pgd-11'; did you mean"),
        (("tinny",), "there is no run 'tinny'"),
        (("tiny", "--n", "0"), "asked for 0 images"),
    ):
        code, out, err = command("bench", "attacks", *words)
        assert (code, out) == (2, "")
        assert sentence in " ".join(err.split())
    assert command("bench", "attacks")[0] == 2


def test_both_benches_have_help_and_speed_need_not_be_named(command: Command) -> None:
    code, out, _ = command("bench", "attacks", "--help")
    assert code == 0
    assert "Example: demur bench attacks digits-pgdat-rr" in " ".join(out.split())
    for words in (("--help",), ("speed", "--help")):
        code, out, _ = command("bench", *words)
        assert code == 0
        assert "--check" in out
        assert "demur bench attacks RUN" in out


class Doubter(torch.nn.Module):
    """Answers 1 where an image is bright."""

    def forward(self, x: Tensor) -> Tensor:
        bright = x.mean((1, 2, 3)) - 0.5
        return torch.stack((-bright, bright), 1)


def test_what_left_the_ball_is_not_broken(tiny_source: Evaluator) -> None:
    images = tiny_source.images(AttackOptions(n=4))
    x, y = images.batch(slice(None))
    right = prediction(tiny_source.net(x)) == y
    assert right.all(), "these four are easy"
    broken = PGD(Linf(0.5), steps=10)(tiny_source.net, x, y)
    far = float((broken - x).abs().amax())
    for eps, distance, left, outside in (
        (far, None, 0, 0), (1e-4, None, 4, 4), (1e-4, "Linf", 4, 0), (1e-4, "squared L2", 0, 0),
    ):  # fmt: skip
        judge = PeerEvaluator(tiny_source.net, images, right, Linf(eps), distance)  # type: ignore[arg-type]
        made = judge.made(broken, 1.0, None)
        assert made.wrong.all()
        assert int((~made.broken).sum()) == left
        assert int(made.outside.sum()) == outside
        theirs, ours = judge.distances(made, made)
        assert theirs == ours
        assert (theirs is None) == (distance is None)
    beyond = judge.made(broken + 2, 1.0, None)
    assert beyond.outside.all()
    assert not beyond.broken.any()


def test_a_failure_that_foolbox_paints_black_is_no_success(libraries: None) -> None:
    on = PeerSetup(Doubter().eval(), Linf(0.1), 0.02, classes=2)
    x, y = torch.rand(3, 1, 4, 4), torch.zeros(3, dtype=torch.int64)
    black = peer_adapters._by_foolbox(
        on, lambda model, x, y, epsilons: (x, torch.zeros_like(x)), None
    )
    assert torch.equal(black(x, y, 2), x)


def test_other_libraries_draw_the_same_numbers_and_leave_ours() -> None:
    before = torch.get_rng_state()
    draws = []
    for _ in range(2):
        with seeded(CPU):
            draws.append(torch.rand(3))
    assert torch.equal(*draws)
    assert torch.equal(torch.get_rng_state(), before)


def line(by: str, **changes: object) -> dict[str, Any]:
    return {
        "attack": "fab", "by": by, "right": 10, "seconds": 2.0, "ready_s": None, "times_ours": 2.0,
        "largest": 0.2, "outside": 0, "differ": 0, "distance": 0.1, "distance_ours": 0.1,
    } | changes  # fmt: skip


def test_a_weaker_attack_of_ours_is_said() -> None:
    same = {"lines": [line(OURS), line("foolbox")], "missing": ["gone"], "notes": ["note"]}
    assert weaker(same) == []
    none, *rest = sentences(same)
    assert none.startswith("none of our attacks leaves more than 1 more image correct")
    assert rest == ["gone", "note"]
    worse = {"lines": [line(OURS, right=12), line("foolbox", distance_ours=0.11)]}
    assert weaker(worse) == [
        "fab leaves 2 more images correct than foolbox's",
        "fab needs changes 10.0% larger than foolbox's",
    ]
    assert cells(line(OURS, ready_s=1.0, outside=3)) == (
        "fab", OURS, "10", "", "2.0", "1.0", "", "0.2000, 3 outside", "0.1000", "",
    )  # fmt: skip


def test_a_plain_twin_answers_alike_with_none_of_our_layers(tiny_net: RejectingNet) -> None:
    twin = plain_copy(tiny_net)
    kinds = {type(module) for module in twin.modules() if isinstance(module, torch.nn.Conv2d)}
    assert kinds == {torch.nn.Conv2d}
    assert {type(m) for m in tiny_net.modules() if isinstance(m, torch.nn.Conv2d)} != kinds
    x = torch.rand(5, *tiny_net.domain.shape)
    for ours, theirs in zip(tiny_net(x), twin(x), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert not any(parameter.requires_grad for parameter in twin.parameters())
