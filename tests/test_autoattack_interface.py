"""AutoAttack's Python interface: strength, resumption, messages and warnings."""

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import Tensor

from demur.attacks import APGD, FAB, PGD, AcceptedError, Attack, Chain, Clean, Square
from demur.attacks.attack import AttackBatch
from demur.attacks.attack_model import Model, attack_model
from demur.attacks.balls import Linf
from demur.attacks.wrappers import ModelWithScore
from demur.audits.ensembles import AutoAttack, RejectAutoAttack
from demur.audits.masking import OnMasking
from demur.data import Images
from demur.errors import BadInput
from demur.evaluate import LoadedRun, RecordOptions, run_attack
from demur.noise import Stream
from demur.output import Output, as_output, prediction
from demur.rejectors import Con, ModelScore
from tests.linear import LinearNet, centred_images
from tests.quick_net import QuickNet

SMALL = (APGD(Linf(0.1), steps=5), FAB(Linf(0.1), steps=2), Square(Linf(0.1), queries=15))


def attack_batch(net: QuickNet, images: Images, count: int) -> AttackBatch:
    x, y = images.batch(slice(0, count))
    return AttackBatch(attack_model(net), x, y, images.index[:count], None)


class TestInterface:
    names = ("apgd-ce", "fab")

    def short_attack(self, net: QuickNet) -> AutoAttack:
        attack = AutoAttack(
            net, norm="Linf", eps=0.1, version="custom", attacks_to_run=self.names, verbose=False,
            engine="plain",
        )  # fmt: skip
        attack.chain = Chain(SMALL)
        attack.names = ["apgd-ce", "fab", "square"]
        return attack

    def test_equals_the_chain_for_any_batch_size(
        self, quick_net: QuickNet, test_images: Images
    ) -> None:
        batch = attack_batch(quick_net, test_images, 16)
        batch = replace(batch, index=torch.arange(16))
        expected = Chain(SMALL).run(batch, 0)
        for bs in (7, 250):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = self.short_attack(quick_net).run_standard_evaluation(
                    batch.x, batch.y, bs=bs
                )
            assert isinstance(found, Tensor)
            assert torch.allclose(found, expected, atol=1e-5)

    def test_reports_robust_images_after_each_attack(
        self, quick_net: QuickNet, test_images: Images, capsys: pytest.CaptureFixture[str]
    ) -> None:
        x, y = test_images.batch(slice(0, 40))
        attack = self.short_attack(quick_net)
        attack.verbose = True
        x_adv, labels = attack.run_standard_evaluation(x, y, bs=16, return_labels=True)
        assert torch.equal(labels, prediction(quick_net(x_adv)))
        printed = capsys.readouterr().out
        robust = 100 * float((labels == y).float().mean())
        assert f"after square: {robust:.2f}% of 40 images are robust" in printed

    def test_resumes_after_an_interruption(
        self, quick_net: QuickNet, test_images: Images, tmp_path: Path
    ) -> None:
        x, y = test_images.batch(slice(0, 20))
        expected = self.short_attack(quick_net).run_standard_evaluation(x, y, bs=10)
        stopped = self.short_attack(quick_net)
        member = stopped.chain.attacks[1]

        class Stop(Exception):
            pass

        def fail(*_: object) -> Tensor:
            raise Stop

        object.__setattr__(member := replace(member), "run", fail)
        stopped.chain = replace(stopped.chain, attacks=(SMALL[0], member, SMALL[2]))
        state = tmp_path / "state"
        with pytest.raises(Stop):
            stopped.run_standard_evaluation(x, y, bs=10, state_path=state)
        assert state.exists()
        again = self.short_attack(quick_net)
        object.__setattr__(first := replace(SMALL[0]), "run", fail)  # must not run again
        again.chain = replace(again.chain, attacks=(first, *SMALL[1:]))
        found = again.run_standard_evaluation(x, y, bs=10, state_path=state)
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))

    def test_the_state_of_another_evaluation_raises(
        self, quick_net: QuickNet, test_images: Images, tmp_path: Path
    ) -> None:
        x, y = test_images.batch(slice(0, 20))
        state = tmp_path / "state"
        self.short_attack(quick_net).run_standard_evaluation(x, y, state_path=state)
        with pytest.raises(BadInput, match="another evaluation, with other images"):
            self.short_attack(quick_net).run_standard_evaluation(x.flip(0), y, state_path=state)
        other = self.short_attack(quick_net)
        other.chain = Chain(SMALL[:2])
        with pytest.raises(BadInput, match="another evaluation, with other attacks"):
            other.run_standard_evaluation(x, y, state_path=state)
        for path, message in ((tmp_path, "is a folder"), (Path("/dev/null"), "is not a state")):
            with pytest.raises(BadInput, match=message):
                self.short_attack(quick_net).run_standard_evaluation(x, y, state_path=path)

    def test_a_model_with_other_outputs_cannot_resume(
        self, quick_net: QuickNet, test_images: Images, tmp_path: Path
    ) -> None:
        x, y = test_images.batch(slice(0, 8))
        rule = AcceptedError(ModelScore(), 0.5)

        def run(score: Callable[[Tensor], Tensor]) -> None:
            attack = RejectAutoAttack(
                ModelWithScore(quick_net, score), rule, eps=0.1, verbose=False
            )
            attack.chain = Chain((PGD(Linf(0.1), steps=2),), rule)
            attack.run_standard_evaluation(x, y, state_path=tmp_path / "state")

        run(lambda images: images.flatten(1).mean(1))
        run(lambda images: images.flatten(1).mean(1))
        with pytest.raises(BadInput, match="with other weights or outputs of the model"):
            run(lambda images: images.flatten(1).amax(1))

    def test_one_attack_may_be_named_without_a_list(self, quick_net: QuickNet) -> None:
        attack = AutoAttack(quick_net, version="custom", attacks_to_run="apgd-ce")
        assert attack.chain.attacks == (APGD(Linf(8 / 255), restarts=5),)  # as in the original code

    def test_invalid_arguments_raise(self, quick_net: QuickNet) -> None:
        wrong: list[tuple[Callable[[], object], str]] = [
            (lambda: AutoAttack(quick_net, norm="L0"), "Linf, L2 or L1"),
            (lambda: AutoAttack(quick_net, version="standart"), "did you mean standard"),
            (lambda: AutoAttack(quick_net, version="custom"), "choose from apgd-ce"),
            (lambda: AutoAttack(quick_net, attacks_to_run=["fab"]), "must be used together"),
            (
                lambda: AutoAttack(quick_net, version="custom", attacks_to_run=["fap"]),
                "has no attack 'fap'",
            ),
            (
                lambda: RejectAutoAttack(quick_net, AcceptedError(Con(), 0.5), version="plus"),
                "known: black-box, fast, rand, standard",
            ),
        ]
        for construct, message in wrong:
            with pytest.raises(BadInput, match=message):
                construct()
        with pytest.raises(BadInput, match="at least 1"):
            self.short_attack(quick_net).run_standard_evaluation(
                torch.rand(2, 1, 8, 8), torch.zeros(2, dtype=torch.long), bs=0
            )


