"""Square attack: a random search without gradients (Andriushchenko et al. 2020).

As in AutoAttack, the schedule of square sizes is that for 10000 queries and is not rescaled to
another budget. Unlike in the authors' code, each image has its own squares.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from demur import noise
from demur.attacks.attack import AttackBatch, Criterion, Misclassified
from demur.attacks.attack_model import AttackModel
from demur.attacks.balls import L1, L2, Ball, Linf
from demur.attacks.driver import IterativeAttack, SearchState
from demur.attacks.objectives.classification import Objective, UntargetedMargin
from demur.errors import BadInput
from demur.images import per_image
from demur.spec.field_types import NonNegativeInt, PositiveInt, UnitInterval

HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)  # queries after which p is halved
TILES = 5  # along an edge of the initial L2 perturbation
DRAW_AHEAD = 100  # queries whose random numbers are drawn at once
VERIFY_EVERY = 20  # queries between verifications, so that the GPU never waits for the host
PATTERN = 1  # key of the random stream of the initial perturbation
NORM_OFFSET = 1e-12  # added to norms that divide, as in the reference code


@dataclass
class SquareState(SearchState):
    """The state of the search; every tensor has one row per image."""

    refuted: Tensor  # an earlier candidate of this image failed verification, bool
    uniforms: Tensor  # random numbers of the next queries

    def update(
        self, proposal: Tensor, value: Tensor, candidate: Tensor, first: bool, exact: bool
    ) -> "SquareState":
        """Return the state with the better proposals.

        A candidate is kept until its verification. Only an image with a refuted candidate may
        exchange it for a better one. The `first` query, the initial perturbation, is always taken.
        Near the boundary a model that is not `exact` would call every proposal a success, so there
        a candidate must also raise the objective.
        """
        better = (value > self.value) | first
        better = better | candidate if exact else better
        taken = better & (~self.candidate | (self.refuted & candidate))
        return replace(
            self, x_adv=torch.where(per_image(taken, proposal), proposal, self.x_adv),
            value=torch.where(taken, value, self.value),
            candidate=torch.where(taken, candidate, self.candidate),
        )  # fmt: skip


@dataclass(frozen=True)
class Square(IterativeAttack[SquareState]):
    """Square attack: keep a random square where it raises the objective or succeeds.

    The first query perturbs the whole image, with stripes for Linf and tiles for L2. Images leave
    after a verified success.

    Args:
        ball: Linf, L2 or L1; another ball raises BadInput.
        queries: The number of forward passes.
        p: The fraction of pixels in the first squares.
        objective: What the attack maximises.
        criterion: The success criterion.
        seed: The seed of all random numbers.
    """

    ball: Ball
    queries: PositiveInt = 5000
    p: UnitInterval = 0.8
    objective: Objective = UntargetedMargin()
    criterion: Criterion = Misclassified()
    seed: NonNegativeInt = 0

    keeps_candidates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.ball, Linf | L2 | L1):
            raise BadInput(f"Square.ball must be Linf, L2 or L1, not {self.ball}")

    @property
    def last_step(self) -> int:
        return self.queries

    def verification_interval(self, model: AttackModel) -> int:
        return VERIFY_EVERY

    def begin(self, batch: AttackBatch) -> tuple[AttackBatch, SquareState]:
        batch = batch.prepare(self.objective, batch.x)
        value, candidate = self._evaluate(batch, batch.x, 0)
        refuted = torch.zeros_like(candidate)
        return batch, SquareState(batch.x, value, candidate, refuted, self._draw(batch, 0))

    def step(self, batch: AttackBatch, state: SquareState, step: int) -> SquareState:
        if step % VERIFY_EVERY == 0:  # the driver has just verified the candidates
            none, refuted = torch.zeros_like(state.candidate), state.refuted | state.candidate
            state = replace(state, candidate=none, refuted=refuted)
        if step and step % DRAW_AHEAD == 0:
            state = replace(state, uniforms=self._draw(batch, step // DRAW_AHEAD))
        draw = SquareDraw(state.uniforms[:, step % DRAW_AHEAD], batch.x)
        if step:
            proposal = self._propose(draw, state.x_adv, step)
        else:
            proposal = self._initial_proposal(draw, batch)
        value, candidate = self._evaluate(batch, proposal, step)
        return state.update(proposal, value, candidate, step == 0, batch.model.exact)

    def _draw(self, batch: AttackBatch, block: int) -> Tensor:
        """Return the random numbers of DRAW_AHEAD queries, N, DRAW_AHEAD, 5 + C."""
        stream, shape = noise.derive_seed(batch.stream, block), (DRAW_AHEAD, 5 + batch.x.shape[1])
        return noise.uniform(self.seed, batch.index, stream, shape).to(batch.x)

    def _evaluate(self, batch: AttackBatch, x_adv: Tensor, query: int) -> tuple[Tensor, Tensor]:
        """Return the value of the objective, N, and the candidate successes, N, bool."""
        inputs = self.objective.at_step(batch.objective_state, query, self.queries)
        value, out = batch.model.value(self.objective, x_adv, batch.y, *inputs)
        return value, self.criterion(out, batch.y)

    def _initial_proposal(self, draw: "SquareDraw", batch: AttackBatch) -> Tensor:
        """Return the images with vertical stripes (Linf) or tiles (L2, L1) of random sign."""
        stream = noise.derive_seed(batch.stream, 0, PATTERN)
        uniforms = noise.uniform(self.seed, batch.index, stream, tuple(batch.x.shape[1:]))
        signs = _random_signs(uniforms.to(batch.x))
        if isinstance(self.ball, L1):
            return self.ball.project(batch.x, batch.x + _tiles(draw, signs, 1))
        delta = _tiles(draw, signs, 2) if isinstance(self.ball, L2) else signs[:, :, :1]
        return self.ball.project(batch.x, batch.x + self.ball.eps * self.ball.direction(delta))

    def _propose(self, draw: "SquareDraw", x_adv: Tensor, query: int) -> Tensor:
        """Return the images with one more square (Linf) or with two changed ones (L2, L1)."""
        x, eps = draw.x, self.ball.eps
        if isinstance(self.ball, L2):
            delta = _moved_norm(draw, x_adv - x, self._side(x, query, 3), eps, 2)
            return self.ball.project(x, x + eps * self.ball.direction(delta))
        if isinstance(self.ball, L1):
            delta = _moved_norm(draw, x_adv - x, self._side(x, query, 3), eps, 1)
            return self.ball.project(x, x + delta)
        side = self._side(x, query, 1)
        pixels = draw.pixels(side).expand(-1, x.shape[1], -1)  # N, C, side²
        step = _numbers_on(x.device, x.dtype, 2 * eps).copysign(draw.uniforms[:, 5:, None] - 0.5)
        inside = x_adv.flatten(2).gather(2, pixels) + step
        inside = self.ball.project(x.flatten(2).gather(2, pixels), inside)
        return x_adv.flatten(2).scatter(2, pixels, inside).view_as(x)

    def _side(self, x: Tensor, query: int, minimum: int) -> int:
        """Return the side of a query's square in pixels; it is odd for minimum > 1 (L2, L1)."""
        height, width = x.shape[-2:]
        fraction = self.p / 2 ** sum(query - 1 > number for number in HALVINGS)
        side = max(round(math.sqrt(fraction * height * width)), minimum)
        side = side | 1 if minimum > 1 else side
        return min(side, int(height), int(width))


