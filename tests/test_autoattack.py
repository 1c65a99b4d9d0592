"""Chains of attacks and the versions of AutoAttack."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from demur import noise
from demur.attacks import (
    APGD,
    CE,
    DLR,
    EOTPGD,
    FAB,
    PGD,
    AutoAttackEnsemble,
    Chain,
    Clean,
    MultiTarget,
    Square,
    UntargetedMargin,
)
from demur.attacks.attack import Attack, AttackBatch
from demur.attacks.attack_model import attack_model
from demur.attacks.autoattack import BROKEN_CLEAN, NOT_BROKEN, VERSIONS
from demur.attacks.balls import L2, Ball, Linf
from demur.data import Images
from demur.errors import BadInput
from demur.evaluate import LoadedRun, RecordOptions, RejectorEvaluation, run_attack
from demur.evaluate.score import summary
from demur.output import prediction
from demur.rejectors import Con
from demur.report.terminal import show_scores
from tests.linear import LinearNet, centred_images, distance
from tests.quick_net import QuickNet

SMALL: tuple[Attack, ...] = (
    APGD(Linf(0.1), steps=8),
    FAB(Linf(0.1), steps=5),
    Square(Linf(0.1), queries=30),
)


def short(attack: Any) -> Attack:
    if isinstance(attack, MultiTarget):
        return replace(attack, attack=short(attack.attack))
    return replace(attack, steps=40)  # type: ignore[no-any-return]


def attack_batch(net: QuickNet, images: Images, count: int) -> AttackBatch:
    x, y = images.batch(slice(0, count))
    return AttackBatch(attack_model(net), x, y, images.index[:count], None)


class TestChain:
    def test_is_at_least_as_strong_as_each_member(
        self, quick_net: QuickNet, test_images: Images
    ) -> None:
        batch = attack_batch(quick_net, test_images, 60)
        chained = prediction(quick_net(Chain(SMALL).run(batch, 0))) != batch.y
        for position, member in enumerate(SMALL):
            alone = member.run(
                batch, noise.derive_seed(0, position)
            )  # on all images, with its own noise
            assert chained[prediction(quick_net(alone)) != batch.y].all()
        assert chained.sum() > (prediction(quick_net(batch.x)) != batch.y).sum()

    def test_records_which_attack_succeeded_and_runs_each_once_per_image(
        self, quick_net: QuickNet, test_images: Images
    ) -> None:
        batch = attack_batch(quick_net, test_images, 60)
        chain = Chain(SMALL)
        state = chain.start(batch)
        wrong = prediction(quick_net(batch.x)) != batch.y
        assert torch.equal(state.broken_by == BROKEN_CLEAN, wrong)
        for position in range(3):
            before = state.remaining(position)
            chain.advance(position, before, batch, state, 0)
            assert not len(state.remaining(position))
            assert torch.equal(
                state.remaining(position + 1), before[state.broken_by[before] == NOT_BROKEN]
            )
        success = prediction(quick_net(state.x_adv)) != batch.y
        assert torch.equal(success, state.broken_by != NOT_BROKEN)
        assert len(set(state.broken_by.tolist())) > 2

    def test_without_success_returns_the_clean_image_or_the_best_ranked(
        self, quick_net: QuickNet, test_images: Images
    ) -> None:
        batch = attack_batch(quick_net, test_images, 60)
        weak = (PGD(Linf(0.02), steps=3),)
        robust = prediction(quick_net(Chain(weak).run(batch, 0))) == batch.y
        assert torch.equal(Chain(weak).run(batch, 0)[robust], batch.x[robust])
        ranked = Chain(weak, rank_by=UntargetedMargin()).run(batch, 0)
        rise = UntargetedMargin()(quick_net(ranked), batch.y) - UntargetedMargin()(
            quick_net(batch.x), batch.y
        )
        assert (rise[robust] >= 0).all()
        assert (rise[robust] > 0).float().mean() > 0.9

    def test_an_empty_chain_raises(self) -> None:
        with pytest.raises(BadInput, match="at least one attack"):
            Chain(())


class TestVersions:
    def test_match_the_published_versions(self) -> None:
        standard = AutoAttackEnsemble(Linf(0.1)).chain().attacks
        ce, dlr, fab, square = standard
        assert ce == APGD(Linf(0.1), steps=100, objective=CE())
        assert (dlr.targets, fab.targets) == (9, 9)  # type: ignore[attr-defined]
        assert square == Square(Linf(0.1), queries=5000)
        older = AutoAttackEnsemble(L2(0.5), version="older").chain().attacks
        assert older[1] == APGD(L2(0.5), restarts=5, objective=DLR())
        assert older[2] == FAB(L2(0.5), restarts=5)
        rand = AutoAttackEnsemble(Linf(0.1), version="rand").chain().attacks
        assert [type(part) for part in rand] == [EOTPGD] * 3
        assert len(AutoAttackEnsemble(Linf(0.1), version="plus").chain().attacks) == 6
        first, targeted, last = AutoAttackEnsemble(Linf(0.1), version="fast").chain().attacks
        assert (first, last) == (ce, Square(Linf(0.1), queries=500))
        assert (targeted.targets, targeted.parts[0].steps) == (9, 33)  # type: ignore[attr-defined]
        assert set(VERSIONS) == {"standard", "fast", "plus", "rand", "older", "black-box"}

    @pytest.mark.parametrize(("classes", "kind"), [(2, Linf), (3, L2), (4, Linf)])
    def test_with_few_classes_success_is_exactly_where_eps_exceeds_the_distance(
        self, classes: int, kind: type[Ball]
    ) -> None:
        net, x = LinearNet(3, classes), centred_images(24, 5)
        y = prediction(net(x))
        reach = distance(net, x, y, kind.__name__)
        eps = float(reach.quantile(0.5))
        chain = AutoAttackEnsemble(kind(eps)).chain()
        gradient = [short(part) for part in chain.attacks[:3]]
        quick = replace(chain, attacks=(*gradient, Square(kind(eps), queries=50)))
        success = prediction(net(quick(net, x, y))) != y
        assert success[1.01 * reach <= eps].all()
        assert not success[0.99 * reach >= eps].any()


def test_rankings_on_a_mixture_with_clean_images_are_flagged_as_artefacts(
    own_source: LoadedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = Chain((PGD(Linf(0.05), steps=3),))
    mixed, plain, clean = (
        run_attack(own_source, "mixed" if attack is chain else "plain", attack, RecordOptions(n=40))
        for attack in (chain, chain.attacks[0], Clean())
    )
    found = summary(mixed)
    unchanged = (mixed.arrays["size_linf"] == 0).numpy()
    assert found.untouched == pytest.approx((unchanged & mixed.correct).mean())
    assert 0 < found.untouched < 1
    assert "AUROC on such a mixture are artefacts" in found.artefact
    assert summary(plain).artefact == summary(clean).artefact == ""
    evaluation = RejectorEvaluation.of(own_source, rejectors={"Con": Con()}, records=[mixed])
    show_scores([evaluation.score_record(mixed)], ("paper",))
    assert found.artefact in capsys.readouterr().out
