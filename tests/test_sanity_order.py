"""Sanity checks: the order of attacks by strength, and attacks that violate it."""

import pytest

from demur.attacks import (
    APGD,
    CW,
    FAB,
    PGD,
    AcceptedError,
    Attack,
    AutoAttackEnsemble,
    Chain,
    Clean,
    MultiTarget,
    RejectAutoAttackEnsemble,
    Square,
    TargetedMargin,
    XiObjective,
)
from demur.attacks.balls import L2, Linf
from demur.calibrate import TPR
from demur.rejectors import RCon
from demur.sanity.comparisons import BEATEN, weaker, weaker_against
from demur.sanity.evidence import targeted_rules
from tests.test_sanity import (
    ADAPTIVE,
    BOUND,
    EPS,
    NO_THRESHOLDS,
    PLAIN,
    clean,
    kinds,
    made,
    the_flag,
)


def test_fewer_steps_that_break_more_are_flagged() -> None:
    long = PGD(Linf(EPS), steps=100, step_size=0.04)
    flag = the_flag(BEATEN, made(PLAIN, 120, label="pgd-20"), made(long, 100, label="pgd-100"),
                    evaluation=NO_THRESHOLDS)  # fmt: skip
    assert flag.attacks == ("pgd-20", "pgd-100")
    assert "pgd-20 leaves 40.0% of 200 images correct" in flag.observed
    assert "50.0%: 20 by the weaker only, 0 by the stronger only" in flag.observed


def test_an_insignificant_difference_is_not_flagged() -> None:
    long = PGD(Linf(EPS), steps=100, step_size=0.04)
    assert kinds(made(PLAIN, 106), made(long, 100), evaluation=NO_THRESHOLDS) == []
    assert BEATEN in kinds(made(PLAIN, 107), made(long, 100), evaluation=NO_THRESHOLDS)
    assert kinds(made(PLAIN, 100), made(long, 120), evaluation=NO_THRESHOLDS) == []
    other = PGD(Linf(EPS), steps=100, step_size=0.01)
    assert kinds(made(PLAIN, 120), made(other, 100), evaluation=NO_THRESHOLDS) == [], "another step"


def test_an_adaptive_attack_with_fewer_accepted_errors_than_plain_pgd_is_flagged() -> None:
    weak = made(ADAPTIVE, 100, trusted=50, label="adaptive", thresholds=BOUND)
    flag = the_flag(BEATEN, made(PLAIN, 100, trusted=80, label="pgd-20"), weak)
    assert "pgd-20 causes accepted errors of R-Con on 80 of 200 images" in flag.observed
    assert "but adaptive, which should be stronger, on 50" in flag.observed
    assert "worst case for R-Con" in flag.remedy


def test_an_adaptive_attack_is_compared_by_its_own_rejector_only() -> None:
    plain = made(PLAIN, 100, trusted=80)
    assert kinds(plain, made(ADAPTIVE, 90, trusted=80, thresholds=BOUND)) == [], (
        "more correct, as many accepted errors"
    )
    assert kinds(plain, made(ADAPTIVE, 100, trusted=76, thresholds=BOUND)) == [], (
        "an insignificant difference"
    )
    longer = PGD(Linf(EPS), steps=51)
    assert (
        kinds(made(longer, 100, trusted=80), made(ADAPTIVE, 100, trusted=50, thresholds=BOUND))
        == []
    )
    elsewhere = {"AcceptedError(RCon(), TPR(0.95))": 0.9}
    assert kinds(plain, made(ADAPTIVE, 100, trusted=50, thresholds=elsewhere)) == [], (
        "another threshold"
    )


def test_more_steps_with_fewer_accepted_errors_are_flagged_once() -> None:
    long = PGD(Linf(EPS), steps=100, step_size=0.04)
    flag = the_flag(BEATEN, made(PLAIN, 100, label="pgd-20"),
                    made(long, 100, margin=0.0, trusted=20, label="pgd-100"))  # fmt: skip
    assert "pgd-20 causes accepted errors of Con on 100 of 200 images" in flag.observed
    assert "the same with R-Con" in flag.observed