class TestState:
    """A state that is damaged, forged or stale, of a linear net whose images all fall."""

    def attack(self) -> tuple[AutoAttack, Tensor, Tensor]:
        net, x = LinearNet(0).eval(), centred_images(12)
        attack = AutoAttack(net, eps=0.3, verbose=False)
        attack.chain, attack.names = Chain((PGD(Linf(0.3), steps=4),)), ["pgd"]
        return attack, x, prediction(net(x))

    def written(self, path: Path) -> bytes:
        attack, x, y = self.attack()
        attack.run_standard_evaluation(x, y, state_path=path)
        return path.read_bytes()

    def resumed(self, path: Path, content: bytes) -> Tensor:
        attack, x, y = self.attack()
        path.write_bytes(content)
        return torch.as_tensor(attack.run_standard_evaluation(x, y, state_path=path))

    def test_no_damage_is_accepted_and_nothing_is_overwritten(self, tmp_path: Path) -> None:
        path = tmp_path / "state"
        content, g = self.written(path), torch.Generator().manual_seed(0)
        places = torch.randint(len(content), (100,), generator=g).tolist()
        flipped = [
            content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :] for at in places
        ]
        for damaged in (*flipped, content[:-1], content + b"\0", content[:100], b"", b"nonsense"):
            with pytest.raises(BadInput, match="is not a state of an evaluation or is damaged"):
                self.resumed(path, damaged)
            assert path.read_bytes() == damaged

    def forged(self, content: bytes, **changes: Callable[[Tensor], Tensor]) -> bytes:
        """The state with other tensors and a right digest."""
        tensors = tensors_of(content[:-32])
        for name, change in changes.items():
            tensors[name] = change(tensors[name])
        changed = bytes_of(tensors)
        return changed + hashlib.sha256(changed).digest()

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("x_adv", lambda x_adv: x_adv.round()),
            ("x_adv", lambda x_adv: x_adv - 2),
            ("x_adv", lambda x_adv: x_adv * torch.nan),
            ("x_adv", lambda x_adv: x_adv[:1]),
            ("x_adv", lambda x_adv: x_adv.half()),
            ("broken_by", lambda broken_by: broken_by + 7),
            ("tried", lambda tried: tried - 9),
        ],
    )
    def test_impossible_progress_is_refused(
        self, tmp_path: Path, name: str, change: Callable[[Tensor], Tensor]
    ) -> None:
        path = tmp_path / "state"
        forged = self.forged(self.written(path), **{name: change})
        with pytest.raises(BadInput, match="is not a state of an evaluation or is damaged"):
            self.resumed(path, forged)
        assert path.read_bytes() == forged

    def test_successes_that_the_model_does_not_confirm_are_attacked_again(
        self, tmp_path: Path
    ) -> None:
        attack, x, y = self.attack()
        path = tmp_path / "state"
        content = self.written(path)
        expected = torch.as_tensor(attack.run_standard_evaluation(x, y))
        assert (prediction(as_output(attack.model(expected))) != y).any()
        found = self.resumed(path, self.forged(content, x_adv=lambda _: x.clone()))
        assert torch.equal(found, expected)


