"""The interface that AutoAttack's users know: as strong, resumable, and it warns."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from demur.attacks import APGD, FAB, PGD, AcceptedError, Chain, Square
from demur.attacks.batch import AttackBatch
from demur.autoattack import AutoAttack as DropIn
from demur.autoattack import RejectAutoAttack as RejectDropIn
from demur.balls import Linf
from demur.data import Images
from demur.errors import BadInput
from demur.gradient import Model
from demur.nets import RejectingNet
from demur.output import Output, as_output, prediction
from demur.rejectors import Con, ModelScore
from demur.wrappers import ModelWithScore

SMALL = (APGD(Linf(0.1), steps=8), FAB(Linf(0.1), steps=5), Square(Linf(0.1), queries=30))


def victims(net: RejectingNet, images: Images, count: int) -> AttackBatch:
    x, y = images.batch(slice(0, count))
    return AttackBatch(net, x, y, images.index[:count], None)


class TestDropIn:
    names = ("apgd-ce", "fab")

    def quick(self, net: RejectingNet) -> DropIn:
        made = DropIn(
            net, norm="Linf", eps=0.1, version="custom", attacks_to_run=self.names, verbose=False,
                    )  # fmt: skip
        made.chain = Chain(SMALL)
        made.names = ["apgd-ce", "fab", "square"]
        return made

    def test_equals_the_spec_whatever_the_batch_size(
        self, tiny_net: RejectingNet, test_images: Images
    ) -> None:
        on = victims(tiny_net, test_images, 60)
        on = replace(on, index=torch.arange(60))
        whole = Chain(SMALL).run(on, 0)
        for bs in (7, 60, 250):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = self.quick(tiny_net).run_standard_evaluation(on.x, on.y, bs=bs)
            assert isinstance(found, Tensor)
            assert torch.allclose(found, whole, atol=1e-5)

    def test_tells_what_holds_after_each_member(
        self, tiny_net: RejectingNet, test_images: Images, capsys: pytest.CaptureFixture[str]
    ) -> None:
        x, y = test_images.batch(slice(0, 40))
        made = self.quick(tiny_net)
        made.verbose = True
        x_adv, labels = made.run_standard_evaluation(x, y, bs=16, return_labels=True)
        assert torch.equal(labels, prediction(tiny_net(x_adv)))
        told = capsys.readouterr().out
        held = 100 * float((labels == y).float().mean())
        assert f"after square: {held:.2f}% of 40 images hold" in told

    def test_goes_on_where_it_was_stopped(
        self, tiny_net: RejectingNet, test_images: Images, tmp_path: Path
    ) -> None:
        x, y = test_images.batch(slice(0, 40))
        whole = self.quick(tiny_net).run_standard_evaluation(x, y, bs=10)
        stopped = self.quick(tiny_net)
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
        again = self.quick(tiny_net)
        object.__setattr__(first := replace(SMALL[0]), "run", fail)  # must not run again
        again.chain = replace(again.chain, attacks=(first, *SMALL[1:]))
        found = again.run_standard_evaluation(x, y, bs=10, state_path=state)
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(whole))

    def test_refuses_the_state_of_something_else(
        self, tiny_net: RejectingNet, test_images: Images, tmp_path: Path
    ) -> None:
        x, y = test_images.batch(slice(0, 20))
        state = tmp_path / "state"
        self.quick(tiny_net).run_standard_evaluation(x, y, state_path=state)
        with pytest.raises(BadInput, match="another model, other images"):
            self.quick(tiny_net).run_standard_evaluation(x.flip(0), y, state_path=state)
        state.write_bytes(b"nonsense")
        with pytest.raises(BadInput, match="is not a state"):
            self.quick(tiny_net).run_standard_evaluation(x, y, state_path=state)

    def test_a_model_is_known_by_its_answers_too(
        self, tiny_net: RejectingNet, test_images: Images, tmp_path: Path
    ) -> None:
        x, y = test_images.batch(slice(0, 8))
        rule = AcceptedError(ModelScore(), 0.5)

        def run(score: Callable[[Tensor], Tensor]) -> None:
            made = RejectDropIn(ModelWithScore(tiny_net, score), rule, eps=0.1, verbose=False)
            made.chain = Chain((PGD(Linf(0.1), steps=2),), rule)
            made.run_standard_evaluation(x, y, state_path=tmp_path / "state")

        run(lambda images: images.flatten(1).mean(1))
        run(lambda images: images.flatten(1).mean(1))
        with pytest.raises(BadInput, match="another model"):
            run(lambda images: images.flatten(1).amax(1))

    def test_one_member_may_be_named_without_a_list(self, tiny_net: RejectingNet) -> None:
        made = DropIn(tiny_net, version="custom", attacks_to_run="apgd-ce")
        assert made.chain.attacks == (APGD(Linf(8 / 255), restarts=5),)  # as the original has it

    def test_wrong_words_are_answered(self, tiny_net: RejectingNet) -> None:
        wrong: list[tuple[Callable[[], object], str]] = [
            (lambda: DropIn(tiny_net, norm="L1"), "Linf or L2"),
            (lambda: DropIn(tiny_net, version="standart"), "did you mean standard"),
            (lambda: DropIn(tiny_net, version="custom"), "name some of its members"),
            (lambda: DropIn(tiny_net, attacks_to_run=["fab"]), "goes with version='custom'"),
            (lambda: DropIn(tiny_net, version="custom", attacks_to_run=["fap"]), "has no 'fap'"),
            (
                lambda: RejectDropIn(tiny_net, AcceptedError(Con(), 0.5), version="plus"),
                "standard or fast",
            ),
        ]
        for made, words in wrong:
            with pytest.raises(BadInput, match=words):
                made()
        with pytest.raises(BadInput, match="at least 1"):
            self.quick(tiny_net).run_standard_evaluation(
                torch.rand(2, 1, 8, 8), torch.zeros(2, dtype=torch.long), bs=0
            )


class TestWarnings:
    def warned(self, model: Model, images: Images) -> str:
        x, y = images.batch(slice(0, 16))
        made = DropIn(
            model,
            eps=0.1,
            version="custom",
            attacks_to_run=["square"],
            verbose=False,
        )
        made.chain = Chain((Square(Linf(0.1), queries=2),))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made.run_standard_evaluation(x, y)
        return " ".join(str(each.message) for each in caught)

    def test_an_ordinary_net_gets_none(self, tiny_net: RejectingNet, test_images: Images) -> None:
        assert self.warned(tiny_net, test_images) == ""

    def test_what_spoils_an_attack_is_named(
        self, tiny_net: RejectingNet, test_images: Images
    ) -> None:
        def at_random(x: Tensor) -> Tensor:
            logits = as_output(tiny_net(x)).logits
            return logits + 0.1 * torch.rand_like(logits)

        def softmax(x: Tensor) -> Tensor:
            return as_output(tiny_net(x)).logits.softmax(-1)

        def saturated(x: Tensor) -> Tensor:
            return 1e6 * as_output(tiny_net(x)).logits

        assert "version='rand'" in self.warned(at_random, test_images)
        assert "probabilities" in self.warned(softmax, test_images)
        assert "gradient is zero" in self.warned(saturated, test_images)

    def test_a_score_without_a_slope_is_named(
        self, tiny_net: RejectingNet, test_images: Images
    ) -> None:
        x, y = test_images.batch(slice(0, 16))

        def stairs(images: Tensor) -> Tensor:
            return (20 * images.flatten(1).mean(1)).round() / 20

        def gradient_only(images: Tensor) -> Tensor:
            return images.flatten(1).mean(1)

        rule, chain = (
            AcceptedError(ModelScore(), 0.3),
            Chain((PGD(Linf(0.1), steps=1),), AcceptedError(ModelScore(), 0.3)),
        )
        for surrogate, words in ((None, "surrogate"), (gradient_only, "")):
            made = RejectDropIn(ModelWithScore(tiny_net, stairs, surrogate), rule, verbose=False)
            made.chain = chain
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                made.run_standard_evaluation(x, y)
            assert words in " ".join(str(each.message) for each in caught)
            assert bool(caught) == bool(words)

    def test_squares_that_beat_gradients_are_named(
        self, tiny_net: RejectingNet, test_images: Images
    ) -> None:
        x, y = test_images.batch(slice(0, 40))
        made = DropIn(tiny_net, eps=0.2, verbose=False)
        made.chain = Chain((PGD(Linf(0.0), steps=1), Square(Linf(0.2), queries=60)))
        made.names = ["apgd-ce", "square"]
        with pytest.warns(UserWarning, match="no gradient broke"):
            made.run_standard_evaluation(x, y)


def test_it_is_not_weaker_than_a_peers(tiny_net: RejectingNet, test_images: Images) -> None:
    peer = pytest.importorskip("pyautoattack")
    x, y = test_images.batch(slice(0, 40))
    theirs, _ = peer.AutoAttack(
        tiny_net.classifier().eval(), attacks=["apgd-ce"], version="custom", eps=0.1,
        seed=0,
    ).run_standard_evaluation(x, y, batch_size=40)  # fmt: skip
    ours = DropIn(
        tiny_net, eps=0.1, version="custom", attacks_to_run=["apgd-ce"], verbose=False
    ).run_standard_evaluation(x, y)
    assert isinstance(ours, Tensor)
    held = [int((prediction(tiny_net(found)) == y).sum()) for found in (ours, theirs)]
    assert held[0] <= held[1] + 1
    assert held[0] < 35


def test_output_models_and_logits_are_alike(tiny_net: RejectingNet, test_images: Images) -> None:
    x, y = test_images.batch(slice(0, 20))
    logits = tiny_net.classifier().eval()
    assert isinstance(tiny_net(x), Output)
    found = [
        DropIn(
            model, eps=0.1, version="custom", attacks_to_run=["apgd-ce"], verbose=False
        ).run_standard_evaluation(x, y)
        for model in (tiny_net, logits)
    ]
    assert torch.equal(torch.as_tensor(found[0]), torch.as_tensor(found[1]))
