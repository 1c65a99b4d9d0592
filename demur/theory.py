"""What the paper proves, as functions that can be checked image by image; NumPy only.

    seen = answers(p, y, a)             # con, tcon and A of every image, and who is right
    theorem1(seen, xi=0.5).violated     # nowhere true, or there is a bug

A claim says where its premise holds and where its conclusion does. The statements are about real
numbers, so a strict inequality in a premise must hold by more than rounding.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from demur.errors import BadInput

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]

SLACK = 1e-12  # doubles err by 1e-16 here; what is nearer to a border than this is not judged
TABLE_ERROR = 1e-5  # how far a row of probabilities may be from 1, as fp32 ones are


class Claim(NamedTuple):
    """Where a statement's premise holds, and where its conclusion does."""

    premise: BoolArray
    conclusion: BoolArray

    @property
    def violated(self) -> BoolArray:
        """Where the premise holds and the conclusion does not: a bug, if the statement is true."""
        return self.premise & ~self.conclusion


@dataclass(frozen=True)
class TheoryInputs:
    """What the statements are about, one value per image."""

    con: FloatArray
    tcon: FloatArray
    a: FloatArray
    correct: BoolArray

    @property
    def a_star(self) -> FloatArray:
        """A*: the A that would make R-Con the true confidence."""
        return self.tcon / self.con

    @property
    def rcon(self) -> FloatArray:
        """Rectified confidence."""
        return self.con * self.a

    @property
    def xi(self) -> FloatArray:
        """The least xi of Definition 1."""
        return point_xi(self.a, self.a_star)


class Toy(NamedTuple):
    """Two answers whose order by a measure of class 0 turns round with the temperature."""

    measure: str
    first: tuple[float, ...]
    second: tuple[float, ...]


TOYS = (
    Toy("T-Con of wrong answers", (0, 3, -1000), (0, 2, 2)),
    Toy("confidence", (0, -1, -1000), (0, -2, -2)),
)


def probabilities(logits: ArrayLike, tau: float = 1.0) -> FloatArray:
    """Class probabilities at temperature tau; at 0 the limit, shared among the largest logits."""
    z = np.asarray(logits, dtype=np.float64)
    if tau < 0 or not math.isfinite(tau):
        raise BadInput(f"tau is {tau}; give a temperature above 0, or 0 for the limit")
    gap = z - z.max(-1, keepdims=True)
    mass = (gap == 0).astype(np.float64) if tau == 0 else np.exp(gap / tau)
    shares: FloatArray = mass / mass.sum(-1, keepdims=True)
    return shares  # N, C


def theory_inputs(
    p: ArrayLike, y: ArrayLike, a: ArrayLike, predicted: ArrayLike | None = None
) -> TheoryInputs:
    """The answers that a table of probabilities gives; of equally probable labels the first."""
    table, label, rectifier_logit = (np.asarray(part) for part in (p, y, a))
    _check_table(table, label, rectifier_logit)
    table = table / table.sum(-1, keepdims=True, dtype=np.float64)
    chosen = table.argmax(-1) if predicted is None else np.asarray(predicted)
    rows = np.arange(len(table))
    return TheoryInputs(
        table[rows, chosen], table[rows, label], rectifier_logit.astype(np.float64), chosen == label
    )


def theory_inputs_at(
    logits: ArrayLike, y: ArrayLike, a: ArrayLike, tau: float = 1.0
) -> TheoryInputs:
    """The answers that logits give at temperature tau, which leaves the labels as they are."""
    return theory_inputs(probabilities(logits, tau), y, a, np.asarray(logits).argmax(-1))


def xi_geometric(a: FloatArray, a_star: FloatArray) -> FloatArray:
    """The least xi of bound (i): |log(A / A*)| <= log(2 / (2 - xi))."""
    low, high = np.minimum(a, a_star), np.maximum(a, a_star)
    ratio = np.divide(low, high, out=np.ones_like(high), where=high > 0)  # equal zeros: no error
    return 2 * (1 - ratio)


def xi_arithmetic(a: FloatArray, a_star: FloatArray) -> FloatArray:
    """The least xi of bound (ii): |A - A*| <= xi / 2."""
    return 2 * np.abs(a - a_star)


def point_xi(a: FloatArray, a_star: FloatArray) -> FloatArray:
    """The least xi of Definition 1; it always comes from bound (ii), and may reach 2."""
    return np.minimum(xi_geometric(a, a_star), xi_arithmetic(a, a_star))


def confident(con: ArrayLike, xi: ArrayLike) -> BoolArray:
    """Where con > 1 / (2 - xi), by more than rounding; never for xi of 1 or more."""
    above: BoolArray = np.asarray(con) * (2 - np.asarray(xi)) > 1 + SLACK
    return above


def accurate(seen: TheoryInputs, xi: float) -> BoolArray:
    """Where A is xi-error: one of the two bounds holds (Definition 1)."""
    _check("xi", xi, 0 <= xi < 1, "from 0 to below 1")
    by_ratio = xi_geometric(seen.a, seen.a_star) <= xi
    return by_ratio | (xi_arithmetic(seen.a, seen.a_star) <= xi)


def separated(score: FloatArray, correct: BoolArray) -> BoolArray:
    """Where a score is above 1/2 for a right answer, or below 1/2 for a wrong one."""
    return np.where(correct, score > 0.5, score < 0.5)


def lemma1(seen: TheoryInputs) -> Claim:
    """Past con > 1/2, T-Con tells right from wrong at 1/2."""
    return Claim(confident(seen.con, 0.0), separated(seen.tcon, seen.correct))


