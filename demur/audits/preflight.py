"""Checks of a foreign model: warnings before an attack; runs the checks of `sanity` afterwards.

Besides the given attacks the sanity checks need plain PGD (EOT-PGD for a randomised model) at eps,
at eps/2 and where every image can be made grey: 60 (300) gradient queries for MOST_IMAGES images.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from demur.attacks import CE, EOTPGD, PGD, AcceptedError, Attack, Clean, Misclassified, Objective
from demur.attacks.attack import RuleCriterion
from demur.attacks.attack_model import CheckedModel, Model, attack_model, checked, forked_rng
from demur.attacks.autoattack import PASSES, Chain, MeanChain
from demur.attacks.balls import Ball, Linf
from demur.attacks.objectives.classification import ANY, UntargetedMargin
from demur.attacks.objectives.rejector import SingleMargin
from demur.attacks.wrappers import WrappedModel
from demur.audits.ensemble_result import FLAT_SCORE
from demur.audits.flags import ASKED, answer_checks
from demur.audits.image_parts import decide_by_passes
from demur.errors import NoGradientError
from demur.evaluate.probing import ROUNDING, is_random, probe
from demur.evaluate.score import RejectorEvaluation
from demur.metrics import BoolArray, FloatArray, auroc, auroc_interval
from demur.numerics import tf32
from demur.output import Output, as_output, outputs_in_batches
from demur.rejectors.rule import Rule, as_score
from demur.runs import Record
from demur.sanity import checks_of
from demur.sanity.comparisons import LARGE, TOO_GOOD
from demur.sanity.evidence import CheckResult, Evidence, ParsedRecord, mean_count, p_above
from demur.sanity.single_records import NOT_RISEN, TIED
from demur.spec import show

MOST_IMAGES = 500
STEPS = 20
PASS_SEED = 2**20  # seed of the passes of a randomised model that are compared
REJECTOR = "the rejector"
NEED_REJECTOR = (TOO_GOOD, TIED)  # checks that mean nothing for a classifier alone

LOW_COVERAGE = 0.05  # share of clean images up to which accepting them is an exception
MIN_FOR_CHANCE, CHANCE_LEVEL = 10, 0.05  # images, and probability of so many hits by chance


def preflight_warnings(
    model: Model, chain: Chain, x: Tensor, y: Tensor, right: BoolArray
) -> Iterator[str]:
    """Yield one sentence for each problem found on clean images x (N, C, H, W) and labels y (N).

    `right` are the correct predictions in each pass, P, N; P > 1 for a randomised model.
    """
    if getattr(model, "training", False):
        yield "the model is in train mode; call model.eval() first"
    with torch.no_grad():
        outputs = [as_output(model(x)) for _ in range(2)]
    logits = outputs[0].logits
    classes, random = logits.shape[-1], len(right) > 1
    if len(x) >= MIN_FOR_CHANCE and p_above(right, 1 / classes) > CHANCE_LEVEL:
        yield (
            f"the model gets {mean_count(right)} of {len(x)} clean images right, no better than "
            f"chance for {classes} classes; check its weights, the normalisation, the order of the "
            "classes and which output holds the logits"
        )
    if _are_probabilities(logits):
        yield "the model returns probabilities; return logits instead"
    counts, _ = probed(model, x, y, chain)
    averaged = any(getattr(attack, "eot_iter", 1) > 1 for attack in chain.attacks)
    pairs = chain.criterion.accept_rule.pairs if isinstance(chain.criterion, RuleCriterion) else ()
    changed = any(
        ((one - other).abs() > ROUNDING * one.abs().nan_to_num(0, 0, 0).amax()).any()
        for one, other in (map(score, outputs) for score, _ in pairs)
    )
    if (random or changed) and not averaged:
        what = "model's outputs" if random else "rejector's scores"
        yield (
            f"the {what} are random, so one lucky pass counts as a success and the next may be "
            "right; use version='rand'"
        )
    if "zero_gradients" not in counts:
        yield (
            "the model is a function without gradients, so only black-box attacks ran; with its "
            "weights a gradient attack may break more images"
        )
    elif counts["zero_gradients"]:
        yield (
            f"the gradient is zero for {counts['zero_gradients']} of {len(x)} images; gradient "
            "attacks overestimate robustness here, so rely on Square"
        )
    if isinstance(chain.criterion, AcceptedError):
        yield from zero_score_gradients(model, chain.criterion, x, y)


def probed(
    model: Model, x: Tensor, y: Tensor, *attacks: Attack
) -> tuple[dict[str, int], Objective]:
    """Return the probe of a model, and the objective whose gradients it and plain PGD use.

    That is the logit margin where the cross-entropy saturates (its gradient is zero in fp32, as
    that of logits times 100) and the margin does not, if an attack follows logits, too.
    """
    counts = probe(model, x, y)
    flat = counts.get("zero_gradients", 0)
    if flat and any(_follows_logits(attack) for attack in attacks):
        with suppress(NoGradientError):
            of_margin = probe(model, x, y, UntargetedMargin())
            if of_margin["zero_gradients"] < flat:
                return of_margin, UntargetedMargin()
    return counts, CE()


def _follows_logits(attack: Attack) -> bool:
    """Return whether some part of an attack uses gradients of logits and not of cross-entropy."""
    if parts := attack.parts:
        return any(_follows_logits(part) for part in parts)
    return attack.gradient_queries > 0 and not isinstance(attack.maximised, CE)


def _are_probabilities(logits: Tensor) -> bool:
    sums = logits.sum(-1)
    return bool(logits.min() >= 0) and torch.allclose(sums, torch.ones_like(sums), atol=1e-4)


class LogProbabilities(WrappedModel):
    """A model that returns probabilities, with their logarithms in place of logits."""

    def forward(self, x: Tensor) -> Output:
        out = as_output(self.model(x))
        return out._replace(logits=out.logits.clamp_min(torch.finfo(out.logits.dtype).tiny).log())


def with_logits(model: Model, x: Tensor, y: Tensor) -> Model:
    """Return the model, or LogProbabilities of it if it returns probabilities."""
    with checked(model, x[:ASKED], y[:ASKED]) as (own, first, _):
        return LogProbabilities(model) if _are_probabilities(own(first).logits) else model


def rejector_warnings(
    rule: Rule, scores: Sequence[FloatArray], accepted: BoolArray, right: BoolArray
) -> Iterator[str]:
    """Yield one sentence for each problem of a rejector on clean images, with its scores there."""
    names = [getattr(score, "rejector", type(score).__name__) for score, _ in rule.pairs]
    for name, (_, t), values in zip(names, rule.pairs, scores, strict=True):
        if (values < t).all():
            yield (
                f"no clean image reaches the threshold {t:.7g} of {name}: the largest score is "
                f"{values.max():.7g}, so every clean image is rejected"
            )
            return
    if accepted.mean() <= LOW_COVERAGE:
        yield (
            f"the rejector accepts {int(accepted.sum())} of {len(accepted)} clean images: few "
            "accepted errors then say little; report the coverage with them"
        )
    for name, values in zip(names, scores, strict=True):
        if auroc_interval(values, right, level=0.99).hi < 0.5:
            yield (
                f"{name} has the wrong sign: on clean images it is higher where the prediction is "
                f"wrong (AUROC {auroc(values, right):.2f}); higher scores must mean accept"
            )


def zero_score_gradients(
    model: Model, criterion: AcceptedError, x: Tensor, y: Tensor
) -> Iterator[str]:
    """Yield a sentence for each score of the criterion whose gradient is zero for most images."""
    scores = 1 + len(criterion.accept_rule.pairs)
    inputs = torch.full_like(y, ANY), x.new_ones(len(x), scores)
    for position in range(1, scores):
        try:
            margin = SingleMargin(criterion, position)
            grad = attack_model(model).gradient(margin, x, y, *inputs).grad
        except NoGradientError:  # the score does not depend on the pixels
            grad = torch.zeros_like(x)
        flat = int((grad.flatten(1).abs().amax(1) == 0).sum())
        if flat > len(x) / 2:
            yield (
                f"{FLAT_SCORE} for {flat} of {len(x)} images; pass a differentiable one as "
                "ModelWithScore(model, score, surrogate=...) or in the method surrogate"
            )


def _plain_examples(
    kind: type[PGD | EOTPGD], model: Model, x: Tensor, y: Tensor, bs: int, ball: Ball,
    objective: Objective,
) -> dict[str, tuple[Attack, Tensor]]:  # fmt: skip
    """Return clean images and those of plain PGD, if there is a gradient, by increasing radius."""
    examples: dict[str, tuple[Attack, Tensor]] = {"clean": (Clean(), x)}
    half, index = type(ball)(ball.eps / 2), torch.arange(len(x), device=x.device)
    radii = (" at eps/2", half), ("", ball), (" at eps=128/255", Linf(LARGE))
    for name, around in sorted(radii, key=lambda pair: pair[1].eps):
        plain = kind(around, steps=STEPS, objective=objective)
        with suppress(NoGradientError), tf32("fp32"):
            parts = [plain.perturb(model, x[rows], y[rows], rows) for rows in index.split(bs)]
            examples[f"{'' if kind is PGD else 'EOT-'}PGD-{STEPS}{name}"] = plain, torch.cat(parts)
    return examples


def foreign_checks(
    model: CheckedModel, x: Tensor, y: Tensor, attacked: Mapping[str, tuple[Attack, Tensor]],
    before: Tensor, criterion: RuleCriterion | None = None, bs: int = 250,
    masking: Sequence[CheckResult] | None = None,
) -> tuple[list[CheckResult], list[tuple[str, int, int]]]:  # fmt: skip
    """Return every check, and radius, correct images and all images of plain PGD.

    `attacked` holds attacks and their adversarial examples by name, `before` the predictions for
    the clean images before them, and `masking` the checks for masked gradients, if they were made.
    """
    x, y = x[:MOST_IMAGES], y[:MOST_IMAGES]
    counts, objective = probed(model, x, y, *(attack for attack, _ in attacked.values()))
    random = any(isinstance(attack, MeanChain) for attack, _ in attacked.values())
    counts["random_outputs"] *= not random  # which these attacks are made for
    ball = next(iter(ball for attack, _ in attacked.values() for ball in attack.balls()))
    random = random or is_random(model, x[:ASKED])
    examples = _plain_examples(EOTPGD if random else PGD, model, x, y, bs, ball, objective)
    examples |= {name: (attack, x_adv[: len(x)]) for name, (attack, x_adv) in attacked.items()}
    records, curve = list[ParsedRecord](), list[tuple[str, int, int]]()
    for name, (attack, x_adv) in examples.items():
        passes, seeks = None, criterion or Misclassified()
        with forked_rng(x, PASS_SEED):  # pass k has the same draws on all examples
            out = outputs_in_batches(model, x_adv, bs, x_adv.device)
            if random:
                passes = decide_by_passes(model, seeks, x_adv, y, bs, PASSES).passes.numpy()
        arrays = {"y": y.cpu(), "index": torch.arange(len(y)), **out._asdict()}
        metadata = {"thresholds": {}, "probe": counts, "label": name, "spec": ""}
        records.append(one := ParsedRecord(Record(arrays, metadata), attack, name, passes))
        if name not in attacked:
            radius = next((around.eps for around in attack.balls()), 0)
            curve.append((show(radius), round(one.correct.mean() * len(x)), len(x)))
    rejectors = {} if criterion is None else {REJECTOR: criterion.rejector}
    scores = {name: as_score(rejector) for name, rejector in rejectors.items()}
    thresholds = {} if criterion is None else {REJECTOR: float(criterion.threshold)}  # type: ignore[arg-type]
    evaluation = RejectorEvaluation(scores, thresholds, 1.0, cal_n=0)
    checks = list[CheckResult]()
    for check in checks_of(Evidence(records, evaluation, rejectors)):
        if check.kind == NOT_RISEN:  # that the cross-entropy of plain PGD saturates is no sign
            flags = tuple(flag for flag in check.flags if set(flag.attacks) & set(attacked))
            checks.append(CheckResult(NOT_RISEN, flags))
        elif criterion is not None or check.kind not in NEED_REJECTOR:
            checks.append(check)
    x_adv = examples[[*attacked][-1]][1]
    return [*checks, *answer_checks(model, x, y, x_adv, ball, criterion, before, masking)], curve
