"""RejectAutoAttack on slow models: chosen attacks, a budget of queries, and the time left."""

import re

import pytest
import torch
from torch import Tensor

from demur import AcceptedError, BadInput, Con, Linf, RejectAutoAttack
from demur.attacks import (
    PGD,
    Attack,
    AutoAttackEnsemble,
    MultiTarget,
    RejectAutoAttackEnsemble,
    Square,
)
from demur.attacks.margins import cost, within
from demur.recipes import attack as attack_named
from demur.recipes import recipe
from tests.quick_net import QuickNet

BALL, RULE = Linf(0.1), AcceptedError(Con(), 0.3)


def ensemble(**fields: object) -> RejectAutoAttackEnsemble:
    return RejectAutoAttackEnsemble(BALL, RULE, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("most", [1, 100, 150, 350, 777, 2000, 4000, 10**6])
def test_the_attacks_fit_into_the_budget_in_their_order(most: int) -> None:
    full = ensemble().members()
    members = ensemble(most_queries=most).members()
    assert sum(map(cost, members.values())) <= most
    assert [name for name in full if name in members] == list(members)
    if most >= sum(map(cost, full.values())):
        assert members == full
    # nothing that fits is left out, except where one more target or pass would be too much
    assert all(cost(members[name]) <= cost(full[name]) for name in members)
    assert ("product" in members) == (most >= 100)


def test_an_attack_that_fits_in_part_has_fewer_targets_or_passes() -> None:
    members = ensemble(most_queries=650).members()
    targeted = members["product-t"]
    assert isinstance(targeted, MultiTarget)
    assert targeted.targets == 3  # 650 - 100 - 200 for the first two
    square = ensemble(attacks_to_run=("square",), most_queries=100).members()["square"]
    assert isinstance(square, Square)
    assert square.queries == 300


def test_a_budget_that_nothing_fits_into_says_what_is_needed() -> None:
    with pytest.raises(BadInput, match="as few as 99 queries; give at least 100"):
        ensemble(version="fast", most_queries=99).members()
    with pytest.raises(BadInput, match="most_queries must be a whole number of at least 1"):
        ensemble(most_queries=0)


def test_attacks_of_every_version_run_by_name_in_the_given_order() -> None:
    chosen = ensemble(attacks_to_run=("square", "rays", "product"))
    assert list(chosen.members()) == ["square", "rays", "product"]
    assert len(chosen.chain().attacks) == 3
    assert list(ensemble(version="rand", attacks_to_run=("eot-t",)).members()) == ["eot-t"]
    with pytest.raises(BadInput, match="has no attack 'sqare'; did you mean square"):
        ensemble(attacks_to_run=("sqare",)).members()
    text = 'reject-autoattack:attacks_to_run=("product","square"),most_queries=300'
    named = attack_named(text, recipe("digits-pgdat-rr"))
    assert isinstance(named, RejectAutoAttackEnsemble)
    assert list(named.members()) == ["product", "square"]
    single = attack_named("reject-autoattack:attacks_to_run=square", recipe("digits-pgdat-rr"))
    assert isinstance(single, RejectAutoAttackEnsemble)
    assert list(single.members()) == ["square"]


def test_members_cost_about_what_they_are_said_to_cost(quick_net: QuickNet) -> None:
    x, passes = torch.rand(2, 1, 8, 8), [0]

    def counted(images: Tensor) -> object:
        passes[0] += 1
        return quick_net(images)

    y = quick_net(x).logits.argmax(1)  # robust in so small a ball, so that nothing leaves
    small = RejectAutoAttackEnsemble(Linf(1e-6), RULE)
    for name in ("balanced", "closest"):
        member, passes[0] = small.members()[name], 0
        member(counted, x, y)  # type: ignore[arg-type]
        # FAB has a forward pass besides each gradient
        assert 0.7 < passes[0] / cost(member) < 2.1, name


def test_costs_of_other_attacks_are_counted() -> None:
    assert cost(PGD(BALL, steps=7, restarts=3)) == 21
    assert cost(MultiTarget(PGD(BALL, steps=7), targets=4, restarts=2)) == 56
    assert cost(Square(BALL, queries=300)) == 100
    both: dict[str, Attack] = {"a": PGD(BALL, steps=7)}
    assert within(both, None) is both


def test_names_of_the_result_say_that_only_some_attacks_ran(
    quick_net: QuickNet, batch: tuple[Tensor, Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    attack = RejectAutoAttack(
        quick_net, RULE, eps=0.05, attacks_to_run=["product", "square"], most_queries=200
    )
    result = attack.evaluate(*batch, sanity=False)
    assert result.attack == "RejectAutoAttack (product, square alone), Linf(0.05)"
    assert list(result.seconds) == ["product", "square"]
    printed = capsys.readouterr().out
    assert re.search(r"after product: .* \(\d+\.\d s; at most about \d+ s left\)", printed)
    assert re.search(r"after square: .* \(\d+\.\d s\)", printed)
    with pytest.raises(BadInput, match="has no attack 'apgd'"):
        RejectAutoAttack(quick_net, RULE, attacks_to_run="apgd")
    assert RejectAutoAttack(quick_net, RULE).title == "RejectAutoAttack"


def test_autoattack_is_what_it_was() -> None:
    assert list(AutoAttackEnsemble(BALL).members()) == ["apgd-ce", "apgd-t", "fab-t", "square"]
