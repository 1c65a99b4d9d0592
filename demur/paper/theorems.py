"""The paper's lemma and theorems as checks of every image; NumPy only.

    inputs = theory_inputs(p, y, a)         # con, T-Con, A, correctness by image
    theorem1(inputs, xi=0.5).violated       # all False: the theorem is proven

A Claim holds the images that satisfy a premise and those that satisfy the conclusion. The proofs
are for real numbers, so a strict inequality of a premise must hold by more than rounding.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from demur.errors import BadInput
from demur.metrics.checks import BoolArray, FloatArray, IntArray

SLACK = 1e-12  # rounding errors are about 1e-16; a premise must hold by more than this
ROW_SUM_ERROR = 1e-5  # allowed in a row of probabilities, which may come from fp32


class Claim(NamedTuple):
    """Images (N) that satisfy the premise of a statement, and those that satisfy its conclusion."""

    premise: BoolArray
    conclusion: BoolArray

    @property
    def violated(self) -> BoolArray:
        """Images with the premise but without the conclusion; any one is a bug in this library."""
        return self.premise & ~self.conclusion


@dataclass(frozen=True)
class TheoryInputs:
    """con, T-Con, A and correctness of each image, N each."""

    con: FloatArray
    tcon: FloatArray
    a: FloatArray
    correct: BoolArray

    @property
    def a_star(self) -> FloatArray:
        """A* = T-Con / con, the A for which R-Con = T-Con."""
        return self.tcon / self.con

    @property
    def rcon(self) -> FloatArray:
        """R-Con = con * A (Eq. 6)."""
        return self.con * self.a

    @property
    def xi(self) -> FloatArray:
        """Smallest xi of Definition 1."""
        return pointwise_xi(self.a, self.a_star)


def probabilities(logits: ArrayLike, tau: float = 1.0) -> FloatArray:
    """Softmax of the logits at temperature tau, N, C; at 0 its limit, uniform over the largest."""
    z = np.asarray(logits, dtype=np.float64)
    if tau < 0 or not math.isfinite(tau):
        raise BadInput(f"tau is {tau}; give a temperature above 0, or 0 for the limit")
    gap = z - z.max(-1, keepdims=True)
    mass = (gap == 0).astype(np.float64) if tau == 0 else np.exp(gap / tau)
    p: FloatArray = mass / mass.sum(-1, keepdims=True)
    return p  # N, C


def theory_inputs(
    p: ArrayLike, y: ArrayLike, a: ArrayLike, predicted: ArrayLike | None = None
) -> TheoryInputs:
    """Inputs of the statements from probabilities p (N, C), labels y (N) and A (N).

    `predicted` defaults to the argmax of p, the first among ties. Raises BadInput for wrong shapes
    and for values outside their ranges.
    """
    table, label, rectifier = (np.asarray(part) for part in (p, y, a))
    _check_table(table, label, rectifier)
    table = table / table.sum(-1, keepdims=True, dtype=np.float64)
    prediction = table.argmax(-1) if predicted is None else np.asarray(predicted)
    rows = np.arange(len(table))
    return TheoryInputs(
        table[rows, prediction],
        table[rows, label],
        rectifier.astype(np.float64),
        prediction == label,
    )


def theory_inputs_at(
    logits: ArrayLike, y: ArrayLike, a: ArrayLike, tau: float = 1.0
) -> TheoryInputs:
    """Inputs of the statements from logits (N, C) at temperature tau; predictions ignore tau."""
    return theory_inputs(probabilities(logits, tau), y, a, np.asarray(logits).argmax(-1))


def xi_geometric(a: FloatArray, a_star: FloatArray) -> FloatArray:
    """Smallest xi of bound (i): |log(A / A*)| <= log(2 / (2 - xi))."""
    low, high = np.minimum(a, a_star), np.maximum(a, a_star)
    ratio = np.divide(low, high, out=np.ones_like(high), where=high > 0)  # 0 / 0 is 1: no error
    return 2 * (1 - ratio)


def xi_arithmetic(a: FloatArray, a_star: FloatArray) -> FloatArray:
    """Smallest xi of bound (ii): |A - A*| <= xi / 2."""
    return 2 * np.abs(a - a_star)


def pointwise_xi(a: FloatArray, a_star: FloatArray) -> FloatArray:
    """Smallest xi of Definition 1, at most 2; bound (ii) always gives it."""
    return np.minimum(xi_geometric(a, a_star), xi_arithmetic(a, a_star))


def is_confident(con: ArrayLike, xi: ArrayLike) -> BoolArray:
    """Whether con > 1 / (2 - xi) by more than rounding; False for xi >= 1."""
    above: BoolArray = np.asarray(con) * (2 - np.asarray(xi)) > 1 + SLACK
    return above


def is_xi_accurate(inputs: TheoryInputs, xi: float) -> BoolArray:
    """Whether A is xi-error (Definition 1): bound (i) or bound (ii) holds."""
    _check("xi", xi, 0 <= xi < 1, "from 0 to below 1")
    by_ratio = xi_geometric(inputs.a, inputs.a_star) <= xi
    return by_ratio | (xi_arithmetic(inputs.a, inputs.a_star) <= xi)


def separated(score: FloatArray, correct: BoolArray) -> BoolArray:
    """Whether a score is above 1/2 for a correct prediction and below 1/2 for a wrong one."""
    return np.where(correct, score > 0.5, score < 0.5)


def lemma1(inputs: TheoryInputs) -> Claim:
    """Lemma 1: where con > 1/2, T-Con separates correct from wrong predictions at 1/2."""
    return Claim(is_confident(inputs.con, 0.0), separated(inputs.tcon, inputs.correct))


def theorem1(inputs: TheoryInputs, xi: float | None = None) -> Claim:
    """Theorem 1: where con > 1/(2 - xi) and A is xi-error, R-Con separates at 1/2.

    Without `xi` each image has its own smallest xi, which gives the largest premise.
    """
    premise = (
        is_confident(inputs.con, inputs.xi)
        if xi is None
        else is_xi_accurate(inputs, xi) & is_confident(inputs.con, xi)
    )
    return Claim(premise, separated(inputs.rcon, inputs.correct))


def theorem1_above(inputs: TheoryInputs, gamma: float) -> Claim:
    """Theorem 1 after a confidence threshold: con >= gamma and xi < 2 - 1/gamma."""
    _check_gamma(gamma)
    premise = (inputs.con >= gamma) & is_confident(gamma, inputs.xi)
    return Claim(premise, separated(inputs.rcon, inputs.correct))


def oracle(inputs: TheoryInputs) -> Claim:
    """A prediction with T-Con > 1/2 is correct, at any confidence."""
    return Claim(is_confident(inputs.tcon, 0.0), inputs.correct)


def con_above(xi: float) -> float:
    """Confidence that Theorem 1 requires: 1 / (2 - xi)."""
    _check("xi", xi, 0 <= xi < 1, "from 0 to below 1")
    return 1 / (2 - xi)


def xi_below(gamma: float) -> float:
    """Bound on xi that a confidence threshold gamma allows: 2 - 1/gamma."""
    _check_gamma(gamma)
    return 2 - 1 / gamma


def class_counts(xi: float, rho: float) -> tuple[float, float]:
    """N1 and N2 of Theorem 2: numbers of bins of equal ratio (down to rho) and of equal width."""
    _check("xi", xi, 0 < xi < 1, "between 0 and 1")
    _check("rho", rho, 0 < rho < 1, "between 0 and 1")
    return math.log(1 / rho) / math.log(2 / (2 - xi)) + 1, 2 / xi


def n_sub(xi: float, rho: float) -> int:
    """Number of classes of the classification task equivalent to a xi-error A (Theorem 2)."""
    return _ceil(min(class_counts(xi, rho)))


def arithmetic_bin(a: FloatArray, xi: float) -> IntArray:
    """Bin of each value, of width xi/2 but the last; two values in one bin satisfy bound (ii)."""
    last = _ceil(class_counts(xi, 0.5)[1]) - 1
    return np.minimum(np.floor(a * (2 / xi)).astype(np.int64), last)


def randomised_accuracy(tcon: FloatArray) -> float:
    """A_tau, the accuracy of labels drawn from the class probabilities: the mean of T-Con."""
    return float(tcon.mean())


def sampled_accuracy(p: FloatArray, y: IntArray, draws: int = 10, seed: int = 0) -> float:
    """A_tau estimated from `draws` labels drawn for every image."""
    cumulative = p.cumsum(-1)  # N, C
    drawn = np.random.default_rng(seed).random((len(p), draws)) * cumulative[:, -1:]
    labels = (drawn[:, :, None] >= cumulative[:, None, :]).sum(-1)  # N, draws
    return float((labels == np.asarray(y)[:, None]).mean())


def sampling_error(tcon: FloatArray, draws: int = 10) -> float:
    """Standard deviation of `sampled_accuracy` around `randomised_accuracy`."""
    return math.sqrt(float((tcon * (1 - tcon)).mean()) / (len(tcon) * draws))


def calibrated_accuracy(con: FloatArray, t: float) -> float:
    """Accuracy of predictions with con >= t if con were calibrated: mean con; 0.0 for none."""
    accepted = con[con >= t]
    return float(accepted.mean()) if len(accepted) else 0.0


def _ceil(count: float) -> int:
    """Ceiling of the count, unless it exceeds a whole number by rounding alone."""
    return math.ceil(count * (1 - SLACK))


def _check(name: str, value: float, holds: bool, words: str) -> None:
    if not holds:
        raise BadInput(f"{name} is {value}; give a number {words}")


def _check_gamma(gamma: float) -> None:
    _check("gamma", gamma, 0.5 < gamma <= 1, "above 0.5 and up to 1, such as 0.8")


def _check_table(p: NDArray[Any], y: NDArray[Any], a: NDArray[Any]) -> None:
    integer = y.dtype.kind in "iu"
    if (
        not integer
        or p.ndim != 2
        or y.shape != p.shape[:1]
        or a.shape != p.shape[:1]
        or len(p) == 0
    ):
        raise BadInput(
            f"p, y and a have shapes {p.shape}, {y.shape} and {a.shape}; "
            "give shapes (N, C), (N) and (N), with a whole number as label for every image"
        )
    sums = p.sum(-1, dtype=np.float64)
    if not (p.min() >= 0 and np.abs(sums - 1).max() <= ROW_SUM_ERROR):
        raise BadInput("p holds no probabilities; give non-negative rows that add up to 1")
    if not (a.min() >= 0 and a.max() <= 1):
        raise BadInput("a has values outside [0, 1]; give A itself, not its logit")
    if not (y.min() >= 0 and y.max() < p.shape[1]):
        raise BadInput(f"y has values outside the labels 0 to {p.shape[1] - 1}; give class indices")
