"""Signs that an audit overstates robustness, found by asking the model about a few images.

Answers are logits divided by the median margin of the clean images, and scores divided by their
spread, so that one tolerance suits every model. docs/guides/audit.md lists all signs.
"""

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from demur import noise
from demur.attacks import Objective, SingleMargin, UntargetedMargin
from demur.attacks.attack import RuleCriterion
from demur.attacks.attack_model import CheckedModel, NoGradientError
from demur.attacks.balls import L2, Ball, Linf
from demur.attacks.objectives.classification import ANY
from demur.audits.ensemble_result import EnsembleResult
from demur.evaluate.probing import with_same_draw
from demur.images import per_image
from demur.metrics import wilson
from demur.output import as_output, prediction
from demur.sanity.evidence import CheckResult, Flag, too_many

SLOPE = "the gradient is not the slope of the objective"
JUMP = "the decision jumps"
CHANGE = "answers depend on more than the image"
STUCK = "the loss rose and nothing flipped"
MASKED = "attacks without gradients succeed where gradients fail"
UNCONFIRMED = "successes were not confirmed"
IMPLAUSIBLE = "the figure is implausible"
# The largest share of images that no attack is known to break, by radius: of RobustBench's entries
# (commit 78fcc9e of 31 March 2025), with external evaluations; more needs more evidence.
BEST_KNOWN: dict[tuple[str, type[Ball]], tuple[float, float]] = {
    ("cifar10", Linf): (8 / 255, 0.7371),  # Bartoldson2024Adversarial_WRN-94-16
    ("cifar10", L2): (0.5, 0.8497),  # Wang2023Better_WRN-70-16
    ("cifar100", Linf): (8 / 255, 0.4266),  # Wang2023Better_WRN-70-16
    ("imagenet", Linf): (4 / 255, 0.5968),  # Xu2024MIMIR_Swin-L
}
ASKED, ALONE = 64, 8  # images of a check, and those that are asked one by one and again
REPEATS = 100
DRAWS = 3  # of a randomised model that are checked
BOTH = "attacks with and attacks without gradients"
A_DRAW = "a model that draws from the generators of torch, NumPy or Python"
STEP_SHARES = (1 / 4, 1 / 16, 1 / 64)  # of the radius: lengths of the steps of a slope
SLOPE_RATIOS = 0.5, 2.0  # rise of the objective over that which the gradient predicts
DIRECTIONS = 8  # of random steps, along which a gradient must predict the change
SLACK, UNEVEN = 0.1, 3.0  # error of the predicted changes: relative, and of their unevenness
BISECTIONS, FINER = 10, 20  # of a line; a jump where the decision changes outlasts the finer ones
RAY_POINTS = 17  # of a ray on which a jump is sought
TINY = 1e-3  # of the radius: a change that no decision may depend on
TOLERANCE = 0.05  # of the median margin, or of the spread of a score
PLAIN_STEPS = 20  # of plain PGD on the images that an attack broke
STUCK_SHARE = 0.25  # of these images that it may leave
MOST_WEIGHTS = 10**8  # of a net that is copied in float64
MASKED_SHARE = 0.01  # of the images that gradient attacks leave; AutoAttack's own limit for Square


