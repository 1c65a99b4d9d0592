"""Specs: text and back, clear errors, stable digests."""

import os
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Rational

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demur.attacks import (
    APGD,
    CE,
    CW,
    DLR,
    FAB,
    OBJECTIVES,
    PGD,
    AcceptedError,
    AutoAttackEnsemble,
    Chain,
    Clean,
    FalseRejection,
    MarginProduct,
    MaxMinMargin,
    MinMargin,
    OrthogonalAPGD,
    PlusLogScore,
    Rejected,
    RejectionObjective,
    RRLoss,
    Scaled,
    ScoreObjective,
    SingleMargin,
    Square,
    Sum,
    TargetedConfidence,
    TargetedDLR,
    UntargetedMargin,
    WrongConfidence,
)
from demur.attacks.balls import L2, Linf
from demur.attacks.objectives.rejector import CARLMargin, CARLObjective, RejectionHinge
from demur.calibrate import TPR, Coverage, Risk
from demur.data import CIFAR10, CIFAR100, IDBH, CropFlip
from demur.errors import BadInput
from demur.methods import ADR, FRAMEWORKS, HEADS, PGDAT, RR, LabelSmoothing, Method
from demur.nets import FactoryNet
from demur.recipes import NAMED_ATTACKS, RECIPES, VOCABULARY, Piecewise, recipe
from demur.rejectors import (
    REJECTORS,
    AcceptProbability,
    Con,
    ConMinusRectifier,
    Coupled,
    Energy,
    ModelScore,
    RCon,
)
from demur.spec import Spec, differences, edit, importing, lines, read, show
from tests.objective_examples import objective_example

_SLIPS = AcceptedError(RCon(), 0.5)
NAMED: dict[str, Spec] = {
    **{cls.__name__: cls() for cls in (*FRAMEWORKS, *HEADS, *REJECTORS)},
    **{cls.__name__: objective_example(cls, _SLIPS) for cls in OBJECTIVES},
    **RECIPES,
    **{name: make(RECIPES["digits-pgdat-rr"]) for name, make in NAMED_ATTACKS.items()},
    "adaptive on a plain net": NAMED_ATTACKS["adaptive"](RECIPES["digits-pgdat"]),
    "slips": AcceptedError(RCon(), TPR(0.95)),
    "refused": FalseRejection(Coupled(gate_threshold=0.6), 0.5),
    "slips at a risk": AcceptedError(RCon(), Risk(0.05)),
    "refused at a coverage": FalseRejection(RCon(), Coverage(0.9)),
    "energy": Energy(tau=2.0),
    "objectives": CE() + -2.0 * UntargetedMargin(),
    "goals of heads": CARLObjective() + CARLMargin() + RejectionHinge(0.2, "authors"),
    "scores of heads": AcceptedError(AcceptProbability(), 0.5),
    "a difference": ConMinusRectifier(0.5),
    "a rule against A": RRLoss(0.5, "difference", "squared"),
    "rr in full": RR(
        construction="aux", rr_loss="margin", joint=True, images="both", features="all"
    ),
    "rr apart": Method(PGDAT(), RR(gradient_to="head"), head_only=0.2),
    "a wrapped recipe": replace(RECIPES["digits-pgdat-rr"], ema=0.9, awp=0.01, awp_start=0.5),
    "rand": AutoAttackEnsemble(Linf(0.1), version="rand").chain(),
    "a net of one's own": replace(RECIPES["images-pgdat-rr"], net=FactoryNet("my_nets:make")),
    "a retrofit": replace(RECIPES["digits-pgdat-rr"], base="runs/digits-pgdat"),
    "piecewise": Piecewise(),
    "crop": CropFlip(),
    "idbh": IDBH(),
    "smoothed labels": replace(RECIPES["digits-trades"], labels=LabelSmoothing()),
    "adr": replace(RECIPES["digits-trades"], ema=0.9, labels=ADR()),
    "cifar10": CIFAR10(),
    "cifar100": CIFAR100(split="paper"),
    **RECIPES["cifar10-pgdat-rr"].rejectors(),
    "coverage": FalseRejection(Coupled(), Coverage(0.9)),
    "risk": AcceptedError(RCon(), Risk(0.05)),
    "apgd": APGD(Linf(8 / 255), objective=DLR()),
    "fab": FAB(L2(0.5)),
    "cw": CW(),
    "square": Square(Linf(8 / 255)),
    "chain": Chain((Clean(), AutoAttackEnsemble(L2(0.5)))),
    "balanced": MaxMinMargin(Linf(0.1), _SLIPS),
    "orthogonal": OrthogonalAPGD(Linf(0.1), objective=MinMargin(_SLIPS), criterion=_SLIPS),
    "passing": SingleMargin(_SLIPS, 1)
    + MarginProduct(AcceptedError(ModelScore(), 0.0))
    + RejectionObjective(Rejected(Con(), 0.5)),
    "dlr sum": DLR()
    + WrongConfidence()
    + TargetedDLR()
    + TargetedConfidence()
    + ScoreObjective(RCon())
    + RRLoss(),
}