class TestWarnings:
    def warnings_of(self, model: Model, images: Images) -> str:
        x, y = images.batch(slice(0, 16))
        attack = AutoAttack(
            model, eps=0.1, version="custom", attacks_to_run=["square"], verbose=False
        )
        attack.chain = Chain((Square(Linf(0.1), queries=2),))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            attack.run_standard_evaluation(x, y)
        return " ".join(str(warning.message) for warning in caught)

    def test_an_ordinary_net_gives_no_warning(
        self, quick_net: QuickNet, test_images: Images
    ) -> None:
        assert self.warnings_of(quick_net, test_images) == ""

    def test_random_softmax_and_saturated_outputs_are_reported(
        self, quick_net: QuickNet, test_images: Images
    ) -> None:
        def randomised(x: Tensor) -> Tensor:
            logits = as_output(quick_net(x)).logits
            return logits + 0.1 * torch.rand_like(logits)

        def softmax(x: Tensor) -> Tensor:
            return as_output(quick_net(x)).logits.softmax(-1)

        def saturated(x: Tensor) -> Tensor:
            return 1e6 * as_output(quick_net(x)).logits

        assert "version='rand'" in self.warnings_of(randomised, test_images)
        assert self.warnings_of(softmax, test_images) == "", "attacked by their logarithms"
        assert "gradient is zero" in self.warnings_of(saturated, test_images)

    def test_a_score_without_a_gradient_is_reported(
        self, quick_net: QuickNet, test_images: Images
    ) -> None:
        x, y = test_images.batch(slice(0, 16))

        def stairs(images: Tensor) -> Tensor:
            return (20 * images.flatten(1).mean(1)).round() / 20

        def mean_pixel(images: Tensor) -> Tensor:
            return images.flatten(1).mean(1)

        rule, chain = (
            AcceptedError(ModelScore(), 0.3),
            Chain((PGD(Linf(0.1), steps=1),), AcceptedError(ModelScore(), 0.3)),
        )
        for surrogate, message in ((None, "surrogate"), (mean_pixel, "")):
            attack = RejectAutoAttack(
                ModelWithScore(quick_net, stairs, surrogate), rule, verbose=False
            )
            attack.chain, attack.on_masking = chain, OnMasking(chain)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                attack.run_standard_evaluation(x, y)
            assert message in " ".join(str(warning.message) for warning in caught)
            assert bool(caught) == bool(message)

    @pytest.mark.parametrize(("count", "warns"), [(1, False), (2, True)])
    def test_square_beating_gradient_attacks_is_reported(
        self, count: int, warns: bool, quick_net: QuickNet, test_images: Images
    ) -> None:
        """One image is no sign of masked gradients: sound nets have it too."""
        x, _ = test_images.batch(slice(0, 40))
        y = quick_net(x).logits.argmax(1)
        attack = AutoAttack(quick_net, eps=1.0, verbose=False)
        attack.chain = Chain((PGD(Linf(0.0), steps=1), ExchangeImages(Linf(1.0), count)))
        attack.names, attack.on_masking = ["apgd-ce", "square"], OnMasking(attack.chain)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            labels = attack.run_standard_evaluation(x, y, return_labels=True)[1]
        assert int((labels != y).sum()) == count
        found = [str(one.message) for one in caught]
        assert any("Square succeeded on 2 of 40 images" in text for text in found) == warns


