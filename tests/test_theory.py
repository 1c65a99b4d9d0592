"""The paper's statements by hand, on random tables, on every kept record, and in the command."""

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

from demur import theory
from demur.errors import BadInput
from demur.theory import BoolArray, FloatArray, TheoryInputs

MANY, SOME = (settings(deadline=None, max_examples=most) for most in (300, 60))
# the first counterexample will do: making it small takes longer than finding it
FIRST = settings(max_examples=5000, phases=[Phase.generate], database=None, deadline=None)


class Case(NamedTuple):
    """Random answers, with a xi and a gamma to hold against them."""

    seen: TheoryInputs
    xi: float
    gamma: float


# Whole weights give ties, zeros and exact halves; the rest is anywhere.
WEIGHTS = st.one_of(
    st.lists(st.integers(0, 8), min_size=2, max_size=5),
    st.lists(st.floats(1e-6, 1), min_size=2, max_size=5),
).filter(lambda row: sum(row) > 0)
SHARES = st.one_of(st.fractions(0, 1, max_denominator=8).map(float), st.floats(0, 1))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    weights = np.array(draw(WEIGHTS), dtype=np.float64)
    p = weights / weights.sum()
    y = draw(st.integers(0, len(p) - 1))
    a = draw(st.one_of(SHARES, st.just(min(1.0, p[y] / p.max()))))
    xi = draw(SHARES.filter(lambda value: value < 1))
    gamma = draw(SHARES.map(lambda value: 0.5 + value / 2).filter(lambda value: value > 0.5))
    return Case(theory.theory_inputs(p[None], [y], [a]), xi, gamma)


def by_hand(p: list[list[float]], y: list[int], a: list[float]) -> TheoryInputs:
    return theory.theory_inputs(np.array(p), np.array(y), np.array(a))


class TestAnswers:
    def test_by_hand(self) -> None:
        seen = by_hand([[0.8, 0.2], [0.25, 0.75]], [0, 0], [0.9, 0.5])
        assert seen.correct.tolist() == [True, False]
        assert seen.con.tolist() == [0.8, 0.75]
        assert seen.tcon.tolist() == [0.8, 0.25]
        assert seen.a_star == pytest.approx([1, 1 / 3])
        assert seen.rcon == pytest.approx([0.72, 0.375])
        assert seen.xi == pytest.approx([0.2, 1 / 3])

    @SOME
    @given(st.lists(st.floats(-30, 30), min_size=2, max_size=6), st.floats(0.05, 20))
    def test_the_temperature_leaves_labels_alone(self, logits: list[float], tau: float) -> None:
        for y in range(len(logits)):
            seen = theory.theory_inputs_at([logits], [y], [0.5], tau)
            assert seen.correct[0] == (int(np.argmax(logits)) == y)
            assert 0 <= seen.a_star[0] <= 1

    def test_the_limit_of_no_temperature(self) -> None:
        logits = [[1.0, 3.0, 2.0], [4.0, 4.0, 0.0]]
        assert theory.probabilities(logits, 0.0).tolist() == [[0, 1, 0], [0.5, 0.5, 0]]
        assert theory.probabilities(logits, 1e-3) == pytest.approx(theory.probabilities(logits, 0))
        seen = theory.theory_inputs_at(logits, [0, 1], [0.3, 0.3], 0.0)
        assert seen.a_star.tolist() == [0, 1], "A* is binary but for ties"

    @pytest.mark.parametrize(
        ("p", "y", "a", "words"),
        [
            ([[0.5, 0.4]], [0], [0.5], "add up to 1"),
            ([[1.5, -0.5]], [0], [0.5], "add up to 1"),
            ([[math.nan, 1]], [0], [0.5], "add up to 1"),
            ([[0.5, 0.5]], [2], [0.5], "labels 0 to 1"),
            ([[0.5, 0.5]], [0], [3.0], "not its logit"),
            ([[0.5, 0.5]], [0, 1], [0.5], "for every image"),
            ([[0.5, 0.5]], [0.5], [0.5], "whole number"),
            ([0.5, 0.5], [0], [0.5], "for every image"),
        ],
    )
    def test_refuses_what_is_no_table(self, p: object, y: object, a: object, words: str) -> None:
        with pytest.raises(BadInput, match=words):
            theory.theory_inputs(np.array(p), np.array(y), np.array(a))

    def test_refuses_a_negative_temperature(self) -> None:
        with pytest.raises(BadInput, match="tau is -1"):
            theory.probabilities([[0.0, 1.0]], -1)

    def test_takes_tables_in_single_precision(self) -> None:
        p = torch.randn(50, 10).softmax(-1).numpy()
        seen = theory.theory_inputs(p, p.argmax(-1), np.full(50, 0.5))
        assert seen.correct.all()
        assert not theory.lemma1(seen).violated.any()