@pytest.mark.parametrize("name", NAMED)
def test_text_and_back(name: str) -> None:
    spec = NAMED[name]
    assert read(show(spec), VOCABULARY) == spec
    assert read(show(spec, full=True), VOCABULARY) == spec
    assert read(lines(spec), VOCABULARY) == spec


ANY_TEXT = st.text(
    st.one_of(
        st.characters(exclude_categories=()),  # halves of surrogate pairs too
        st.sampled_from("\"'\\\0\n\r\t\x85\u2028\ufeff\U0001f600{}%R-Con"),
    )
)


@dataclass(frozen=True)
class _Texts(Spec):
    one: str
    several: tuple[str, ...] = ()


@given(one=ANY_TEXT, several=st.lists(ANY_TEXT, max_size=3))
def test_any_text_is_read_back(one: str, several: list[str]) -> None:
    spec = _Texts(one, tuple(several))
    for text in (show(spec), show(spec, full=True), lines(spec)):
        assert text.isascii()
        assert read(text, VOCABULARY) == spec


@given(base=ANY_TEXT, decay=st.floats(0, 1e300), seed=st.integers(0, 2**63 - 1))
def test_a_recipe_with_any_values_is_read_back(base: str, decay: float, seed: int) -> None:
    changed = replace(RECIPES["digits-pgdat-rr"], base=base, weight_decay=decay, seed=seed)
    for text in (show(changed), show(changed, full=True), lines(changed)):
        assert read(text, VOCABULARY) == changed


def test_every_class_in_the_vocabulary_is_documented_and_frozen() -> None:
    for name, cls in VOCABULARY.items():
        assert cls.__name__ == name
        assert cls.__doc__, name
        assert cls.__dataclass_params__.frozen, name  # type: ignore[attr-defined]


def test_fractions_stay_fractions() -> None:
    assert show(Linf(8 / 255)) == "Linf(8/255)"
    assert show(Linf(0.15)) == "Linf(0.15)"
    assert show(Linf(0.0375)) == "Linf(0.0375)"
    assert show(Linf(1 / 3)) == "Linf(1/3)"
    assert read("Linf(8/255)", VOCABULARY).eps == 8 / 255


@given(st.floats(min_value=0, max_value=1e6, allow_nan=False))
def test_any_radius_survives(eps: float) -> None:
    assert read(show(L2(eps)), VOCABULARY) == L2(eps)


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_any_fraction_is_read_as_python_would(top: int, bottom: int) -> None:
    assert read(f"L2({top}/{bottom})", VOCABULARY).eps == top / bottom


def test_goals_add_and_scale_in_text() -> None:
    objective = read("CE() + 2*PlusLogScore(RCon(), eta=10)", VOCABULARY)
    assert objective == Sum((CE(), Scaled(2, PlusLogScore(RCon(), eta=10))))
    assert read(show(objective), VOCABULARY) == objective
    assert CE() + UntargetedMargin() + CE() == Sum((CE(), UntargetedMargin(), CE()))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("PDG(Linf(0.1))", "did you mean PGD"),
        ("PGD(Linf(0.1), stesp=3)", "did you mean steps or step_size"),
        ("PGD(Linf(0.1), steps=0)", "PGD.steps must be a whole number of at least 1, not 0"),
        ("PGD(Linf(0.1), steps=True)", "PGD.steps must be a whole number"),
        ("PGD(Linf(0.1), steps=2.5)", "PGD.steps must be a whole number"),
        ("PGD(Linf(-1))", "Linf.eps must be a number of at least 0"),
        ("PGD(Linf(1e999))", "Linf.eps must be a number"),
        ("PGD(CE())", "PGD.ball must be a Ball"),
        ("PGD(Linf(0.1), objective=RCon())", "PGD.objective must be"),
        ("PGD(Linf(0.1), start='afar')", "one of random, clean"),
        ("PGD()", "PGD lacks ball; it takes ball, steps"),
        ("AcceptedError(RCon())", "AcceptedError lacks threshold; it takes rejector, threshold"),
        ("Linf(1, 2)", "Linf is given too many values; it takes eps"),
        ("Linf(1, eps=2)", "Linf is given the same field twice"),
        ("Linf(1/0)", "cannot work out"),
        ("Linf(", "cannot read"),
        ("__import__('os').system('true')", "neither a value nor a known name"),
        ("(lambda: 1)()", "neither a value nor a known name"),
        ("Linf(eps)", "nothing is called 'eps'"),
        ("PlusLogScore(CE())", "PlusLogScore.rejector must be a Rejector or a Score"),
        ("'a' * 3", "only numbers and objectives"),
        ("-CE()", "only a number can be negative"),
        ("PGD", "PGD lacks ball"),
        ("ResNet8(width=4, width=5)", "the same field twice"),
        ("PGD(Linf(0.1), **CE())", "PGD has no"),
        ("Linf(1" + 400 * "0" + ")", "Linf.eps must be a number"),
        ("PGD(Linf(0.1), seed=99999999999999999999)", "below 2^63"),
    ],
)
def test_bad_text_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(BadInput) as error:
        read(text, VOCABULARY)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_python_constructors_check_too() -> None:
    with pytest.raises(BadInput, match="at least 1"):
        PGD(Linf(0.1), steps=0)