class Answers:
    """The answers of a model in comparable units, N, C + S: logits, then scores."""

    def __init__(self, model: CheckedModel, rule: RuleCriterion | None, x: Tensor) -> None:
        self.model, self.pairs = model, rule.accept_rule.pairs if rule else ()
        self.scales = x.new_ones(1)
        raw = self(x)
        self.classes = raw.shape[1] - len(self.pairs)
        top = raw[:, : self.classes].topk(2).values
        margin = (top[:, 0] - top[:, 1]).median().expand(self.classes)
        scores = raw[:, self.classes :]
        spread = (scores - scores.mean(0)).square().mean(0).sqrt()
        self.scales = torch.cat((margin, spread)).clamp_min(1e-12)

    def __call__(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            out = as_output(self.model(x))
            columns = [out.logits, *(score(out)[:, None] for score, _ in self.pairs)]
        return torch.cat([column.to(x) for column in columns], 1) / self.scales

    def labels(self, answers: Tensor) -> Tensor:
        return answers[:, : self.classes].argmax(1)


def answer_checks(
    model: CheckedModel, x: Tensor, y: Tensor, x_adv: Tensor, ball: Ball,
    rule: RuleCriterion | None, before: Tensor, masking: Sequence[CheckResult] | None = None,
) -> list[CheckResult]:  # fmt: skip
    """Return the checks that ask the model about ASKED clean images and adversarial examples.

    `before` are the predictions for the clean images before the attacks, and `masking` is what
    `masking_checks` returned before; None makes these checks now.
    """
    x, y, x_adv = x[:ASKED], y[:ASKED], x_adv[:ASKED]
    if masking is None:
        masking = masking_checks(model, x, y, ball, rule)
    drawn = with_same_draw(model, x)
    if drawn is None:
        return [*masking, CheckResult(CHANGE, (REMEMBERS,)), CheckResult(STUCK, missing=A_DRAW)]
    answers = Answers(drawn, rule, x)
    if answers.classes < 2 or ball.eps == 0:
        return []
    changes = CheckResult(CHANGE, missing="a model whose outputs repeat")
    if drawn is model:
        changes = _changes(answers, model, x, x_adv, before[:ASKED].to(y))
    elif _differ(_repeated(answers, x[:ALONE], first := answers(x[:ALONE])), first).any():
        changes = CheckResult(CHANGE, (REMEMBERS,))
    return [*masking, changes, _stuck(drawn, answers, x, y, x_adv, ball)]


def masking_checks(
    model: CheckedModel, x: Tensor, y: Tensor, ball: Ball, rule: RuleCriterion | None
) -> list[CheckResult]:
    """Return the checks for masked gradients at clean images: wrong slopes and jumps.

    A randomised model is checked with the same draw in all passes, for several draws.
    """
    x, y = x[:ASKED], y[:ASKED]
    drawn = with_same_draw(model, x)
    if drawn is None:
        return [CheckResult(kind, missing=A_DRAW) for kind in (SLOPE, JUMP)]
    slopes, jumps = list[Flag](), list[Flag]()
    for _ in range(1 if drawn is model else DRAWS):
        answers = Answers(drawn, rule, x)
        if answers.classes < 2 or ball.eps == 0:
            return []
        slopes = slopes or list(_wrong_slopes(drawn, x, y, ball, rule))
        jumps = jumps or list(_jumps(answers, x, ball))
        if drawn is not model:
            model(x[:1])  # leads to another draw
    return [CheckResult(SLOPE, tuple(slopes)), CheckResult(JUMP, tuple(jumps))]


def _wrong_slopes(
    model: CheckedModel, x: Tensor, y: Tensor, ball: Ball, rule: RuleCriterion | None
) -> Iterator[Flag]:
    """Yield flags where a step along the gradient does not do what the gradient predicts."""
    objectives: list[tuple[str, Objective]] = [("the logit margin", UntargetedMargin())]
    if rule is not None:
        count = len(rule.accept_rule.pairs)
        objectives += [("the score", SingleMargin(rule, 1 + k)) for k in range(count)]
    given = torch.full_like(y, ANY), x.new_ones(len(x), len(objectives))
    for name, objective in objectives:
        inputs = given if isinstance(objective, SingleMargin) else ()
        try:
            grad, before, _ = model.gradient(objective, x, y, *inputs)
        except NoGradientError:
            grad, before = torch.zeros_like(x), torch.zeros_like(x[:, 0, 0, 0])
        trusted, errors = torch.zeros_like(y, dtype=torch.bool), list[Tensor]()
        for share in STEP_SHARES:
            moved = ball.step(x, x, grad, share * ball.eps)
            predicted = ((moved - x) * grad).flatten(1).sum(1)
            rise = model.value(objective, moved, y, *inputs)[0] - before
            low, high = (ratio * predicted for ratio in SLOPE_RATIOS)
            trusted = trusted | (predicted > 0) & (low <= rise) & (rise <= high)
            if grad.any():
                rise_at = lambda to: model.value(objective, to, y, *inputs)[0] - before  # noqa: B023, E731
                errors.append(_around(rise_at, x, grad, type(ball)(share * ball.eps)))
        if errors:
            uneven, error = torch.stack(errors, 1)  # lengths, N; the most even length decides
            uneven, error = (one.gather(0, uneven.argmin(0)[None])[0] for one in (uneven, error))
            trusted &= error <= SLACK + UNEVEN * uneven
        if too_many(wrong := int((~trusted).sum()), len(x)):
            yield Flag(
                SLOPE, (),
                f"At {wrong} of {len(x)} clean images a step along the gradient of {name} does "
                "not change it as the gradient says, within a factor of two, at any length from "
                "eps/64 to eps/4, or steps in random directions change it evenly, but not as "
                "the gradient says, or there is no gradient.",
                "Attack without this gradient: version='black-box', or attack a differentiable "
                "model in its place and test the examples on this one; a score can have a "
                "differentiable one beside it, ModelWithScore(model, score, surrogate=...).",
            )  # fmt: skip


def _around(rise: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor, near: Ball) -> Tensor:
    """Return how steps in random directions change an objective, relative to the changes, 2, N.

    First how far steps forth and back differ (the objective is curved, or rounded), then how far
    their mean is from what the gradient predicts, which for its own gradient is hardly more.
    """
    index, changes = torch.arange(len(x), device=x.device), list[Tensor]()
    for k in range(DIRECTIONS):
        signs = (noise.uniform(1, index, k, tuple(x.shape[1:])).to(x) - 0.5).sign()
        inside = (x >= near.eps) & (x <= 1 - near.eps)  # where a step can go both ways
        step = near.project(x, x + near.eps * signs * inside) - x
        predicted = (step * grad).flatten(1).sum(1)
        changes.append(torch.stack((rise(x + step), -rise(x - step), predicted)))
    forth, back, predicted = torch.stack(changes, 1)
    mean, size = (forth + back) / 2, (forth.norm(dim=0) + back.norm(dim=0)) / 2
    far = torch.stack(((forth - back).norm(dim=0) / 2, (mean - predicted).norm(dim=0)))
    relative: Tensor = far / size.clamp_min(1e-30)
    return relative


def _jumps(answers: Answers, x: Tensor, ball: Ball) -> Iterator[Flag]:
    """Yield flags where answers jump: beside clean images, or where the decision changes."""
    remedy = (
        "The gradient says nothing about a jump: attack by decisions (version='black-box'), and "
        "replace the step in the model by a smooth one for the attack."
    )
    clean = answers(x)
    index = torch.arange(len(x), device=x.device)
    signs = noise.uniform(0, index, 0, tuple(x.shape[1:])).to(x) - 0.5
    beside = answers(type(ball)(TINY * ball.eps).project(x, x + TINY * ball.eps * signs.sign()))
    moved = int(_differ(beside, clean).sum())
    if too_many(moved, len(x)):
        yield Flag(
            JUMP, (),
            f"A change of {TINY * ball.eps:.2g} of the pixels changes the answer for {moved} of "
            f"{len(x)} clean images by more than {TOLERANCE:.0%} of a typical margin, as a step in "
            "the model does, or noise whose seed is computed from the input.",
            remedy,
        )  # fmt: skip
    outside = type(ball)(2 * ball.eps).project(x, x + 2 * ball.eps * signs.sign())
    if too_many(edges := _edges(answers, x, outside), len(x)):
        yield Flag(
            JUMP, (),
            f"On {edges} of {len(x)} lines from a clean image to twice the radius the answer jumps "
            f"by more than {TOLERANCE:.0%} of a typical margin, as a defence of known images does.",
            remedy,
        )  # fmt: skip
    for name, crossed, total in _crossings(answers, x, clean):
        if too_many(crossed, total):
            yield Flag(
                JUMP, (),
                f"On {crossed} of {total} lines between two images {name} jumps where the decision "
                f"changes, by more than {TOLERANCE:.0%} of a typical margin.",
                remedy,
            )  # fmt: skip


def _edges(answers: Answers, x: Tensor, end: Tensor) -> int:
    """Return on how many lines from x to end the answer jumps where it changes most."""
    at: Callable[[Tensor], Tensor] = lambda t: answers(x + per_image(t, x) * (end - x))  # noqa: E731
    grid = torch.linspace(0, 1, RAY_POINTS).to(x)
    along = torch.stack([at(t.expand(len(x))) for t in grid])
    steepest = (along[1:] - along[:-1]).abs().amax(2).argmax(0)
    low, high = grid[steepest], grid[steepest + 1]
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        one, two, three = at(low), at(middle), at(high)
        first = (two - one).abs().amax(1) > (three - two).abs().amax(1)
        low, high = torch.where(first, low, middle), torch.where(first, middle, high)
    return int(_differ(at(low), at(high)).sum())


def _crossings(answers: Answers, x: Tensor, clean: Tensor) -> Iterator[tuple[str, int, int]]:
    """Yield what jumps at changes of the decision: a name, the jumps, the lines searched."""
    labels = answers.labels(clean)
    differs = labels[:, None] != labels[None]
    rows = differs.any(1).nonzero()[:, 0]
    if len(rows):
        own, other = labels[rows], x[differs[rows].int().argmax(1)]
        low, high = _bisect(answers, x[rows], other, lambda a: answers.labels(a) == own)
        step = low - high  # R, C + S
        new = answers.labels(high)
        jump = step.gather(1, own[:, None]) - step.gather(1, new[:, None])
        yield "the logit margin", int((jump[:, 0].abs() > TOLERANCE).sum()), len(rows)
    thresholds = torch.tensor([t for _, t in answers.pairs]).to(answers.scales)
    for column, t in enumerate(thresholds / answers.scales[answers.classes :], answers.classes):
        accepted = clean[:, column] >= t
        ends = torch.cat((x[~accepted], (x + x.roll(1, 0)) / 2, torch.full_like(x[:1], 0.5)))
        ends = ends[answers(ends)[:, column] < t]
        rows = accepted.nonzero()[:, 0]
        if len(rows) and len(ends):
            other = ends[torch.arange(len(rows), device=x.device) % len(ends)]
            ask = lambda a, c=column, t=t: a[:, c] >= t  # noqa: E731
            low, high = (side[:, column] for side in _bisect(answers, x[rows], other, ask))
            yield "the score", int(((low - high).abs() > TOLERANCE).sum()), len(rows)


def _bisect(
    answers: Answers, start: Tensor, end: Tensor, same: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the answers on both sides of a change of the decision, on lines from start to end."""
    low, high = start.new_zeros(len(start)), start.new_ones(len(start))
    at: Callable[[Tensor], Tensor] = lambda t: answers(start + per_image(t, start) * (end - start))  # noqa: E731
    for _ in range(FINER):
        middle = (low + high) / 2
        stays = same(at(middle))
        low, high = torch.where(stays, middle, low), torch.where(stays, high, middle)
    return at(low), at(high)


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Return which answers differ by more than the tolerance, N, bool."""
    return (one - other).nan_to_num().abs().amax(1) > TOLERANCE


def _changes(
    answers: Answers, model: CheckedModel, x: Tensor, x_adv: Tensor, before: Tensor
) -> CheckResult:
    """Check whether answers change with the batch, the order, repetition or the dtype."""
    both = torch.cat((x[: ASKED // 2], x_adv[: ASKED // 2]))
    expected = answers(both)
    single = torch.cat([answers(image[None]) for image in both[-ALONE:]])
    found = {
        "asked alone": (single, expected[-ALONE:]),
        "in reverse order": (answers(both.flip(0)).flip(0), expected),
        "in half of the batch": (answers(both[::2]), expected[::2]),
        "asked again": (_repeated(answers, both[-ALONE:], expected[-ALONE:]), expected[-ALONE:]),
    }
    counts = {name: int(_differ(*pair).sum()) for name, pair in found.items()}
    relabelled = {"than before the attacks": (answers.labels(answers(x)), before)}
    if (wide := _in_float64(model, both)) is not None:
        relabelled["in float64"] = (wide.argmax(1), answers.labels(expected))
    for name, (one, other) in relabelled.items():
        changed = int((one != other).sum())
        counts[name] = changed if too_many(changed, len(one)) else 0
    seen = {name: count for name, count in counts.items() if count}
    if not seen:
        return CheckResult(CHANGE)
    text = ", ".join(
        f"{count} of {ALONE if name.startswith('asked') else len(both)} {name}"
        for name, count in seen.items()
    )
    flag = Flag(
        CHANGE, (),
        f"The answers for the same images differ: {text}. An image that one batch breaks may be "
        "right in another, and no count is a property of the model.",
        "Put the model into eval mode; remove what it computes over the batch or remembers, and "
        "noise from a fixed seed; otherwise fix batch and order as part of the claim.",
    )  # fmt: skip
    return CheckResult(CHANGE, (flag,))


def _stuck(
    model: CheckedModel, answers: Answers, x: Tensor, y: Tensor, x_adv: Tensor, ball: Ball
) -> CheckResult:
    """Check whether plain PGD on the margin raises it and yet leaves broken images right."""
    broken = (answers.labels(answers(x)) == y) & (answers.labels(answers(x_adv)) != y)
    moved, rising, flipped = x, torch.zeros_like(y), ~broken
    last = torch.full_like(x[:, 0, 0, 0], torch.inf)
    for _ in range(PLAIN_STEPS if broken.any() else 0):
        try:  # on all images, since a draw may depend on the batch
            grad, margin, out = model.gradient(UntargetedMargin(), moved, y)
        except NoGradientError:
            return CheckResult(STUCK, missing="a gradient")
        flipped |= prediction(out) != y
        rising, last = rising + (margin > last), margin
        moved = ball.step(x, moved, grad, ball.eps / 4)
    stuck = ~flipped & (rising > 0)
    count, queries, of = int(stuck.sum()), int(rising[stuck].sum()), int(broken.sum())
    flag = Flag(
        STUCK, (),
        f"{of} images were broken. On {count} of them plain PGD raised the logit margin in "
        f"{queries} of {PLAIN_STEPS * count} queries and never flipped the label.",
        "The loss is not that of the decision: attack by decisions and by transfer "
        "(version='black-box'), or write a loss that follows the decision.",
    )  # fmt: skip
    return CheckResult(STUCK, (flag,) if count > max(2, STUCK_SHARE * of) else ())


def _repeated(answers: Answers, x: Tensor, expected: Tensor) -> Tensor:
    """Return the first answers among many that differ from the expected ones."""
    for _ in range(REPEATS):  # a model that counts its calls changes after some of them
        if _differ(again := answers(x), expected).any():
            return again
    return expected


def _in_float64(model: CheckedModel, x: Tensor) -> Tensor | None:
    """Return the logits of a copy of the net in float64, N, C; None if there is no such copy."""
    net = model.model
    if not isinstance(net, nn.Module) or sum(p.numel() for p in net.parameters()) > MOST_WEIGHTS:
        return None
    try:
        with torch.no_grad():
            return as_output(copy.deepcopy(net).double()(x.double())).logits
    except Exception:  # of the user's code, which takes one dtype only
        return None


REMEMBERS = Flag(
    CHANGE, (),
    "The answers for the same images differ though torch, NumPy and Python draw the same numbers: "
    "the model remembers earlier calls or draws from a generator that its modules do not hold.",
    "Remove what it remembers, and draw from torch's generator, so that checks can repeat a draw.",
)  # fmt: skip


# ------------------------------------------------ what the successes of attacks say


def success_checks(result: EnsembleResult) -> list[CheckResult]:
    """Return the checks of which attack succeeded, and whether the model confirmed it."""
    count, left = result.masked
    masked = Flag(
        MASKED, tuple(member.name for member in result.members if not member.uses_gradient),
        f"Attacks that use no gradient of the model broke {count} of {left} images that every "
        "gradient attack left.",
        "The gradients lead attacks astray: rely on attacks by decisions and by transfer "
        "(version='black-box'), and attack a differentiable model in place of this one.",
    )  # fmt: skip
    unsure = Flag(
        UNCONFIRMED, (),
        f"{result.unconfirmed} of {len(result.y) - result.unbroken} images that an attack broke "
        "are not broken in a final pass over the adversarial examples.",
        "Find out what else the answer depends on (batch, order, number of calls, random numbers); "
        "until then count the images that no attack broke.",
    )  # fmt: skip
    is_unsure = result.unconfirmed > max(1, MASKED_SHARE * len(result.y))
    missing = "" if len({member.uses_gradient for member in result.members}) > 1 else BOTH
    return [
        CheckResult(MASKED, (masked,) if count > max(1, MASKED_SHARE * left) else (), missing),
        CheckResult(UNCONFIRMED, (unsure,) if is_unsure else ()),
    ]


def implausible(result: EnsembleResult, ball: Ball, data: str, claim: float | None) -> CheckResult:
    """Check whether a figure exceeds the best known one (with a rejector: at half the radius).

    A detector that is robust at eps implies a classifier that is robust at eps/2 (Tramer 2022).
    """
    radius, best = BEST_KNOWN.get((data, type(ball)), (float("inf"), 1.0))
    compared = ball.eps / 2 if result.rejects else ball.eps
    if radius > compared * (1 + 1e-6):
        known = f"a best known figure of {data or 'a named data set'} at {compared:.4g} or less"
        return CheckResult(IMPLAUSIBLE, missing=known)
    low = wilson(result.left, len(result.y))[0]
    if max(low, claim or 0) <= best:
        return CheckResult(IMPLAUSIBLE)
    half = ", half the radius of this rejector" if result.rejects else ""
    flag = Flag(
        IMPLAUSIBLE, (),
        f"{'A claim of' if low <= best else 'At least'} {max(low, claim or 0):.1%} exceeds "
        f"{best:.1%}, the best known on {data} at eps={radius:.4g}{half}. That is implausible, "
        "which does not mean wrong.",
        "Write an attack for this model before the figure is published.",
    )  # fmt: skip
    return CheckResult(IMPLAUSIBLE, (flag,))
