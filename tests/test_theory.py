"""The paper's statements on examples, on random probabilities, and without their conditions."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from demur.errors import BadInput
from demur.metrics.checks import BoolArray, FloatArray
from demur.paper import theorems as theory
from demur.paper.theorems import TheoryInputs
from tests.samples import examples

MANY, SOME = (settings(deadline=None, max_examples=examples(most)) for most in (100, 40))
# any counterexample will do: shrinking it takes longer than finding it
FIRST = settings(max_examples=5000, phases=[Phase.generate], database=None, deadline=None)


class Case(NamedTuple):
    """Random inputs of the statements, with a xi and a gamma."""

    inputs: TheoryInputs
    xi: float
    gamma: float


# integer weights give ties, zeros and exact halves
WEIGHTS = st.one_of(
    st.lists(st.integers(0, 8), min_size=2, max_size=5),
    st.lists(st.floats(1e-6, 1), min_size=2, max_size=5),
).filter(lambda row: sum(row) > 0)
FRACTIONS = sorted({n / d for d in range(1, 9) for n in range(d + 1)})
SHARES = st.one_of(st.sampled_from(FRACTIONS), st.floats(0, 1))
XIS = SHARES.filter(lambda value: value < 1)
GAMMAS = SHARES.map(lambda value: 0.5 + value / 2).filter(lambda value: value > 0.5)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    weights = np.array(draw(WEIGHTS), dtype=np.float64)
    p = weights / weights.sum()
    y = draw(st.integers(0, len(p) - 1))
    a = draw(st.one_of(SHARES, st.just(min(1.0, p[y] / p.max()))))
    return Case(theory.theory_inputs(p[None], [y], [a]), draw(XIS), draw(GAMMAS))


def make_inputs(p: list[list[float]], y: list[int], a: list[float]) -> TheoryInputs:
    return theory.theory_inputs(np.array(p), np.array(y), np.array(a))


class TestInputs:
    def test_an_example(self) -> None:
        inputs = make_inputs([[0.8, 0.2], [0.25, 0.75]], [0, 0], [0.9, 0.5])
        assert inputs.correct.tolist() == [True, False]
        assert inputs.con.tolist() == [0.8, 0.75]
        assert inputs.tcon.tolist() == [0.8, 0.25]
        assert inputs.a_star == pytest.approx([1, 1 / 3])
        assert inputs.rcon == pytest.approx([0.72, 0.375])
        assert inputs.xi == pytest.approx([0.2, 1 / 3])

    @SOME
    @given(st.lists(st.floats(-30, 30), min_size=2, max_size=6), st.floats(0.05, 20))
    def test_the_temperature_does_not_change_predictions(
        self, logits: list[float], tau: float
    ) -> None:
        for y in range(len(logits)):
            inputs = theory.theory_inputs_at([logits], [y], [0.5], tau)
            assert inputs.correct[0] == (int(np.argmax(logits)) == y)
            assert 0 <= inputs.a_star[0] <= 1

    def test_temperature_zero_is_the_limit(self) -> None:
        logits = [[1.0, 3.0, 2.0], [4.0, 4.0, 0.0]]
        assert theory.probabilities(logits, 0.0).tolist() == [[0, 1, 0], [0.5, 0.5, 0]]
        assert theory.probabilities(logits, 1e-3) == pytest.approx(theory.probabilities(logits, 0))
        inputs = theory.theory_inputs_at(logits, [0, 1], [0.3, 0.3], 0.0)
        assert inputs.a_star.tolist() == [0, 1], "A* is binary except for ties"

    @pytest.mark.parametrize(
        ("p", "y", "a", "message"),
        [
            ([[0.5, 0.4]], [0], [0.5], "add up to 1"),
            ([[1.5, -0.5]], [0], [0.5], "add up to 1"),
            ([[math.nan, 1]], [0], [0.5], "add up to 1"),
            ([[0.5, 0.5]], [2], [0.5], "labels 0 to 1"),
            ([[0.5, 0.5]], [0], [3.0], "not its logit"),
            ([[0.5, 0.5]], [0, 1], [0.5], "give shapes"),
            ([[0.5, 0.5]], [0.5], [0.5], "whole number"),
            ([0.5, 0.5], [0], [0.5], "give shapes"),
        ],
    )
    def test_bad_arrays_raise(self, p: object, y: object, a: object, message: str) -> None:
        with pytest.raises(BadInput, match=message):
            theory.theory_inputs(np.array(p), np.array(y), np.array(a))

    def test_a_negative_temperature_raises(self) -> None:
        with pytest.raises(BadInput, match="tau is -1"):
            theory.probabilities([[0.0, 1.0]], -1)

    def test_probabilities_may_be_in_single_precision(self) -> None:
        p = torch.randn(50, 10).softmax(-1).numpy()
        inputs = theory.theory_inputs(p, p.argmax(-1), np.full(50, 0.5))
        assert inputs.correct.all()
        assert not theory.lemma1(inputs).violated.any()


class TestXi:
    def test_both_bounds_on_examples(self) -> None:
        a, a_star = np.array([0.5, 0.9, 0.0, 0.0, 0.4]), np.array([1.0, 0.6, 0.0, 0.5, 0.4])
        assert theory.xi_geometric(a, a_star) == pytest.approx([1.0, 2 / 3, 0, 2, 0])
        assert theory.xi_arithmetic(a, a_star) == pytest.approx([1.0, 0.6, 0, 1, 0])

    @SOME
    @given(SHARES, SHARES)
    def test_the_arithmetic_bound_always_gives_the_smallest_xi(
        self, a: float, a_star: float
    ) -> None:
        pair = np.array([a]), np.array([a_star])
        assert theory.xi_arithmetic(*pair) <= theory.xi_geometric(*pair) + 1e-15
        assert theory.pointwise_xi(*pair) == pytest.approx(2 * abs(a - a_star))

    @SOME
    @given(st.floats(0.01, 1), st.floats(0.01, 1))
    def test_the_geometric_xi_solves_its_inequality(self, a: float, a_star: float) -> None:
        (xi,) = theory.xi_geometric(np.array([a]), np.array([a_star]))
        assert abs(math.log(a / a_star)) == pytest.approx(math.log(2 / (2 - xi)), abs=1e-9)

    @SOME
    @given(cases())
    def test_a_constant_a_of_one_half_has_xi_of_at_most_one(self, case: Case) -> None:
        guess = replace(case.inputs, a=np.array([0.5]))
        assert guess.xi[0] <= 1
        at_a_bound = guess.a_star[0] in (0, 1)
        assert (guess.xi[0] == 1) == at_a_bound or guess.a_star[0] < 1e-15
        if case.inputs.correct[0]:
            assert guess.xi[0] == 1
            assert not theory.theorem1(guess).premise.any(), "xi must be below 1"

    def test_con_above_and_xi_below_are_inverse(self) -> None:
        assert theory.con_above(0.0) == 0.5
        assert theory.con_above(0.75) == 0.8
        assert theory.xi_below(0.8) == pytest.approx(0.75)
        assert theory.xi_below(1.0) == 1.0
        for xi in (0.1, 0.37, 0.99):
            assert theory.xi_below(theory.con_above(xi)) == pytest.approx(xi)
        with pytest.raises(BadInput, match=r"gamma is 0\.5"):
            theory.xi_below(0.5)
        with pytest.raises(BadInput, match="xi is 1"):
            theory.con_above(1.0)
        with pytest.raises(BadInput, match="xi is nan"):
            theory.theorem1(make_inputs([[1, 0]], [0], [1]), math.nan)


class TestSeparability:
    """The statements are proven, so a violation is a bug in this library."""

    BUG = "a violation of a proven statement is a bug"

    @MANY
    @given(cases())
    def test_no_counterexample(self, case: Case) -> None:
        inputs = case.inputs
        for claim in (
            theory.lemma1(inputs),
            theory.theorem1(inputs, case.xi),
            theory.theorem1(inputs),
            theory.theorem1_above(inputs, case.gamma),
            theory.oracle(inputs),
        ):
            assert not claim.violated.any(), self.BUG

    @SOME
    @given(cases())
    def test_the_premise_at_any_xi_implies_that_at_the_smallest_xi(self, case: Case) -> None:
        own = theory.theorem1(case.inputs).premise
        assert not (theory.theorem1(case.inputs, case.xi).premise & ~own).any()
        assert not (theory.theorem1_above(case.inputs, case.gamma).premise & ~own).any()
        assert not (own & (case.inputs.xi >= 1)).any()

    @SOME
    @given(cases())
    def test_with_a_equal_to_one_the_premise_is_tcon_above_one_half(self, case: Case) -> None:
        with_a_one = replace(case.inputs, a=np.ones(1))
        inside = theory.theorem1(with_a_one).premise
        assert inside == theory.oracle(case.inputs).premise

    @pytest.mark.parametrize("correct", [True, False])
    @pytest.mark.parametrize("statement", [theory.lemma1, theory.theorem1])
    def test_random_cases_satisfy_the_premise_for_correct_and_wrong_predictions(
        self, statement: Callable[[TheoryInputs], theory.Claim], correct: bool
    ) -> None:
        def satisfies(case: Case) -> bool:
            return bool((statement(case.inputs).premise & (case.inputs.correct == correct)).any())

        assert find(cases(), satisfies, settings=FIRST, random=random.Random(3))

    def test_correct_and_wrong_scores_are_separated_on_many_images(self) -> None:
        g = np.random.default_rng(0)
        p, y = theory.probabilities(3 * g.normal(size=(20_000, 4))), g.integers(0, 4, 20_000)
        ideal = theory.theory_inputs(p, y, np.ones(len(y))).a_star
        inputs = theory.theory_inputs(p, y, np.clip(ideal + g.normal(0, 0.2, len(y)), 0, 1))
        for xi in (0.0, 0.1, 0.5, 0.9):
            claim = theory.theorem1(inputs, xi)
            correct, wrong = claim.premise & inputs.correct, claim.premise & ~inputs.correct
            if xi > 0:
                assert inputs.rcon[correct].min() > 0.5 > inputs.rcon[wrong].max()
        lemma = theory.lemma1(inputs).premise
        correct, wrong = lemma & inputs.correct, lemma & ~inputs.correct
        assert inputs.tcon[correct].min() > 0.5 > inputs.tcon[wrong].max()

    def test_a_violation_is_reported(self) -> None:
        inputs = make_inputs([[0.9, 0.1]], [0], [1.0])
        false_inputs = replace(inputs, correct=np.array([False]))
        for statement in (theory.lemma1, theory.theorem1, theory.oracle):
            assert not statement(inputs).violated.any()
            assert statement(false_inputs).violated.all()

    def test_the_inequalities_of_the_premises_are_strict(self) -> None:
        half = make_inputs([[0.5, 0.5], [0.5, 0.5]], [0, 1], [1.0, 1.0])
        for statement in (theory.lemma1, theory.theorem1, theory.oracle):
            assert not statement(half).premise.any()
        at_the_bound = make_inputs(
            [[0.8, 0.2]], [0], [1 - 0.75 / 2]
        )  # con = 1/(2 - xi), R-Con = 1/2
        assert at_the_bound.rcon == pytest.approx(0.5)
        assert not theory.theorem1(at_the_bound, 0.75).premise.any()


def counterexample(
    condition: Callable[[Case], BoolArray], score: Callable[[TheoryInputs], FloatArray]
) -> Case:
    """A case that satisfies the condition with its score on the wrong side of 1/2."""

    def violates(case: Case) -> bool:
        inputs = case.inputs
        return bool((condition(case) & ~theory.separated(score(inputs), inputs.correct)).any())

    return find(cases(), violates, settings=FIRST, random=random.Random(3))


class TestEveryConditionIsNeeded:
    """Without any one condition a counterexample exists."""

    def test_lemma_1_needs_con_above_one_half(self) -> None:
        found = counterexample(lambda case: np.ones(1, dtype=np.bool_), lambda inputs: inputs.tcon)
        assert found.inputs.con[0] <= 0.5

    def test_theorem_1_needs_con_above_its_bound(self) -> None:
        found = counterexample(
            lambda case: (
                theory.is_xi_accurate(case.inputs, case.xi)
                & theory.is_confident(case.inputs.con, 0.0)
            ),
            lambda inputs: inputs.rcon,
        )
        assert 0.5 < found.inputs.con[0] <= theory.con_above(found.xi) + 1e-9

    def test_theorem_1_needs_a_xi_error_a(self) -> None:
        found = counterexample(
            lambda case: theory.is_confident(case.inputs.con, case.xi), lambda inputs: inputs.rcon
        )
        assert found.inputs.xi[0] > found.xi

    def test_theorem_1_needs_a_strict_inequality(self) -> None:
        found = counterexample(
            lambda case: (
                theory.is_xi_accurate(case.inputs, case.xi)
                & (case.inputs.con >= theory.con_above(case.xi))
            ),
            lambda inputs: inputs.rcon,
        )
        assert found.inputs.con[0] == pytest.approx(theory.con_above(found.xi))

    def test_a_threshold_gamma_needs_a_bound_on_xi(self) -> None:
        found = counterexample(
            lambda case: case.inputs.con >= case.gamma, lambda inputs: inputs.rcon
        )
        assert found.inputs.xi[0] >= theory.xi_below(found.gamma) - 1e-9

    def test_tcon_of_exactly_one_half_may_be_wrong(self) -> None:
        found = find(
            cases(), lambda case: bool((case.inputs.tcon >= 0.5) & ~case.inputs.correct),
            settings=FIRST, random=random.Random(3),
        )  # fmt: skip
        assert found.inputs.con[0] == found.inputs.tcon[0] == 0.5