def theorem1(seen: TheoryInputs, xi: float | None = None) -> Claim:
    """Past con > 1/(2 - xi), R-Con tells right from wrong at 1/2 where A is xi-error.

    Without xi each image is taken at its own, so that the premise holds wherever any xi allows it.
    """
    premise = (
        confident(seen.con, seen.xi) if xi is None else accurate(seen, xi) & confident(seen.con, xi)
    )
    return Claim(premise, separated(seen.rcon, seen.correct))


def theorem1_behind(seen: TheoryInputs, gamma: float) -> Claim:
    """Theorem 1 behind a confidence threshold: con >= gamma and xi < 2 - 1/gamma."""
    _check_gamma(gamma)
    premise = (seen.con >= gamma) & confident(gamma, seen.xi)
    return Claim(premise, separated(seen.rcon, seen.correct))


def oracle(seen: TheoryInputs) -> Claim:
    """An answer with T-Con above 1/2 is right, whatever its confidence."""
    return Claim(confident(seen.tcon, 0.0), seen.correct)


def con_above(xi: float) -> float:
    """The confidence that Theorem 1 asks for: 1 / (2 - xi)."""
    _check("xi", xi, 0 <= xi < 1, "from 0 to below 1")
    return 1 / (2 - xi)


def xi_below(gamma: float) -> float:
    """The xi that a confidence threshold leaves room for: 2 - 1/gamma."""
    _check_gamma(gamma)
    return 2 - 1 / gamma


def class_counts(xi: float, rho: float) -> tuple[float, float]:
    """N1 and N2 of Theorem 2: bins of equal ratio down to rho and one below; of equal width."""
    _check("xi", xi, 0 < xi < 1, "between 0 and 1")
    _check("rho", rho, 0 < rho < 1, "between 0 and 1")
    return math.log(1 / rho) / math.log(2 / (2 - xi)) + 1, 2 / xi


def n_sub(xi: float, rho: float) -> int:
    """The classes of the task that learning a xi-error A is turned into (Theorem 2)."""
    return _up(min(class_counts(xi, rho)))


def arithmetic_bin(a: FloatArray, xi: float) -> IntArray:
    """The bin of each value, all of width xi/2 but the last: two in one satisfy bound (ii)."""
    last = _up(class_counts(xi, 0.5)[1]) - 1
    return np.minimum(np.floor(a * (2 / xi)).astype(np.int64), last)


def geometric_bin(a: FloatArray, xi: float, rho: float) -> IntArray:
    """The bin of each value, all below rho in the first: two in another satisfy bound (i)."""
    last = _up(class_counts(xi, rho)[0]) - 1
    steps = np.log(np.maximum(a, rho) / rho) / math.log(2 / (2 - xi))
    return np.where(a < rho, 0, np.minimum(1 + np.floor(steps).astype(np.int64), last))


def randomised_accuracy(tcon: FloatArray) -> float:
    """A_tau: how often a label drawn from the probabilities is right, as the mean of T-Con."""
    return float(tcon.mean())


def sampled_accuracy(p: FloatArray, y: IntArray, draws: int = 10, seed: int = 0) -> float:
    """A_tau by drawing that many labels for every image."""
    rising = p.cumsum(-1)  # N, C
    drawn = np.random.default_rng(seed).random((len(p), draws)) * rising[:, -1:]
    labels = (drawn[:, :, None] >= rising[:, None, :]).sum(-1)  # N, draws
    return float((labels == np.asarray(y)[:, None]).mean())


def sampling_error(tcon: FloatArray, draws: int = 10) -> float:
    """The standard deviation of `sampled_accuracy` around `randomised_accuracy`."""
    return math.sqrt(float((tcon * (1 - tcon)).mean()) / (len(tcon) * draws))


def calibrated_accuracy(con: FloatArray, t: float) -> float:
    """The accuracy of con >= t if confidence were calibrated: the mean confidence; 0 for none."""
    kept = con[con >= t]
    return float(kept.mean()) if len(kept) else 0.0


def toy_values(toy: Toy, tau: float) -> tuple[float, float]:
    """The measure of both answers of a toy example at a temperature."""
    first, second = probabilities([toy.first, toy.second], tau)[:, 0].tolist()
    return first, second


def _up(count: float) -> int:
    """The count rounded up, unless it is whole but for rounding."""
    return math.ceil(count * (1 - SLACK))


def _check(name: str, value: float, holds: bool, words: str) -> None:
    if not holds:
        raise BadInput(f"{name} is {value}; give a number {words}")


def _check_gamma(gamma: float) -> None:
    _check("gamma", gamma, 0.5 < gamma <= 1, "above 0.5 and up to 1, such as 0.8")


def _check_table(p: NDArray[Any], y: NDArray[Any], a: NDArray[Any]) -> None:
    whole = y.dtype.kind in "iu"
    if not whole or p.ndim != 2 or y.shape != p.shape[:1] or a.shape != p.shape[:1] or len(p) == 0:
        raise BadInput(
            f"p, y and a have shapes {p.shape}, {y.shape} and {a.shape}; "
            "give a row of probabilities, a whole number as label and an A for every image"
        )
    sums = p.sum(-1, dtype=np.float64)
    if not (p.min() >= 0 and np.abs(sums - 1).max() <= TABLE_ERROR):
        raise BadInput("p is no table of probabilities; give rows of shares that add up to 1")
    if not (a.min() >= 0 and a.max() <= 1):
        raise BadInput("a leaves [0, 1]; give A itself, not its logit")
    if not (y.min() >= 0 and y.max() < p.shape[1]):
        raise BadInput(f"y leaves the labels 0 to {p.shape[1] - 1}; give one of them per image")
