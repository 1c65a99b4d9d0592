"""Square: random squares, kept where they help (Andriushchenko et al. 2020).

    Square(Linf(8/255))                      # AutoAttack's: 5000 queries, no gradient asked for
    Square(L2(0.5), queries=1000, objective=Evasion(RCon()), criterion=AcceptedError(RCon(), TPR(0.95)))

Squares shrink after 10, 50, 200 ... of them, whatever the budget: as in AutoAttack the schedule,
made for 10000 queries, is not rescaled. Each image has squares of its own.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from demur import noise
from demur.attacks.attack import Attack
from demur.attacks.batch import AttackBatch, PerImageState, exact, verify_success
from demur.attacks.criteria import Criterion, Misclassified
from demur.attacks.objectives import AttackStart, LogitMargin, Objective, ObjectiveState
from demur.balls import L2, Ball, Linf
from demur.errors import BadInput
from demur.field_types import NonNegativeInt, PositiveInt, UnitInterval
from demur.gradient import approximate_value
from demur.images import per_image
from demur.noise import Stream

HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)  # the share p is halved after these
TILES = 5  # along an edge of the first L2 pattern
DRAWN = 100  # queries whose random numbers are drawn at once
BLOCK = 20  # queries in which a device is asked nothing, so that it never waits for the host
PATTERN = 1  # its own purpose of random numbers
TINY = 1e-12


@dataclass
class SquareState(PerImageState):
    """How far images have come; every tensor has one row per image."""

    x_adv: Tensor
    value: Tensor  # of the goal
    claimed: Tensor  # to be broken, and not yet confirmed
    doubted: Tensor  # was claimed before and turned out to be whole

    def offered(
        self, proposal: Tensor, value: Tensor, helps: Tensor, claims: Tensor
    ) -> "SquareState":
        """With the proposals that help; what is claimed yields only to claims, and if doubted."""
        taken = helps & (~self.claimed | (self.doubted & claims))
        x_adv = torch.where(per_image(taken, proposal), proposal, self.x_adv)
        value, claimed = (
            torch.where(taken, new, old)
            for new, old in ((value, self.value), (claims, self.claimed))
        )
        return SquareState(x_adv, value, claimed, self.doubted)

    def refuted(self) -> "SquareState":
        """With no claim open: whoever made one was wrong."""
        doubted = self.doubted | self.claimed
        return SquareState(self.x_adv, self.value, torch.zeros_like(self.claimed), doubted)


@dataclass(frozen=True)
class Square(Attack):
    """A search by values alone: a square stays where it raises the goal or breaks the image.

    Only images that are not yet broken go on. The first query is a pattern all over the image.
    """

    ball: Ball
    queries: PositiveInt = 5000
    p: UnitInterval = 0.8  # of the pixels, in the first squares
    objective: Objective = LogitMargin()
    criterion: Criterion = Misclassified()
    seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.ball, Linf | L2):
            raise BadInput(f"Square is made for Linf and L2, not for {self.ball}")

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        """Attacked images: broken where that was found, else with every square that helped."""
        x, index, best = batch.x, batch.index, batch.x.clone()
        objective_state = self.objective.prepare(
            AttackStart(batch.model, x, x, batch.y, batch.target)
        )
        search = SquareState(
            x,
            *self._seen(batch, x, objective_state, 0),
            torch.zeros_like(batch.y, dtype=torch.bool),
        )
        alive = torch.arange(len(x), device=x.device)
        for query in range(self.queries):
            if query % BLOCK == 0:
                broken = verify_success(
                    self.criterion, batch.model, search.x_adv, batch.y, search.claimed
                )
                best[alive] = search.x_adv
                left = (~broken).nonzero()[:, 0]
                alive, batch, search = (
                    alive[left],
                    batch.select(left),
                    search.select(left).refuted(),
                )
                objective_state = tuple(part[left] for part in objective_state)
            if len(alive) == 0:
                break
            if query % DRAWN == 0:
                drawn = noise.derived(stream, query // DRAWN)
                chances = noise.uniform(self.seed, index, drawn, (DRAWN, 5 + x.shape[1])).to(x)
            draw = Draw(chances[alive, query % DRAWN], batch.x)
            if query:
                proposal = self._proposed(draw, search.x_adv, query)
            else:
                proposal = self._begun(draw, batch, noise.derived(stream, 0, PATTERN))
            search = self._judged(batch, search, proposal, objective_state, query)
        best[alive] = search.x_adv
        return best

    def _judged(
        self,
        batch: AttackBatch,
        search: SquareState,
        proposal: Tensor,
        objective_state: ObjectiveState,
        query: int,
    ) -> SquareState:
        """The search after a query."""
        value, claims = self._seen(batch, proposal, objective_state, query)
        rose = (value > search.value) | (query == 0)  # the pattern is where it all begins
        # near a border rough arithmetic would claim every proposal, again and again
        helps = rose | claims if exact(batch.model) else rose
        return search.offered(proposal, value, helps, claims)

    def _seen(
        self, batch: AttackBatch, x_adv: Tensor, objective_state: ObjectiveState, query: int
    ) -> tuple[Tensor, Tensor]:
        """The goal's value, and what seems to be broken."""
        inputs = self.objective.at_step(objective_state, query, self.queries)
        value, out = approximate_value(batch.model, self.objective, x_adv, batch.y, *inputs)
        return value, self.criterion(out, batch.y)

    def _begun(self, draw: "Draw", batch: AttackBatch, stream: Stream) -> Tensor:
        """The images with a pattern all over: stripes, or for L2 small hills."""
        signs = _signs(
            noise.uniform(self.seed, batch.index, stream, tuple(batch.x.shape[1:])).to(batch.x)
        )
        delta = _tiled(draw, signs) if isinstance(self.ball, L2) else signs[:, :, :1]
        return self.ball.project(batch.x, batch.x + self.ball.eps * self.ball.direction(delta))

    def _proposed(self, draw: "Draw", x_adv: Tensor, query: int) -> Tensor:
        """The images with another square."""
        x, eps = draw.x, self.ball.eps
        if isinstance(self.ball, L2):
            delta = _mixed(draw, x_adv - x, self._side(x, query, 3), eps)
            return self.ball.project(x, x + eps * self.ball.direction(delta))
        inside, _, _ = draw.window(0, self._side(x, query, 1))
        return self.ball.project(x, x_adv + inside * 2 * eps * draw.signs())

    def _side(self, x: Tensor, query: int, least: int) -> int:
        """The side of a query's square: odd where it may not be one pixel."""
        height, width = x.shape[-2:]
        share = self.p / 2 ** sum(query - 1 > number for number in HALVINGS)
        side = max(round(math.sqrt(share * height * width)), least)
        odd = side | 1 if least > 1 else side
        return min(odd, int(height), int(width))


