"""Sanity checks: each raises a flag on records made for it, and none on similar ones."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from demur.attacks import (
    APGD,
    CE,
    CW,
    FAB,
    PGD,
    AcceptedError,
    Attack,
    AutoAttackEnsemble,
    Chain,
    Clean,
    MultiTarget,
    PlusLogScore,
    Square,
    TargetedMargin,
)
from demur.attacks.balls import L2, Linf
from demur.calibrate import TPR
from demur.evaluate import RejectorEvaluation
from demur.recipes import recipe
from demur.rejectors import KD, Con, RCon
from demur.runs import Record
from demur.sanity import CHECKS, Flag, run_checks
from demur.sanity.comparisons import BEATEN, LEFT, RISES, TOO_GOOD
from demur.sanity.single_records import FLAT, NOT_RISEN, RANDOM, TIED
from demur.spec import digest, show

N = 200
RECIPE = recipe("digits-pgdat-rr")
SCORER = RejectorEvaluation({"Con": Con(), "R-Con": RCon()}, {"Con": 0.6, "R-Con": 0.3}, 0.95, 100)
NO_THRESHOLDS = RejectorEvaluation({"Con": Con(), "R-Con": RCon()}, {}, 0.95, 0)
EPS = 0.15
PLAIN = PGD(Linf(EPS), steps=20, step_size=0.04)
ADAPTIVE = PGD(
    Linf(EPS),
    steps=50,
    objective=PlusLogScore(RCon()),
    keep="success",
    criterion=AcceptedError(RCon(), TPR(0.95)),
)

BOUND = {"AcceptedError(RCon(), TPR(0.95))": 0.3}  # metadata of its record


def made(
    attack: Attack,
    wrong: int,
    margin: float = 2.0,
    trusted: int = N,
    label: str = "",
    n: int = N,
    **about: Any,
) -> Record:
    """A record of n images, of which the first are misclassified and the first have a high A."""
    y = torch.zeros(n, dtype=torch.long)
    lead = margin + torch.linspace(0, 1, n)
    logits = torch.zeros(n, 3)
    logits[:, 0] = torch.where(torch.arange(n) < wrong, -lead, lead)
    logits[:, 1] = torch.where(torch.arange(n) < wrong, lead, 0)
    aux = torch.where(torch.arange(n) < trusted, 3.0, -3.0)[:, None] + lead[:, None] / 100
    none = torch.zeros(n)
    arrays = {"y": y, "index": torch.arange(n), "logits": logits, "aux": aux,
              "size_linf": none, "size_l2": none}  # fmt: skip
    metadata = {
        "label": label or show(attack), "spec": show(attack, full=True), "attack": digest(attack),
        "digest": digest(attack), "thresholds": {}, "split": "test", "features": False, "n": n,
        "recipe": show(RECIPE, full=True),
    }  # fmt: skip
    return Record(arrays, metadata | about)


def flags(records: Sequence[Record], evaluation: RejectorEvaluation) -> list[Flag]:
    return [flag for check in run_checks(records, evaluation) for flag in check.flags]


def kinds(*records: Record, evaluation: RejectorEvaluation = SCORER) -> list[str]:
    return [flag.kind for flag in flags(records, evaluation)]


def the_flag(kind: str, *records: Record, evaluation: RejectorEvaluation = SCORER) -> Flag:
    (found,) = [flag for flag in flags(records, evaluation) if flag.kind == kind]
    return found


def clean(wrong: int = 0, **about: Any) -> Record:
    return made(Clean(), wrong, margin=3.0, label="clean", **about)


# ------------------------------------------------------------------ the objective


def test_an_attack_that_does_not_raise_its_objective_is_flagged() -> None:
    flag = the_flag(NOT_RISEN, clean(), made(PLAIN, 0, margin=3.0, label="pgd-20"))
    assert flag.attacks == ("pgd-20",)
    assert "raised CE() on 0.0% of the 200 images" in flag.observed
    assert "median change is 0" in flag.observed


def test_an_attack_that_raises_it_on_more_than_half_is_not() -> None:
    assert kinds(clean(), made(PLAIN, 101)) == []
    assert kinds(clean(), made(PLAIN, 0, margin=2.9)) == [], "correct, with a smaller margin"


def test_images_broken_before_the_attack_do_not_count() -> None:
    unchanged = made(PLAIN, 150, margin=3.0)
    assert NOT_RISEN in kinds(clean(150), unchanged)
    assert NOT_RISEN not in kinds(clean(150), made(PLAIN, 180, margin=3.0)), "30 of 50 rose"
    assert NOT_RISEN not in kinds(clean(N), made(PLAIN, N, margin=3.0)), (
        "there was nothing to break"
    )


def test_attacks_that_return_unbroken_images_unchanged_are_left_out() -> None:
    ball = Linf(EPS)
    targeted = MultiTarget(FAB(ball), keep="success")
    returning_unchanged: list[Attack] = [
        FAB(ball), CW(), AutoAttackEnsemble(ball), Chain((FAB(ball), PLAIN)), targeted,
    ]  # fmt: skip
    for attack in returning_unchanged:
        assert NOT_RISEN not in kinds(clean(), made(attack, 0, margin=3.0))
    targeted = MultiTarget(PGD(ball, objective=TargetedMargin()))
    maximising: list[Attack] = [Square(ball), APGD(ball), Chain((PLAIN,), rank_by=CE()), targeted]
    for attack in maximising:
        assert NOT_RISEN in kinds(clean(), made(attack, 0, margin=3.0))


def test_an_objective_with_a_rejector_is_computed_or_replaced_by_cross_entropy() -> None:
    flag = the_flag(NOT_RISEN, clean(), made(ADAPTIVE, 0, margin=3.0))
    assert "raised PlusLogScore(RCon())" in flag.observed
    unfitted = PGD(
        Linf(EPS),
        objective=PlusLogScore(KD()),
        keep="success",
        criterion=AcceptedError(KD(), TPR(0.95)),
    )
    assert "raised CE()" in the_flag(NOT_RISEN, clean(), made(unfitted, 0, margin=3.0)).observed
    assert NOT_RISEN not in kinds(clean(), made(unfitted, 150))


# ------------------------------------------------------------------ the radius


def at_eps(eps: float, wrong: int, **about: Any) -> Record:
    attack = PGD(Linf(eps), steps=100, step_size=2 / 255)
    return made(attack, wrong, label=f"pgd-100:eps={show(eps)}", **about)


def test_accuracy_that_rises_with_eps_is_flagged() -> None:
    flag = the_flag(RISES, at_eps(32 / 255, 100), at_eps(16 / 255, 120))
    assert "40.0% of 200 images correct at eps=16/255 and 50.0% at eps=32/255" in flag.observed
    assert RISES not in kinds(at_eps(32 / 255, 114), at_eps(16 / 255, 120))
    assert RISES not in kinds(at_eps(32 / 255, 120), at_eps(16 / 255, 100))


def test_a_sweep_may_change_the_step_size() -> None:
    small = made(PGD(Linf(16 / 255), steps=100, step_size=4 / 255), 120)
    large = made(PGD(Linf(32 / 255), steps=100, step_size=8 / 255), 100)
    assert RISES in kinds(large, small)


def test_the_papers_sweep_is_not_flagged() -> None:
    accuracies = {8: 54.40, 16: 33.56, 32: 19.80, 64: 6.71, 128: 0.95}
    sweep = [at_eps(k / 255, 1000 - round(10 * a), n=1000) for k, a in accuracies.items()]
    assert kinds(made(Clean(), 180, margin=3.0, label="clean", n=1000), *sweep) == []


def test_accuracy_that_is_left_at_a_large_eps_is_flagged() -> None:
    flag = the_flag(LEFT, at_eps(128 / 255, 160))
    assert "20.0% of 200 images are still correct" in flag.observed
    assert LEFT not in kinds(at_eps(128 / 255, 185)), "15 of 200 may be chance"
    assert LEFT not in kinds(at_eps(64 / 255, 100))
    assert LEFT not in kinds(made(PGD(L2(0.9)), 0)), "an L2 ball of 0.9 is small"


def test_a_rejector_that_beats_the_classifier_at_half_the_radius_is_flagged() -> None:
    bad, half = made(PLAIN, N, trusted=0), made(PGD(Linf(EPS / 2), steps=20, step_size=0.04), 150)
    flag = the_flag(TOO_GOOD, clean(), bad, half)
    assert "With R-Con 100.0% of 200 images seem safe at eps=0.15" in flag.observed
    assert "this one gets 25.0% correct" in flag.observed
    assert "stronger" in flag.remedy


def test_only_images_that_no_attack_breaks_are_safe() -> None:
    bad, half = made(PLAIN, N, trusted=0), made(PGD(Linf(EPS / 2), steps=20, step_size=0.04), 150)
    strong = made(ADAPTIVE, N, trusted=150, thresholds=BOUND)
    assert TOO_GOOD not in kinds(clean(), bad, half, strong)
    robust = made(PGD(Linf(EPS / 2), steps=20, step_size=0.04), 3)
    assert TOO_GOOD not in kinds(clean(), bad, robust), "97% may be 100%"
    assert TOO_GOOD not in kinds(clean(160), bad, half), "clean images must be correct, too"
    assert TOO_GOOD not in kinds(clean(), bad, half, evaluation=NO_THRESHOLDS)


# ------------------------------------------------------------------ scores and the net


def test_scores_that_many_images_share_are_flagged() -> None:
    record = made(PLAIN, 100, label="pgd-20")
    assert kinds(record) == []
    record.arrays["logits"][:30] *= 1e6
    record.arrays["aux"][:30] = 100.0
    flag = the_flag(TIED, record)
    assert "Con is exactly 1 on 15.0% under pgd-20" in flag.observed
    assert "R-Con is exactly 1 on 15.0% under pgd-20" in flag.observed
    at = RejectorEvaluation({"Con": Con()}, {"Con": 1.0}, 0.95, 100)
    assert "Con is its threshold, exactly 1" in the_flag(TIED, record, evaluation=at).observed


def test_a_few_ties_are_not() -> None:
    record = made(PLAIN, 100)
    record.arrays["logits"][:15] *= 1e6
    assert TIED not in kinds(record, evaluation=RejectorEvaluation({"Con": Con()}, {}, 0.95, 0))
    assert TIED not in kinds(made(PLAIN, 1, n=3)), "one image of three is no tie"


@pytest.mark.parametrize(
    ("entry", "kind", "few", "many"),
    [("random_outputs", RANDOM, 0, 1), ("zero_gradients", FLAT, 6, 30)],
)
def test_an_unusual_probe_is_flagged(entry: str, kind: str, few: int, many: int) -> None:
    probe = {"images": 128, "random_outputs": 0, "zero_gradients": 0}
    assert kinds(made(PLAIN, 100, probe=probe | {entry: few})) == []
    flag = the_flag(kind, made(PLAIN, 100, label="pgd-20", probe=probe | {entry: many}))
    assert f"{many} of" in flag.observed
    assert "128" in flag.observed
    assert flag.attacks == ("pgd-20",)


# ------------------------------------------------------------------ what cannot be checked


def test_records_with_unknown_specs_raise_no_error() -> None:
    record = made(PLAIN, 100)
    record.metadata["spec"] = "Forgotten(eps=1)"
    del record.metadata["recipe"]
    assert kinds(record, clean()) == []


def test_a_check_without_records_names_the_attack_it_needs() -> None:
    found = {check.kind: check for check in run_checks([made(PLAIN, 100, label="pgd-20")], SCORER)}
    assert len(found) == len(CHECKS)
    assert found[NOT_RISEN].needed_attack == found[TOO_GOOD].needed_attack == "clean"
    assert (
        found[RISES].needed_attack == found[LEFT].needed_attack == f"pgd-20:eps={show(128 / 255)}"
    )
    assert found[BEATEN].needed_attack == "pgd-20:restarts=10"
    assert found[FLAT].missing
    assert found[RANDOM].missing
    assert not found[TIED].missing
    with_clean = [clean(), made(PLAIN, 100, label="pgd-20:eps=0.15,seed=3")]
    found = {check.kind: check for check in run_checks(with_clean, SCORER)}
    assert found[TOO_GOOD].needed_attack == "pgd-20:seed=3,eps=0.075"
    assert found[BEATEN].needed_attack == "pgd-20:eps=0.15,seed=3,restarts=10"
    short = [made(PGD(Linf(8 / 255), steps=10, step_size=2 / 255), 9, label="pgd-10")]
    found = {check.kind: check for check in run_checks(short, SCORER)}
    assert found[LEFT].needed_attack == "pgd-100:eps=128/255", "ten steps would not reach eps"


def test_flags_are_json_values() -> None:
    (flag,) = flags([at_eps(128 / 255, 160)], NO_THRESHOLDS)
    assert set(json.loads(json.dumps(flag.to_json()))) == {"kind", "attacks", "observed", "remedy"}
    assert flag.observed.endswith(".")
    assert flag.remedy.endswith(".")