def test_edit_finds_a_unique_key_below_and_refuses_ambiguity() -> None:
    attack = PGD(Linf(0.1))
    assert edit(attack, "eps", "16/255", VOCABULARY).ball == Linf(16 / 255)
    assert edit(attack, "ball", "L2(1)", VOCABULARY).ball == L2(1)
    assert edit(attack, "objective", "UntargetedMargin", VOCABULARY).objective == UntargetedMargin()
    assert edit(attack, "keep", "success", VOCABULARY).keep == "success"
    assert edit(attack, "keep", "'success'", VOCABULARY).keep == "success"
    assert edit(attack, "step_size", "None", VOCABULARY).step_size is None
    recipe = RECIPES["digits-pgdat-rr"]
    assert edit(recipe, "head.weight", "0.5", VOCABULARY).method.head.weight == 0.5
    assert edit(recipe, "method.head.stop_tcon", "False", VOCABULARY).method.head.stop_tcon is False
    with pytest.raises(BadInput, match=r"could mean .*attack\.steps or validation_attack\.steps"):
        edit(recipe, "steps", "3", VOCABULARY)
    with pytest.raises(BadInput, match="did you mean epochs"):
        edit(recipe, "epoch", "3", VOCABULARY)
    with pytest.raises(BadInput, match="one of max_objective, success"):
        edit(attack, "keep", "best", VOCABULARY)
    with pytest.raises(BadInput, match="must be a whole number of at least 1"):
        edit(recipe, "epochs", "many", VOCABULARY)


def test_differences_name_the_fields() -> None:
    recipe = RECIPES["digits-pgdat-rr"]
    other = edit(edit(recipe, "epochs", "3", VOCABULARY), "head.weight", "2", VOCABULARY)
    phrases = differences(other, recipe)
    assert phrases == [
        "method.head.weight: 2.0 asked, 1.0 found",
        f"epochs: 3 asked, {recipe.epochs} found",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "PGD(" + 500 * "x, ", "[" + 500 * "1, " + "]", 500 * "x", f"PGD({500 * 'x'}=1)",
        "1/0 + " + 500 * "1 + " + "1", 3000 * "-" + "1", 20 * "(CE(), " + "-CE()" + 20 * ")",
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_repeated_in_part(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        read(text, VOCABULARY)
    assert len(str(caught.value)) < 500
    assert max(map(len, str(caught.value).split("'"))) <= 200
    with pytest.raises(BadInput) as caught:
        recipe("digits-pgdat-rr", [f"epochs={text}"])
    assert len(str(caught.value)) < 500


def test_one_rule_says_what_may_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Typed, or named by DEMUR_MODULES; of a loaded module only a class of the kind asked for."""
    monkeypatch.setattr(importing, "_TYPED", set())
    monkeypatch.delenv("DEMUR_MODULES", raising=False)
    refused = "is code and is not imported for a file; .* allow it with DEMUR_MODULES="
    for path, kind in (("json.tool:main", None), ("os:getcwd", None), ("os:getcwd", Spec),
                       ("fractions:Fraction", Spec), ("fractions:Fraction", None)):  # fmt: skip
        with pytest.raises(BadInput, match=refused):
            importing.import_object(path, kind)
    assert importing.import_object("fractions:Fraction", Rational) is Fraction
    importing.allow_import("os:getcwd")
    assert importing.import_object("os:getcwd") is os.getcwd
    with pytest.raises(BadInput, match=refused):  # the name was typed, not the module
        importing.import_object("os:abort")
    monkeypatch.setenv("DEMUR_MODULES", "other,os")
    assert importing.import_object("os:path.join") is os.path.join
    with pytest.raises(BadInput, match=r"cannot be imported \(AttributeError: "):
        importing.import_object("os:nothing")
    for text in ("os", "os:", ":getcwd", "os:get cwd", "os:getcwd()", "a..b:c"):
        with pytest.raises(BadInput, match="write module:name"):
            importing.allow_import(text)