@dataclass(frozen=True)
class ExchangeImages(Attack):
    """Exchange the first images for images of other classes."""

    ball: Linf
    count: int

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        x_adv = batch.x.clone()
        for row in range(self.count):
            x_adv[row] = batch.x[(batch.y != batch.y[row]).nonzero()[0, 0]]
        return x_adv


def test_a_run_with_other_pixels_or_pixels_above_one_is_refused(
    own_source: LoadedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_source.splits["test"] = replace(own_source.splits["test"], levels=1)
    attack, options = PGD(Linf(0.1), steps=1), RecordOptions(n=8)
    with pytest.raises(BadInput, match="not those that own was trained with"):
        run_attack(own_source, "pgd", attack, options)
    monkeypatch.setattr(own_source, "checked_split", own_source.splits.__getitem__)
    with pytest.raises(BadInput, match=r"pixels must lie in \[0, 1\]"):
        run_attack(own_source, "pgd", attack, options)


def test_a_run_whose_net_returns_nan_is_refused(own_source: LoadedRun) -> None:
    run_attack(own_source, "clean", Clean(), RecordOptions(n=8))
    with torch.no_grad():
        next(own_source.net.parameters()).fill_(torch.nan)
    for attack in (PGD(Linf(0.1), steps=1), Clean()):
        with pytest.raises(BadInput, match="not a number for 7 of 7 images"):
            run_attack(own_source, "lost", attack, RecordOptions(n=7))


def test_is_not_weaker_than_pyautoattack(quick_net: QuickNet, test_images: Images) -> None:
    peer = pytest.importorskip("pyautoattack")
    x, y = test_images.batch(slice(0, 20))
    other = peer.AutoAttack(
        quick_net.classifier().eval(), attacks=["apgd-ce"], version="custom", eps=0.1,
        seed=0,
    )  # fmt: skip
    attack = AutoAttack(
        quick_net, eps=0.1, version="custom", attacks_to_run=["apgd-ce"], verbose=False
    )
    (member,) = attack.chain.attacks
    assert isinstance(member, APGD)
    assert (member.steps, member.restarts) == (other.apgd.n_iter, other.apgd.n_restarts)
    attack.chain = Chain((replace(member, restarts=1),))
    other.apgd.n_restarts = 1
    theirs, _ = other.run_standard_evaluation(x, y, batch_size=20)
    ours = attack.run_standard_evaluation(x, y)
    assert isinstance(ours, Tensor)
    robust = [int((prediction(quick_net(found)) == y).sum()) for found in (ours, theirs)]
    assert robust[0] <= robust[1] + 1
    assert robust[0] < 18


def test_models_that_return_outputs_or_logits_give_equal_results(
    quick_net: QuickNet, test_images: Images
) -> None:
    x, y = test_images.batch(slice(0, 6))
    logits = quick_net.classifier().eval()
    assert isinstance(quick_net(x), Output)
    found = []
    for model in (quick_net, logits):
        attack = AutoAttack(model, eps=0.1, verbose=False, engine="plain")
        attack.chain, attack.names = Chain(SMALL), ["apgd-ce", "fab", "square"]
        found.append(torch.as_tensor(attack.run_standard_evaluation(x, y)))
    assert torch.equal(*found)