class TestXi:
    def test_both_bounds_by_hand(self) -> None:
        a, a_star = np.array([0.5, 0.9, 0.0, 0.0, 0.4]), np.array([1.0, 0.6, 0.0, 0.5, 0.4])
        assert theory.xi_geometric(a, a_star) == pytest.approx([1.0, 2 / 3, 0, 2, 0])
        assert theory.xi_arithmetic(a, a_star) == pytest.approx([1.0, 0.6, 0, 1, 0])

    @SOME
    @given(SHARES, SHARES)
    def test_the_least_is_always_the_second(self, a: float, a_star: float) -> None:
        pair = np.array([a]), np.array([a_star])
        assert theory.xi_arithmetic(*pair) <= theory.xi_geometric(*pair) + 1e-15
        assert theory.point_xi(*pair) == pytest.approx(2 * abs(a - a_star))

    @SOME
    @given(st.floats(0.01, 1), st.floats(0.01, 1))
    def test_the_first_solves_its_inequality(self, a: float, a_star: float) -> None:
        (xi,) = theory.xi_geometric(np.array([a]), np.array([a_star]))
        assert abs(math.log(a / a_star)) == pytest.approx(math.log(2 / (2 - xi)), abs=1e-9)

    @SOME
    @given(cases())
    def test_the_remark_a_guess_has_xi_one(self, case: Case) -> None:
        guess = replace(case.seen, a=np.array([0.5]))
        assert guess.xi[0] <= 1
        at_the_end = guess.a_star[0] in (0, 1)
        assert (guess.xi[0] == 1) == at_the_end or guess.a_star[0] < 1e-15
        if case.seen.correct[0]:
            assert guess.xi[0] == 1
            assert not theory.theorem1(guess).premise.any(), "xi must be below 1"

    def test_thresholds_turn_into_each_other(self) -> None:
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
            theory.theorem1(by_hand([[1, 0]], [0], [1]), math.nan)


