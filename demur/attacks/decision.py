"""Attacks that read decisions only: no gradient, no score (HopSkipJump and RayS).

A query is one forward pass of one image, of which an attack learns whether the criterion holds. The
searches start at a success far away. All images advance together, each with its own budget.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, pairwise
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from demur import noise, progress
from demur.attacks.attack import Attack, AttackBatch, Criterion, Misclassified
from demur.attacks.balls import L2, Ball, Linf
from demur.attacks.driver import Found
from demur.errors import BadInput
from demur.images import per_image
from demur.noise import Stream
from demur.output import as_output
from demur.spec.field_types import NonNegativeInt, PositiveInt

STARTS = 12  # starting points of which the closest success is taken
STARTS_AGAIN = 3  # in later restarts, which must not all begin at the same place
MORE_STARTS = 100  # the most that are tried where none of these succeeds
START_TOLERANCE = 0.1  # relative, of the distance of a starting point
LEAST_QUERIES = 1000  # of a restart; fewer queries have fewer restarts
ROWS = 64  # images of one forward pass where fewer are under attack
SAMPLES = 16  # probes of a gradient estimate that are drawn at once
FIRST_PROBES = 50  # of the first gradient estimate; estimate t has sqrt(t) times as many
MOMENTUM = 0.8  # weight of the earlier gradient estimates
MIN_STEP = 1e-3  # relative to the distance; a step that is still no success is not taken
GAIN = 1e-3  # relative decrease of the distance that a new direction must bring
START, PROBE = 1, 2  # keys of independent random streams


class BoundarySearch:
    """Decisions on a batch of images within a budget of queries, and the closest successes."""

    def __init__(self, attack: "DecisionAttack", batch: AttackBatch, budget: int) -> None:
        self.attack, self.batch, self.budget = attack, batch, budget
        self.ball, self.x = attack.ball, batch.x
        self.used = torch.zeros_like(batch.y)  # queries of each image, N
        self.closest = batch.x.clone()  # success of each image, or the image itself
        self.distance = batch.x.new_full((len(batch.x),), torch.inf)  # of the closest success, N
        rounding = 4 * torch.finfo(batch.x.dtype).eps
        self.target = 0.0 if attack.any_distance else attack.ball.eps + rounding
        self.rows_at_once = max(len(batch.x), ROWS)
        self.ask(torch.arange(len(self.x), device=self.x.device), self.x)

    @property
    def done(self) -> Tensor:
        """The images that need no more queries, N, bool."""
        return (self.distance <= self.target) | (self.used >= self.budget)

    def rows(self, among: Tensor | None = None) -> Tensor:
        """Return the rows, or those of `among`, that are not done."""
        progress.report(int(self.used.sum()), self.budget * len(self.used))
        return (~self.done).nonzero()[:, 0] if among is None else among[~self.done[among]]

    def ask(self, rows: Tensor, images: Tensor) -> Tensor:
        """Return 1 for a success, -1 for none and 0 where the image is done, shape R or R, S.

        `images` are one for each of the R rows of the batch, or several, R, S, C, H, W.
        """
        single = images.ndim == 4
        images = images[:, None] if single else images
        shape, left = images.shape[:2], self.budget - self.used[rows]
        left = left.masked_fill(self.done[rows], 0)
        asked = torch.arange(shape[1], device=rows.device) < left[:, None]
        self.used[rows] += asked.sum(1)
        answers = torch.zeros(shape, device=rows.device)
        queries = asked.flatten().nonzero()[:, 0]
        for some in queries.split(self.rows_at_once) if len(queries) else ():  # else an empty one
            owners = rows[some // shape[1]]
            with torch.no_grad():
                out = as_output(self.batch.model(images.flatten(0, 1)[some]))
            success = self.attack.criterion(out, self.batch.y[owners])
            answers.view(-1)[some] = 2.0 * success - 1
        self._keep_closest(rows, images, answers > 0)
        return answers[:, 0] if single else answers

    def _keep_closest(self, rows: Tensor, images: Tensor, success: Tensor) -> None:
        delta = (images - self.x[rows][:, None]).flatten(0, 1)
        distance = self.ball.norm(delta).view_as(success).where(success, torch.inf)
        nearest, which = distance.min(1)
        closer = (nearest < self.distance[rows]).nonzero()[:, 0]
        self.distance[rows[closer]] = nearest[closer]
        self.closest[rows[closer]] = images[closer, which[closer]]

    def at_radius(self, rows: Tensor, images: Tensor, radius: Tensor) -> Tensor:
        """Return the points of the paths from x to `images` at the given distances, R."""
        x, size = self.x[rows], per_image(radius, images)
        if isinstance(self.ball, Linf):
            return (x + (images - x).clamp(-size, size)).clamp(0, 1)
        length = per_image(self.ball.norm(images - x), images).clamp_min(1e-12)
        return (x + (images - x) * (size / length).clamp(max=1)).clamp(0, 1)

    def bisect(self, rows: Tensor, images: Tensor, tolerance: float) -> Tensor:
        """Return successes near the boundary, on the paths from x to the successes `images`.

        The first query is at the radius of the ball, inside of which the search ends.
        """
        best, high = images.clone(), self.ball.norm(images - self.x[rows])
        low, middle = torch.zeros_like(high), torch.full_like(high, self.target)
        while True:
            middle = torch.where((middle > low) & (middle < high), middle, (low + high) / 2)
            wide = (high - low > tolerance * high) & ~self.done[rows]
            some = wide.nonzero()[:, 0]
            if len(some) == 0:
                return best
            points = self.at_radius(rows[some], images[some], middle[some])
            answer = self.ask(rows[some], points)
            success, failure = some[answer > 0], some[answer < 0]
            best[success], high[success] = points[answer > 0], middle[success]
            low[failure] = middle[failure]
            middle = (low + high) / 2


@dataclass(frozen=True)
class DecisionAttack(Attack, ABC):
    """A search along the decision boundary for the closest success; subclasses supply `search`."""

    norms: ClassVar[tuple[type[Ball], ...]] = (Linf, L2)

    ball: Ball
    queries: PositiveInt = 5000
    restarts: PositiveInt = 2
    any_distance: bool = False
    criterion: Criterion = Misclassified()
    seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.ball, self.norms):
            names = " or ".join(norm.__name__ for norm in self.norms)
            raise BadInput(f"{type(self).__name__}.ball must be {names}, not {self.ball}")

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        best = Found.nothing(batch)
        restarts = min(self.restarts, max(1, self.queries // LEAST_QUERIES))
        for number, rows in best.attempts(restarts):
            budget = (self.queries + number) // restarts  # these sum to `queries`
            with progress.part(number, restarts):
                found = BoundarySearch(self, batch.select(rows), budget)
                key = noise.derive_seed(stream, number)
                self.find_starts(found, key, again=number > 0)
                self.search(found, key)
            best.add(rows, Found(found.closest, -found.distance, found.distance <= found.target))
        near = -best.value < torch.inf if self.any_distance else best.success
        return torch.where(per_image(near, batch.x), best.x_adv, batch.x)

    @abstractmethod
    def search(self, found: BoundarySearch, stream: Stream) -> None:
        """Bring the closest successes closer until the images are done."""

    def find_starts(self, found: BoundarySearch, stream: Stream, again: bool = False) -> None:
        """Find a first success of each image: the closest of several, near the boundary."""
        for number in range(MORE_STARTS):
            rows = found.rows()
            if number >= (STARTS_AGAIN if again else STARTS):
                rows = rows[found.distance[rows].isinf()]
            if len(rows) == 0:
                return
            key = noise.derive_seed(stream, START, number)
            uniform = partial(noise.uniform, self.seed, found.batch.index[rows], key)
            kind = number + (len(TURNED) if again else 0)
            points = starting_points(found.x[rows], kind, uniform)
            success = (found.ask(rows, points) > 0).nonzero()[:, 0]
            found.bisect(rows[success], points[success], START_TOLERANCE)


TURNED: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: (x < 0.5).to(x), lambda x: x.flip(-1), lambda x: x.flip(-2, -1), lambda x: 1 - x,
)  # fmt: skip
CELLS = (1, 2, 4, 8, None)  # along an edge of the noise; None is a cell per pixel


def starting_points(x: Tensor, kind: int, uniform: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
    """Return images far from x: inverted, mirrored or turned, then noise of several scales.

    They depend on no other image of the batch.
    """
    if kind < len(TURNED):
        return TURNED[kind](x)
    channels, height, width = x.shape[1:]
    cells = CELLS[kind % len(CELLS)] or max(height, width)
    values = uniform((channels, min(cells, height), min(cells, width))).to(x)
    values = values if kind % 2 else values.round()  # every second one has extreme pixels
    return interpolate(values, size=(height, width))


@dataclass(frozen=True)
class HopSkipJump(DecisionAttack):
    """HopSkipJump: estimate the normal of the boundary from decisions, and step along it.

    Each step starts at a boundary point at distance r from the image. Probes at distance
    3 r / sqrt(D) around it, D pixels, estimate the normal; the attack then moves along it and
    bisects back to the boundary. Four things differ from the paper. The probes are farther away
    (there r / D), so that rounded images or steps in the model do not hide the boundary. Earlier
    estimates count with weight 0.8. The first try of a step goes from the image along the normal,
    which is optimal for a flat boundary. The search starts at the closest of several points.

    Args:
        ball: Linf or L2; another ball raises BadInput.
        queries: The most forward passes of an image, over all restarts.
        restarts: The searches from other starting points, which share the queries; there are
            fewer where each would have less than 1000.
        any_distance: Return the closest success even outside the ball. By default an image leaves
            with its first success inside the ball, and is returned unchanged without one.
        criterion: The success criterion, of which the attack sees only whether it holds.
        seed: The seed of all random numbers.

    Example:
        >>> import torch
        >>> from demur import L2, HopSkipJump
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> attack = HopSkipJump(L2(0.5), queries=100)
        >>> x_adv = attack(model, torch.rand(4, 1, 8, 8), torch.arange(4))
    """

    def search(self, found: BoundarySearch, stream: Stream) -> None:
        size, step = found.x[0].numel(), 0
        points, normals = found.closest.clone(), torch.zeros_like(found.x)
        rows = found.rows(found.distance.isfinite().nonzero()[:, 0])
        while len(rows):
            step += 1
            points[rows] = found.bisect(rows, points[rows], 1 / (4 * size))
            rows = found.rows(rows)
            key = noise.derive_seed(stream, PROBE, step)
            probes = int(FIRST_PROBES * step**0.5)
            normal = self._normal(found, rows, points[rows], probes, key)
            normals[rows] = normal + MOMENTUM * normals[rows]
            direction = self.ball.direction(normals[rows])
            points[rows] = self._step(found, rows, points[rows], direction, step**-0.5)
            rows = found.rows(rows)

    def _normal(
        self, found: BoundarySearch, rows: Tensor, points: Tensor, probes: int, stream: Stream
    ) -> Tensor:
        """Return the estimated normal of the boundary towards successes, of unit L2 norm."""
        total, weighted = torch.zeros_like(points), torch.zeros_like(points)
        answers, count = points.new_zeros(len(rows)), points.new_zeros(len(rows))
        radius = 3 * self.ball.norm(points - found.x[rows]) / found.x[0].numel() ** 0.5
        centre = points[:, None]  # R, 1, C, H, W
        for first in range(0, probes, SAMPLES):
            shape = (min(SAMPLES, probes - first), *points.shape[1:])
            key = noise.derive_seed(stream, first)
            u = noise.normal(self.seed, found.batch.index[rows], key, shape).to(points)
            length = (radius[:, None] / u.flatten(2).norm(dim=2))[..., None, None, None]
            images = (centre + length * u).clamp(0, 1)
            answer = found.ask(rows, images).to(points)  # R, S
            moved = (images - centre).flatten(2) * answer.abs()[..., None]  # 0 where not asked
            total += moved.sum(1).view_as(points)
            weighted += (moved * answer[..., None]).sum(1).view_as(points)
            answers, count = answers + answer.sum(1), count + answer.abs().sum(1)
        mean = answers / count.clamp_min(1)
        mean = torch.where(mean.abs() < 1, mean, 0.0)  # probes of one kind still have a mean
        normal = weighted - per_image(mean, points) * total
        return normal / per_image(normal.flatten(1).norm(dim=1), points).clamp_min(1e-12)

    def _step(
        self, found: BoundarySearch, rows: Tensor, points: Tensor, direction: Tensor, size: float
    ) -> Tensor:
        """Return successes along the direction: from the image, else from the points."""
        x, new, pending = found.x[rows], points.clone(), torch.arange(len(rows)).to(rows)
        distance = per_image(self.ball.norm(points - x), x)
        tried, smallest = (x + (1 - GAIN) * distance * direction).clamp(0, 1), MIN_STEP * size
        while len(pending) and size > smallest:
            success = found.ask(rows[pending], tried) > 0
            new[pending[success]] = tried[success]
            pending = pending[~success & ~found.done[rows[pending]]]
            moved = size * distance[pending] * direction[pending]
            tried, size = (points[pending] + moved).clamp(0, 1), size / 2
        return new


@dataclass(frozen=True)
class RayS(DecisionAttack):
    """RayS: search the signs of an Linf perturbation, flipping blocks from halves to pixels.

    A direction is one sign per pixel. A block of it stays flipped if the image is then a success
    at a smaller distance, which is bisected. The blocks halve down to single pixels; then the
    search repeats. Unlike in the paper it starts at the closest of several directions. The fields
    are those of `HopSkipJump`; a ball other than Linf raises BadInput.

    Example:
        >>> import torch
        >>> from demur import Linf, RayS
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> attack = RayS(Linf(0.1), queries=100)
        >>> x_adv = attack(model, torch.rand(4, 1, 8, 8), torch.arange(4))
    """

    norms: ClassVar[tuple[type[Ball], ...]] = (Linf,)

    restarts: PositiveInt = 4

    def search(self, found: BoundarySearch, stream: Stream) -> None:
        signs = torch.where(found.closest > found.x, 1.0, -1.0).to(found.x)
        rows = found.rows(found.distance.isfinite().nonzero()[:, 0])
        for begin, end in _blocks(found.x[0].numel()):
            if len(rows) == 0:
                return
            turned = signs[rows].flatten(1)
            turned[:, begin:end] *= -1
            turned = turned.view_as(found.x[rows])
            reach = per_image((1 - GAIN) * found.distance[rows], turned)
            images = (found.x[rows] + reach * turned).clamp(0, 1)
            success = (found.ask(rows, images) > 0).nonzero()[:, 0]
            signs[rows[success]] = turned[success]
            found.bisect(rows[success], images[success], GAIN)
            rows = found.rows(rows)


def _blocks(size: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last position of blocks: none, halves, quarters ... pixels, again."""
    yield 0, 0
    for power in cycle(range(1, max(2, (size - 1).bit_length() + 1))):
        parts = min(2**power, size)
        yield from pairwise(size * part // parts for part in range(parts + 1))