@dataclass(frozen=True)
class Draw:
    """The random choices of one query, one row per image."""

    chances: Tensor  # N, 5 + C: the corners of two squares, which way up, a sign per channel
    x: Tensor  # N, C, H, W

    def signs(self) -> Tensor:
        """A coin for each channel: -1 or 1."""
        return _signs(self.chances[:, 5:, None, None])

    def window(self, which: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
        """A square in each image: which pixels are inside, and their rows and columns in it."""
        corner, places, inside = self.chances[:, 2 * which : 2 * which + 2], [], []
        for axis, length in enumerate(self.x.shape[-2:]):
            first = (corner[:, axis, None] * (length - side + 1)).long().clamp(max=length - side)
            place = torch.arange(length, device=corner.device) - first  # N, H or N, W
            inside.append((place >= 0) & (place < side))
            places.append(place.clamp(0, side - 1))
        both = inside[0][:, None, :, None] & inside[1][:, None, None, :]  # N, 1, H, W
        return both, places[0], places[1]

    def turned(self, side: int, rows: Tensor, columns: Tensor) -> Tensor:
        """The pattern of that side at rows and columns, lying or standing by a coin: N, 1, H, W."""
        pattern = _pattern_on(self.x.device, self.x.dtype, side)
        down, across = rows[:, :, None], columns[:, None, :]
        lies = self.chances[:, 4, None, None] < 0.5
        return torch.where(lies, pattern[down, across], pattern[across, down])[:, None]


def _signs(u: Tensor) -> Tensor:
    """Coins: -1 or 1."""
    return 1 - 2 * (u < 0.5).to(u)


def _tiled(draw: Draw, signs: Tensor) -> Tensor:
    """Small patterns side by side, each with its own sign."""
    count, _, height, width = signs.shape
    side = max(1, min(height, width) // TILES)
    rows, columns = (torch.arange(length, device=signs.device) for length in (height, width))
    own = ((places % side).expand(count, -1) for places in (rows, columns))
    return signs[:, :, rows // side][..., columns // side] * draw.turned(side, *own)


def _mixed(draw: Draw, delta: Tensor, side: int, eps: float) -> Tensor:
    """The change with what two squares and the unused budget hold, moved into the first."""
    channels = delta.shape[1]
    here, rows, columns = draw.window(0, side)
    there, _, _ = draw.window(1, side)
    pattern = draw.signs() * draw.turned(side, rows, columns)
    old = here * delta
    fresh = here * pattern + old / _norm(old)
    unused = (eps**2 - delta.square().sum((1, 2, 3), keepdim=True)).clamp_min(0) / channels
    budget = (_norm((here | there) * delta).square() + unused).sqrt()
    return torch.where(here, budget * fresh / _norm(fresh), delta.masked_fill(there, 0))


def _norm(delta: Tensor) -> Tensor:
    """The length of each channel's change, never nothing."""
    return delta.square().sum((-2, -1), keepdim=True).sqrt() + TINY


@cache
def _pattern_on(device: torch.device, dtype: torch.dtype, side: int) -> Tensor:
    """The pattern on a device, brought there once: that makes it wait."""
    return _pattern(side).to(device, dtype)


def _pattern(side: int) -> Tensor:
    """Two hills of one square, the lower one upside down, of length one together."""
    upper = side // 2
    pattern = torch.cat((_hill(upper, side), -_hill(side - upper, side)))
    return pattern / _norm(pattern)


def _hill(height: int, width: int) -> Tensor:
    """Rectangles stacked around the centre, each larger one adding less; of length one."""
    if height == 0:
        return torch.zeros(0, width, dtype=torch.float64)
    down = (torch.arange(height) - height // 2).abs()
    across = (torch.arange(width) - width // 2).abs()
    ring = torch.maximum(down[:, None], across)
    layers = 1 / torch.arange(1, max(height, width) // 2 + 2, dtype=torch.float64) ** 2
    hill = layers.flip(0).cumsum(0).flip(0)[ring]  # all layers at least as wide as the ring
    return hill / _norm(hill)
