"""Chains and AutoAttack's versions."""

from dataclasses import replace

import pytest
import torch

from demur import noise
from demur.attacks import (
    APGD,
    CE,
    DLR,
    FAB,
    PGD,
    AutoAttackEnsemble,
    Chain,
    Clean,
    LogitMargin,
    Square,
)
from demur.attacks.autoattack import VERSIONS
from demur.attacks.batch import AttackBatch
from demur.attacks.chain import NOBODY, NOTHING
from demur.balls import L2, Ball, Linf
from demur.data import Images
from demur.errors import BadInput
from demur.evaluate import AttackOptions, Evaluator, Scorer, run_attack
from demur.evaluate.score import summary
from demur.nets import RejectingNet
from demur.output import prediction
from demur.rejectors import Con
from demur.report.text import show_scores
from tests.linear import LinearNet, centred_images, distance

SMALL = (APGD(Linf(0.1), steps=8), FAB(Linf(0.1), steps=5), Square(Linf(0.1), queries=30))


def victims(net: RejectingNet, images: Images, count: int) -> AttackBatch:
    x, y = images.batch(slice(0, count))
    return AttackBatch(net, x, y, images.index[:count], None)


class TestChain:
    def test_is_at_least_as_strong_as_each_member(
        self, tiny_net: RejectingNet, test_images: Images
    ) -> None:
        on = victims(tiny_net, test_images, 60)
        chained = prediction(tiny_net(Chain(SMALL).run(on, 0))) != on.y
        for place, member in enumerate(SMALL):
            alone = member.run(on, noise.derived(0, place))  # on all images, with its own noise
            assert chained[prediction(tiny_net(alone)) != on.y].all()
        assert chained.sum() > (prediction(tiny_net(on.x)) != on.y).sum()

    def test_says_who_broke_what_and_tries_nobody_twice(
        self, tiny_net: RejectingNet, test_images: Images
    ) -> None:
        on = victims(tiny_net, test_images, 60)
        chain = Chain(SMALL)
        standing = chain.begun(on)
        wrong = prediction(tiny_net(on.x)) != on.y
        assert torch.equal(standing.broken_by == NOTHING, wrong)
        for place in range(3):
            before = standing.left(place)
            chain.advance(place, before, on, standing, 0)
            assert not len(standing.left(place))
            assert torch.equal(
                standing.left(place + 1), before[standing.broken_by[before] == NOBODY]
            )
        broken = prediction(tiny_net(standing.x_adv)) != on.y
        assert torch.equal(broken, standing.broken_by != NOBODY)
        assert len(set(standing.broken_by.tolist())) > 2

    def test_returns_the_image_itself_or_the_best_try(
        self, tiny_net: RejectingNet, test_images: Images
    ) -> None:
        on = victims(tiny_net, test_images, 60)
        weak = (PGD(Linf(0.02), steps=3),)
        whole = prediction(tiny_net(Chain(weak).run(on, 0))) == on.y
        assert torch.equal(Chain(weak).run(on, 0)[whole], on.x[whole])
        tried = Chain(weak, rank_by=LogitMargin()).run(on, 0)
        rise = LogitMargin()(tiny_net(tried), on.y) - LogitMargin()(tiny_net(on.x), on.y)
        assert (rise[whole] >= 0).all()
        assert (rise[whole] > 0).float().mean() > 0.9

    def test_an_empty_one_is_refused(self) -> None:
        with pytest.raises(BadInput, match="at least one attack"):
            Chain(())


class TestVersions:
    def test_are_what_they_are_published_as(self) -> None:
        standard = AutoAttackEnsemble(Linf(0.1)).chain().attacks
        ce, dlr, fab, square = standard
        assert ce == APGD(Linf(0.1), steps=100, objective=CE())
        assert (dlr.targets, fab.targets) == (9, 9)  # type: ignore[attr-defined]
        assert square == Square(Linf(0.1), queries=5000)
        older = AutoAttackEnsemble(L2(0.5), version="older").chain().attacks
        assert older[1] == APGD(L2(0.5), restarts=5, objective=DLR())
        assert older[2] == FAB(L2(0.5), restarts=5)
        rand = AutoAttackEnsemble(Linf(0.1), version="rand").chain().attacks
        assert [a.eot_iter for a in rand] == [20, 20]  # type: ignore[attr-defined]
        assert len(AutoAttackEnsemble(Linf(0.1), version="plus").chain().attacks) == 6
        assert set(VERSIONS) == {"standard", "plus", "rand", "older"}

    @pytest.mark.parametrize("classes", [2, 3, 4])
    @pytest.mark.parametrize("kind", [Linf, L2])
    def test_few_classes_are_broken_exactly_where_the_budget_allows(
        self, classes: int, kind: type[Ball]
    ) -> None:
        net, x = LinearNet(3, classes), centred_images(24, 5)
        y = prediction(net(x))
        reach = distance(net, x, y, kind.__name__)
        eps = float(reach.quantile(0.5))
        chain = AutoAttackEnsemble(kind(eps)).chain()
        quick = replace(chain, attacks=(*chain.attacks[:3], Square(kind(eps), queries=50)))
        broken = prediction(net(quick(net, x, y))) != y
        assert broken[1.01 * reach <= eps].all()
        assert not broken[0.99 * reach >= eps].any()


def test_rankings_of_a_mixture_with_clean_images_are_called_artefacts(
    own_source: Evaluator, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = Chain((PGD(Linf(0.05), steps=3),))
    mixed, whole, clean = (
        run_attack(own_source, "mixed" if attack is chain else "whole", attack, AttackOptions(n=40))
        for attack in (chain, chain.attacks[0], Clean())
    )
    told = summary(mixed)
    still = (mixed.arrays["size_linf"] == 0).numpy()
    assert told.untouched == pytest.approx((still & mixed.correct).mean())
    assert 0 < told.untouched < 1
    assert "AUROC on such a mixture are artefacts" in told.artefact
    assert summary(whole).artefact == summary(clean).artefact == ""
    scoring = Scorer.of(own_source, rejectors={"Con": Con()}, records=[mixed])
    show_scores([scoring.scored(mixed)], ("paper",))
    assert told.artefact in capsys.readouterr().out