@dataclass(frozen=True)
class SquareDraw:
    """The random choices of one query, one row per image."""

    uniforms: Tensor  # N, 5 + C: corners of two squares (4), orientation (1), sign per channel (C)
    x: Tensor  # N, C, H, W

    def pixels(self, side: int) -> Tensor:
        """Return the positions of the first square's pixels in a flat image, N, 1, side * side."""
        height, width = self.x.shape[-2:]
        most = _numbers_on(self.x.device, self.uniforms.dtype, height - side, width - side)
        corner = torch.minimum(self.uniforms[:, :2] * (most + 1), most).long()  # row and column
        first = corner[:, 0] * width + corner[:, 1]
        return first[:, None, None] + _offsets_on(self.x.device, side, width)

    def window(self, which: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pixels of the square, N, 1, H, W, bool, and their rows and columns in it."""
        positions, inside = [], []
        for axis, length in enumerate(self.x.shape[-2:]):
            most, uniform = length - side, self.uniforms[:, 2 * which + axis, None]
            first = (uniform * (most + 1)).long().clamp(max=most)  # row or column, N, 1
            position = torch.arange(length, device=first.device) - first  # N, H or N, W
            inside.append((position >= 0) & (position < side))
            positions.append(position.clamp(0, side - 1))
        mask = inside[0][:, None, :, None] & inside[1][:, None, None, :]  # N, 1, H, W
        return mask, positions[0], positions[1]

    def oriented_pattern(self, side: int, rows: Tensor, columns: Tensor, p: int) -> Tensor:
        """Return the pattern of norm p at rows and columns, transposed at random, N, 1, H, W."""
        pattern = _pattern(side, p, self.x.device, self.x.dtype)
        down, across = rows[:, :, None], columns[:, None, :]
        upright = self.uniforms[:, 4, None, None] < 0.5
        return torch.where(upright, pattern[down, across], pattern[across, down])[:, None]


def _random_signs(u: Tensor) -> Tensor:
    return 1 - 2 * (u < 0.5).to(u)


def _tiles(draw: SquareDraw, signs: Tensor, p: int) -> Tensor:
    """Return small patterns of norm p side by side, each with its own sign, N, C, H, W."""
    count, _, height, width = signs.shape
    side = max(1, min(height, width) // TILES)
    rows, columns = (torch.arange(length, device=signs.device) for length in (height, width))
    down, across = ((positions % side).expand(count, -1) for positions in (rows, columns))
    pattern = draw.oriented_pattern(side, down, across, p)
    return signs[:, :, rows // side][..., columns // side] * pattern


def _moved_norm(draw: SquareDraw, delta: Tensor, side: int, eps: float, p: int) -> Tensor:
    """Return the perturbation with the norm (p) of two squares moved into the first one.

    The first square also takes the part of eps that the perturbation does not use yet.
    """
    channels = delta.shape[1]
    first, rows, columns = draw.window(0, side)
    second, _, _ = draw.window(1, side)
    signs = _random_signs(draw.uniforms[:, 5:, None, None])  # N, C, 1, 1
    pattern = signs * draw.oriented_pattern(side, rows, columns, p)
    old = first * delta
    new = first * pattern + old / _norm(old, p)
    unused = (eps**p - delta.abs().pow(p).sum((1, 2, 3), keepdim=True)).clamp_min(0) / channels
    budget = (_norm((first | second) * delta, p).pow(p) + unused) ** (1 / p)
    budget = budget * channels if p == 1 else budget  # as in the authors' code
    return torch.where(first, budget * new / _norm(new, p), delta.masked_fill(second, 0))


def _norm(delta: Tensor, p: int) -> Tensor:
    """Return the L2 norm (p = 2) or L1 norm of each channel, plus a tiny number to divide by."""
    return delta.abs().pow(p).sum((-2, -1), keepdim=True).pow(1 / p) + NORM_OFFSET


@cache
def _numbers_on(device: torch.device, dtype: torch.dtype, *numbers: float) -> Tensor:
    """Return numbers on a device, cached because the copy synchronises host and device."""
    return torch.tensor(numbers, dtype=dtype, device=device)


@cache
def _offsets_on(device: torch.device, side: int, width: int) -> Tensor:
    """Return the positions of a square's pixels after the first one in a flat image, side²."""
    steps = torch.arange(side, device=device)
    return (steps[:, None] * width + steps).flatten()


@cache
def _pattern(
    side: int, p: int = 2, device: torch.device | None = None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return the pattern of the paper: two stacked bumps of opposite sign, of norm 1."""
    upper = side // 2
    pattern = torch.cat((_bump(upper, side, p), -_bump(side - upper, side, p)))
    return (pattern / _norm(pattern, p)).to(device, dtype)


def _bump(height: int, width: int, p: int) -> Tensor:
    """Return a sum of centred rectangles, larger ones with smaller weight, of norm 1."""
    if height == 0:
        return torch.zeros(0, width, dtype=torch.float64)
    down = (torch.arange(height) - height // 2).abs()
    across = (torch.arange(width) - width // 2).abs()
    ring = torch.maximum(down[:, None], across)
    layers = 1 / torch.arange(1, max(height, width) // 2 + 2, dtype=torch.float64) ** (4 / p)
    bump = layers.flip(0).cumsum(0).flip(0)[ring]  # sum of the layers that cover the ring
    return bump / _norm(bump, p)