class TestSeparability:
    """The statements are proven: whatever violates one is a bug in this library."""

    BUG = "a violation of a proven statement is a bug"

    @MANY
    @given(cases())
    def test_no_counterexample(self, case: Case) -> None:
        seen = case.seen
        for claim in (
            theory.lemma1(seen),
            theory.theorem1(seen, case.xi),
            theory.theorem1(seen),
            theory.theorem1_behind(seen, case.gamma),
            theory.oracle(seen),
        ):
            assert not claim.violated.any(), self.BUG

    @SOME
    @given(cases())
    def test_whoever_is_inside_at_some_xi_is_inside_at_its_own(self, case: Case) -> None:
        own = theory.theorem1(case.seen).premise
        assert not (theory.theorem1(case.seen, case.xi).premise & ~own).any()
        assert not (theory.theorem1_behind(case.seen, case.gamma).premise & ~own).any()
        assert not (own & (case.seen.xi >= 1)).any()

    @SOME
    @given(cases())
    def test_without_a_head_only_t_con_above_a_half_is_inside(self, case: Case) -> None:
        trusting = replace(case.seen, a=np.ones(1))
        inside = theory.theorem1(trusting).premise
        assert inside == theory.oracle(case.seen).premise

    @pytest.mark.parametrize("right", [True, False])
    @pytest.mark.parametrize("statement", [theory.lemma1, theory.theorem1])
    def test_random_tables_reach_both_sides(
        self, statement: Callable[[TheoryInputs], theory.Claim], right: bool
    ) -> None:
        def reached(case: Case) -> bool:
            return bool((statement(case.seen).premise & (case.seen.correct == right)).any())

        assert find(cases(), reached, settings=FIRST, random=random.Random(0))

    def test_pairs_are_apart_on_a_large_table(self) -> None:
        g = np.random.default_rng(0)
        p, y = theory.probabilities(3 * g.normal(size=(20_000, 4))), g.integers(0, 4, 20_000)
        ideal = theory.theory_inputs(p, y, np.ones(len(y))).a_star
        seen = theory.theory_inputs(p, y, np.clip(ideal + g.normal(0, 0.2, len(y)), 0, 1))
        for xi in (0.0, 0.1, 0.5, 0.9):
            claim = theory.theorem1(seen, xi)
            right, wrong = claim.premise & seen.correct, claim.premise & ~seen.correct
            if xi > 0:
                assert seen.rcon[right].min() > 0.5 > seen.rcon[wrong].max()
        lemma = theory.lemma1(seen).premise
        right, wrong = lemma & seen.correct, lemma & ~seen.correct
        assert seen.tcon[right].min() > 0.5 > seen.tcon[wrong].max()

    def test_a_violation_would_be_seen(self) -> None:
        seen = by_hand([[0.9, 0.1]], [0], [1.0])
        lie = replace(seen, correct=np.array([False]))
        for statement in (theory.lemma1, theory.theorem1, theory.oracle):
            assert not statement(seen).violated.any()
            assert statement(lie).violated.all()

    def test_the_borders_are_open(self) -> None:
        half = by_hand([[0.5, 0.5], [0.5, 0.5]], [0, 1], [1.0, 1.0])
        for statement in (theory.lemma1, theory.theorem1, theory.oracle):
            assert not statement(half).premise.any()
        on_the_line = by_hand([[0.8, 0.2]], [0], [1 - 0.75 / 2])  # con = 1/(2 - xi), R-Con = 1/2
        assert on_the_line.rcon == pytest.approx(0.5)
        assert not theory.theorem1(on_the_line, 0.75).premise.any()


def fails(
    condition: Callable[[Case], BoolArray], score: Callable[[TheoryInputs], FloatArray]
) -> Case:
    """A case that meets the condition and whose score is on the wrong side of 1/2."""

    def violates(case: Case) -> bool:
        seen = case.seen
        return bool((condition(case) & ~theory.separated(score(seen), seen.correct)).any())

    return find(cases(), violates, settings=FIRST, random=random.Random(0))


class TestEveryConditionIsNeeded:
    """Hypothesis finds a counterexample as soon as a condition is dropped."""

    def test_lemma_1_without_confidence(self) -> None:
        found = fails(lambda case: np.ones(1, dtype=np.bool_), lambda seen: seen.tcon)
        assert found.seen.con[0] <= 0.5

    def test_theorem_1_without_the_larger_confidence(self) -> None:
        found = fails(
            lambda case: theory.accurate(case.seen, case.xi) & theory.confident(case.seen.con, 0.0),
            lambda seen: seen.rcon,
        )
        assert 0.5 < found.seen.con[0] <= theory.con_above(found.xi) + 1e-9

    def test_theorem_1_without_an_accurate_head(self) -> None:
        found = fails(lambda case: theory.confident(case.seen.con, case.xi), lambda seen: seen.rcon)
        assert found.seen.xi[0] > found.xi

    def test_theorem_1_with_a_closed_border(self) -> None:
        found = fails(
            lambda case: (
                theory.accurate(case.seen, case.xi) & (case.seen.con >= theory.con_above(case.xi))
            ),
            lambda seen: seen.rcon,
        )
        assert found.seen.con[0] == pytest.approx(theory.con_above(found.xi))

    def test_the_threshold_gamma_without_room_for_xi(self) -> None:
        found = fails(lambda case: case.seen.con >= case.gamma, lambda seen: seen.rcon)
        assert found.seen.xi[0] >= theory.xi_below(found.gamma) - 1e-9

    def test_t_con_at_exactly_a_half(self) -> None:
        found = find(
            cases(), lambda case: bool((case.seen.tcon >= 0.5) & ~case.seen.correct),
            settings=FIRST, random=random.Random(0),
        )  # fmt: skip
        assert found.seen.con[0] == found.seen.tcon[0] == 0.5