def test_more_errors_on_clean_than_on_attacked_images_are_flagged() -> None:
    assert BEATEN in kinds(clean(20), made(PLAIN, 0, margin=1.0))
    assert BEATEN not in kinds(clean(20), made(PLAIN, 16, margin=1.0))
    assert BEATEN not in kinds(
        clean(20), made(PGD(Linf(EPS), objective=XiObjective()), 0, margin=1.0)
    )


def test_records_of_other_images_are_compared_where_they_overlap() -> None:
    long = PGD(Linf(EPS), steps=100, step_size=0.04)
    few = made(long, 0, n=30)
    flag = the_flag(BEATEN, made(PLAIN, 120), few, evaluation=NO_THRESHOLDS)
    assert "leaves 0.0% of 30 images correct" in flag.observed
    few.arrays["index"] += 500
    assert kinds(made(PLAIN, 120), few, evaluation=NO_THRESHOLDS) == []
    elsewhere = made(PGD(Linf(EPS / 2)), 100)
    elsewhere.arrays["index"] += 500
    assert kinds(clean(), made(PLAIN, 120), elsewhere) == []


BALL = Linf(EPS)
ORDER: list[tuple[Attack, Attack, bool]] = [
    (Clean(), PLAIN, True),
    (PLAIN, Clean(), False),
    (PLAIN, PLAIN, False),
    (PGD(BALL, restarts=2), PGD(BALL, restarts=5), True),
    (PGD(BALL, restarts=5), PGD(BALL, restarts=2), False),
    (PGD(BALL, restarts=5), PGD(BALL, steps=20), False),
    (PGD(BALL), PGD(BALL, keep="success"), True),
    (PGD(BALL, seed=1), PGD(BALL, steps=20), True),
    (PGD(BALL), PGD(Linf(0.2), steps=20), False),
    (PGD(BALL), PGD(L2(EPS), steps=20), False),
    (Square(BALL, queries=10), Square(BALL), True),
    (MultiTarget(PGD(BALL), targets=2), MultiTarget(PGD(BALL)), True),
    (MultiTarget(PGD(BALL)), MultiTarget(PGD(BALL), targets=2), False),
    (MultiTarget(PGD(BALL)), MultiTarget(PGD(BALL, steps=20)), True),
    (PGD(BALL, steps=100), AutoAttackEnsemble(BALL), True),
    (APGD(BALL), AutoAttackEnsemble(BALL), True),
    (APGD(BALL), Chain((APGD(BALL), PLAIN)), True),
    (PGD(BALL, steps=5000), AutoAttackEnsemble(BALL), False),
    (AutoAttackEnsemble(BALL), PGD(BALL, steps=100), False),
    (PGD(BALL), APGD(BALL), False),
]


@pytest.mark.parametrize(("one", "other", "expected"), ORDER)
def test_the_order_of_attacks(one: Attack, other: Attack, expected: bool) -> None:
    assert weaker(one, other) == expected


def test_the_rejector_that_an_attack_targets() -> None:
    ensemble = RejectAutoAttackEnsemble(BALL, AcceptedError(RCon(), TPR(0.95)))
    targeting: list[Attack] = [
        ADAPTIVE,
        ensemble,
        Chain((PLAIN,), criterion=AcceptedError(RCon(), 0.5)),
    ]
    for attack in targeting:
        assert {part.rejector for part in targeted_rules(attack)} == {RCon()}
        assert not attack.seeks_misclassification
        assert weaker_against(Clean(), attack)
    assert ensemble.gradient_queries > ADAPTIVE.gradient_queries == 50
    assert weaker_against(PLAIN, ensemble)
    each = MultiTarget(PGD(BALL, objective=TargetedMargin()))
    wrong: list[Attack] = [PLAIN, AutoAttackEnsemble(BALL), FAB(BALL), CW(), each]
    for attack in wrong:
        assert attack.seeks_misclassification
        assert not targeted_rules(attack)
