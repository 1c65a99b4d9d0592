"""One call for an audit: clean accuracy, AutoAttack, accepted errors, forced rejections, checks.

The threshold of a rejector is frozen on held-out clean images before any attack. A fitted rejector
is fitted on one half of them, and its threshold is chosen on the other half.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from demur.attacks import (
    AcceptedError,
    AutoAttackEnsemble,
    ForceRejectionEnsemble,
    Rejected,
    WorstScore,
)
from demur.attacks.attack_model import Model, checked, forked_rng, has_no_gradient, on_outputs
from demur.attacks.autoattack import RAND, check_version, rand_chain
from demur.attacks.balls import ball_by_name
from demur.attacks.margins import PASSES_PER_GRADIENT, cost
from demur.attacks.wrappers import ModelWithScore, RejectClassModel
from demur.audits.audit_page import Curve, provenance, save
from demur.audits.ensemble_result import (
    Counts,
    EnsembleResult,
    closing_lines,
    count_cell,
    entry,
    sanity_json,
    verdict_of,
)
from demur.audits.ensembles import AutoAttack, EnsembleEvaluation, RejectAutoAttack
from demur.audits.flags import ASKED, implausible, success_checks
from demur.audits.image_parts import Spool, device_for, image_parts
from demur.audits.model_loading import as_model
from demur.audits.preflight import MOST_IMAGES, foreign_checks, with_logits
from demur.audits.ray_cluster import RAY
from demur.calibrate import TPR
from demur.errors import BadInput
from demur.evaluate.accepted_errors import WorstCaseRow
from demur.evaluate.probing import is_random
from demur.files.output_paths import check_output_folder
from demur.guards.calibration import values
from demur.images import check_batch
from demur.metrics import WorstCase
from demur.noise import permutation
from demur.numerics import device_by_name
from demur.output import Output, outputs_in_batches, prediction
from demur.rejectors import ModelScore
from demur.rejectors.rule import OperatingPoint, Rejector, Score, as_score
from demur.sanity import CheckResult, Flag
from demur.sanity.evidence import Grade, Verdict
from demur.spec import Spec, show

AuditVersion = Literal["auto", "standard", "fast", "rand", "black-box"]
FEW_CORRECT = 20  # correct predictions, below which a threshold is rough
CAL_SHARE = 0.3  # of the given images, where no calibration images are given
CPU_RATE, CPU_MINUTES = 5e10, 10  # operations a second of a thread; up to which auto is standard
NO_WORST_SCORE = "worst-score needs a rejector, a gradient, and a model that is not randomised"
AnyRejector = Rejector | Score | Callable[[Tensor], Tensor]
Images = tuple[Tensor, Tensor]  # with their labels


@dataclass(frozen=True, eq=False)
class AuditReport:
    """What an audit found on N test images.

    Attributes:
        model: The name of the model.
        threat: The ball of the attacks, as text.
        rule: How images are accepted and where the threshold comes from; "" without a rejector.
        threshold: The threshold of the rejector; None without one.
        autoattack: AutoAttack on the classifier, whether or not the rejector accepts its errors.
        accepted_errors: RejectAutoAttack on classifier and rejector; None without a rejector.
        forced_rejections: The attack that makes the rejector reject; None without a rejector.
        worst_case: Accepted errors at every threshold, by `WorstScore`; None if not asked for.
        sanity: Results of the sanity checks.
        warnings: Sentences about the model, the rejector and the attacks.
        claim: The claimed share of images that no attack breaks; None without a claim.
        curve: Radius, correct images and all images of plain PGD.
        provenance: Command, seed, digests of weights and images, versions of the software.
        clean: The clean images, N, C, H, W.

    Example:
        >>> import demur, torch
        >>> x, y = demur.Digits().load()["test"].batch(slice(0, 30))
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)).eval()
        >>> report = demur.audit(net, x, y, eps=0.1, version="fast")
        >>> report.autoattack.attacked.n
        30
    """

    model: str
    threat: str
    rule: str
    threshold: float | None
    autoattack: EnsembleResult
    accepted_errors: EnsembleResult | None = None
    forced_rejections: EnsembleResult | None = None
    sanity: tuple[CheckResult, ...] = ()
    warnings: tuple[str, ...] = ()
    claim: float | None = None
    curve: Curve = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    clean: Tensor = field(default_factory=lambda: torch.empty(0))
    worst_case: WorstCaseRow | None = None

    @property
    def results(self) -> list[EnsembleResult]:
        parts = (self.autoattack, self.accepted_errors, self.forced_rejections)
        return [part for part in parts if part is not None]

    @property
    def flags(self) -> list[Flag]:
        return [flag for check in self.sanity for flag in check.flags]

    @property
    def verdict(self) -> Verdict:
        return verdict_of(self.results[:2], self.sanity, self.warnings, self.claim)

    @property
    def grade(self) -> Grade:
        return self.verdict.grade

    @property
    def setting(self) -> str:
        """One paragraph: images, ball, attacks, rejector and claim."""
        claim = "" if self.claim is None else f" The claim is {self.claim:.1%}."
        rule = f" {self.rule}." if self.rule else ""
        return (
            f"{len(self.autoattack.y)} test images, perturbations in {self.threat}. Classifier: "
            f"{self.autoattack.attack}.{rule}{claim}"
        )

    def figures(self) -> Iterator[tuple[str, Counts, str]]:
        """Yield the figures of the report: a name, counts, and the kind of count that is meant."""
        yield "clean, correct", self.autoattack.clean, "accepted_right"
        if self.autoattack.members:  # else every attack was skipped
            yield "attacked, correct", self.autoattack.attacked, "accepted_right"
        if self.autoattack.unconfirmed:
            n, never = len(self.autoattack.y), self.autoattack.unbroken
            yield "attacked, never broken", Counts(never, n - never, 0), "accepted_right"
        if self.accepted_errors is not None and self.forced_rejections is not None:
            clean = self.accepted_errors.clean
            accepted = Counts(clean.accepted_right + clean.accepted_wrong, 0, clean.rejected)
            yield "clean, accepted", accepted, "accepted_right"
            yield "clean, accepted errors", clean, "accepted_wrong"
            if self.accepted_errors.members:
                yield "attacked, accepted errors", self.accepted_errors.attacked, "accepted_wrong"
            if self.forced_rejections.members:
                yield "attacked, forced rejections", self.forced_rejections.attacked, "rejected"
        for point in self.worst_case.points if self.worst_case is not None else ():
            n = len(self.autoattack.y)
            counts = Counts(n - round(point.share * n), round(point.share * n), 0)
            yield f"worst-score, TPR-{100 * point.tpr:g}", counts, "accepted_wrong"

    def to_json(self) -> dict[str, Any]:
        names = "autoattack", "accepted_errors", "forced_rejections"
        parts: dict[str, Any] = {
            name: (part := getattr(self, name)) and part.to_json() for name in names
        }
        for part in filter(None, parts.values()):  # the report has one grade for all of them
            del part["grade"], part["reasons"]
        return {
            "model": self.model, "threat": self.threat, "n": len(self.autoattack.y),
            "rule": self.rule, "threshold": self.threshold, "claim": self.claim,
            **self.verdict.to_json(), "verdict": str(self.verdict), **parts,
            "worst_case": self.worst_case and self.worst_case.to_json(),
            "sanity": sanity_json(self.sanity), "warnings": list(self.warnings),
            "curve": [list(point) for point in self.curve], "provenance": dict(self.provenance),
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [f"Audit of {self.model}: {self.threat}, {len(self.autoattack.y)} test images"]
        lines += entry("attack", self.autoattack.attack)
        lines += [f"{name:<28}{count_cell(counts, kind)}" for name, counts, kind in self.figures()]
        lines += entry("rejector", self.rule)
        if self.worst_case is not None:
            lines += entry("worst-score", self.worst_case.sentence)
        lines += entry("passes", self.autoattack.passes_note)
        return "\n".join([*lines, *closing_lines(self.sanity, self.warnings, self.verdict)])

    def save(self, path: str | Path) -> None:
        """Write the report as a page, or as JSON or Markdown if the path ends in .json or .md.

        Raises:
            BadInput: jinja2, which makes the page, is not installed.
        """
        save(self, path)


class ForcedRejections(EnsembleEvaluation):
    """The attack ensemble that makes a rejector reject."""


@dataclass
class _Audit:
    """An audit under way: its options, the model, and the device where both are queried."""

    norm: str
    eps: float
    version: str
    bs: int
    seed: int
    device: str | torch.device | None
    state_folder: str | Path | None
    verbose: bool
    name: str
    claim: float | None
    data: str
    command: str

    def __post_init__(self) -> None:
        self.version = check_version("audit", self.version, get_args(AuditVersion))
        if isinstance(self.device, str):
            self.device = device_by_name(self.device)
        self.ball = ball_by_name(self.norm, self.eps)
        AutoAttackEnsemble(self.ball, seed=self.seed)  # raises BadInput for a wrong seed
        claim: Any = self.claim
        is_number = isinstance(claim, Real) and not isinstance(claim, bool)
        if claim is not None and not (is_number and 0 <= claim <= 1):
            raise BadInput(
                f"claim must be a share of the images from 0 to 1, such as 0.6, not {claim!r}"
            )
        check_output_folder(None if self.state_folder is None else str(self.state_folder))

    def begin(self, model: Model, rejector: AnyRejector | None, x: Tensor, y: Tensor) -> Any:
        """Set the model, its device and the version; return the rejector on the model's outputs."""
        if isinstance(model, nn.Module) and self.device is not None:
            model = model.to(self.device)
        self.at = device_for(model, x, self.device)
        count, x, y = len(x), x[:ASKED].to(self.at), y[:ASKED].to(self.at)
        model = with_logits(model, x, y)
        if rejector is not None and not isinstance(rejector, Rejector | Score):
            model, rejector = ModelWithScore(model, rejector), ModelScore()
        rejector, self.model = on_outputs(rejector, model)
        if self.version == "auto":
            with checked(self.model, x, y) as (own, images, _):
                self.version = "rand" if is_random(own, images) else "standard"
                if has_no_gradient(own):
                    self.version = "black-box"
                minutes = self._minutes(own, images, count) if self.version == "standard" else 0
            if minutes > CPU_MINUTES:
                self.version = "fast"
                if self.verbose:
                    sys.stdout.write(
                        "version fast, which is no AutoAttack: all of it may need up to "
                        f"{minutes:.0f} minutes on this CPU; --version standard runs it\n"
                    )
            if self.command.startswith("demur audit "):  # to repeat it elsewhere
                self.command += f" --version {self.version}"
        return rejector

    def _minutes(self, model: Model, x: Tensor, count: int) -> float:
        """Return the minutes that AutoAttack may need on this CPU at most; 0 for other devices.

        They are counted in operations, to repeat; a pass is timed where torch counts none.
        """
        if x.device.type != "cpu" or RAY.get():
            return 0.0
        with FlopCounterMode(display=False) as counter, torch.enable_grad():
            model(x[:1])
        seconds = counter.get_total_flops() / (CPU_RATE * torch.get_num_threads())
        if not seconds:
            started = perf_counter()
            model(x)
            seconds = (perf_counter() - started) / len(x)
        passes = PASSES_PER_GRADIENT * sum(map(cost, AutoAttackEnsemble(self.ball).parts))
        return float(count * passes * seconds / 60)

    def outputs(self, x: Tensor, y: Tensor) -> Output:
        """Return the outputs, on the CPU; the images move batch by batch."""
        check_batch(x, y)
        with checked(self.model, x[:1].to(self.at), y[:1].to(self.at)) as (own, *_):
            return outputs_in_batches(own, x, self.bs, self.at)

    def freeze(
        self, rejector: Any, images: Images, cal: Images | None, at: float | None, tpr: float
    ) -> tuple[AcceptedError, str, Images]:
        """Return the rejector with its threshold, a sentence about it, and the images to attack."""
        kind, origin = "clean", "given"
        if cal is None and (at is None or not isinstance(rejector, Score)):
            cal, images = _split(images, self.seed)
            part = f"a random {CAL_SHARE:.0%} of the given ones, seed {self.seed}, not attacked"
            kind, origin = "held-out clean", part
        fitted = ""
        if not isinstance(rejector, Score):
            assert cal is not None
            half = len(cal[1]) // 2
            fit, cal = (cal[0][:half], cal[1][:half]), (cal[0][half:], cal[1][half:])
            rejector = rejector.fit(self.outputs(*fit), fit[1].cpu())
            fitted = f"fitted on {half} other images, "
        score, how = as_score(rejector), "a given number"
        if at is None:
            assert cal is not None
            out = self.outputs(*cal)
            check_batch(*cal, classes=out.logits.shape[-1])  # of all calibration images
            right = (prediction(out) == cal[1].cpu()).numpy()
            if not right.any():
                raise BadInput("no calibration image is classified correctly; give a threshold")
            score.rule(0.0).accepted(out)  # raises BadInput for a score of NaN
            scores = score(out).detach().double().numpy()
            at = float(TPR(tpr).threshold(scores, right))
            few = "; so few images fix it only roughly" if right.sum() < FEW_CORRECT else ""
            how = (
                f"which accepts {(scores[right] >= at).sum()} of {right.sum()} correct predictions "
                f"({tpr:.0%} asked) on {len(right)} {kind} images ({origin}){few}; frozen "
                "before any attack"
            )
        if isinstance(score, nn.Module):
            score.to(self.at)
        criterion = AcceptedError(score, float(at))
        some = images[0][:ASKED], images[1][:ASKED]  # an error now, not after the first attack
        criterion(self.outputs(*some).to(torch.device(self.at)), some[1].to(self.at))
        text = show(rejector) if isinstance(rejector, Spec) else type(rejector).__name__
        return criterion, f"{text} {fitted}must reach {at:.4g}, {how}", images

    def attacks(self, criterion: AcceptedError | None) -> list[EnsembleEvaluation]:
        """Return the ensembles: on the classifier and, with a rejector, two on both."""
        given = (self.norm, self.eps, self.seed, self.verbose)
        attacks: list[EnsembleEvaluation] = [
            AutoAttack(self.model, *given, (), self.version, self.device)
        ]
        if criterion is not None:
            on_both = RejectAutoAttack(self.model, criterion, *given, self.version, self.device)
            rejected = Rejected(criterion.rejector, criterion.threshold)
            chain = ForceRejectionEnsemble(self.ball, rejected, seed=self.seed).chain()
            kept = {"fast": slice(1), "black-box": slice(1, 2)}.get(self.version, slice(2))
            chain, names = replace(chain, attacks=chain.attacks[kept]), ["apgd", "square"][kept]
            if self.version == "rand":
                chain, names = rand_chain(self.ball, rejected, self.seed), list(RAND)
            shared = chain, names, self.verbose, self.device
            attacks += [on_both, ForcedRejections(self.model, *shared)]
        return attacks

    def run(self, attack: EnsembleEvaluation, x: Tensor, y: Tensor) -> EnsembleResult:
        """Run an ensemble, with its state in a file of its own."""
        path = None
        if self.state_folder is not None:
            part = "-fast" if self.version == "fast" else ""  # so that standard can follow it
            path = Path(self.state_folder, f"{type(attack).__name__}{part}.state")
            path.parent.mkdir(parents=True, exist_ok=True)
        return attack.evaluate(x, y, bs=self.bs, state_path=path, sanity=False)

    def worst_case(self, x: Tensor, y: Tensor, criterion: AcceptedError | None) -> WorstCaseRow:
        """Return accepted errors at every threshold; these clean images set thresholds."""
        if criterion is None or self.version in ("rand", "black-box"):
            raise BadInput(f"{NO_WORST_SCORE}; leave worst-score out, or name a rejector")
        score = as_score(criterion.rejector)
        attack = WorstScore(self.ball, score, seed=self.seed)
        parts = zip(*(part.split(self.bs) for part in (x, y, torch.arange(len(y)))), strict=True)
        found = [attack(self.model, *(one.to(self.at) for one in part)).cpu() for part in parts]
        out, attacked = self.outputs(x, y), self.outputs(torch.cat(found), y)
        scores, right = values(score, out), (prediction(out) == y.cpu()).numpy()
        wrong = (prediction(attacked) != y.cpu()).numpy()
        case = WorstCase.of(scores, np.where(wrong, values(score, attacked), -np.inf))
        name = show(score) if isinstance(score, Spec) else "the rejector"
        return WorstCaseRow.of(case, name, scores, right, "these images, clean")

    def report(
        self, x: Tensor, y: Tensor, criterion: AcceptedError | None, rule: str, worst_score: bool
    ) -> AuditReport:
        """Run all attacks and checks on the test images."""
        attacks = self.attacks(criterion)
        worst = self.worst_case(x, y, criterion) if worst_score else None
        results = [self.run(attack, x, y) for attack in attacks]
        of_rejector: list[EnsembleResult | None] = [*results[1:], None, None]
        last = min(1, len(results) - 1)  # on the classifier with its rejector, if it has one
        first = (part[:MOST_IMAGES].to(self.at) for part in (x, y))
        if self.verbose:  # a minute or more on a CPU
            sys.stdout.write(f"checking {min(len(y), MOST_IMAGES)} images for signs of failure\n")
            sys.stdout.flush()
        with checked(self.model, *first) as (own, some, labels):
            near = {
                type(attack).__name__: (attack.chain, result.x_adv[: len(some)].to(some))
                for attack, result in zip(attacks[:2], results, strict=False)
                if result.members or result is results[0]  # an attack that was skipped is no sign
            }
            before, masking = results[0].clean_labels[: len(some)], attacks[last].masking
            given = near, before, criterion, self.bs, masking
            checks, curve = foreign_checks(own, some, labels, *given)
        sanity = [*checks, *(check for one in results[:2] for check in success_checks(one))]
        sanity.append(implausible(results[last], self.ball, self.data, self.claim))
        warnings = dict.fromkeys(sentence for one in results for sentence in one.warnings)
        threshold = criterion.threshold if criterion is not None else None
        assert not isinstance(threshold, OperatingPoint)
        made = provenance(
            self.model, (x, y), self.at, command=self.command, seed=self.seed,
            version=self.version, batch_size=self.bs, data=self.data, threshold=threshold,
        )  # fmt: skip
        return AuditReport(
            self.name, show(self.ball), rule, threshold, results[0], of_rejector[0],
            of_rejector[1], tuple(sanity), tuple(warnings), self.claim, curve, made, x, worst,
        )  # fmt: skip


def audit(
    model: Any, x: Any, y: Any = None, *, rejector: AnyRejector | None = None,
    eps: float = 8 / 255, norm: str = "Linf", threshold: float | None = None, tpr: float = 0.95,
    cal: tuple[Any, Any] | None = None, version: str = "auto", bs: int = 250, seed: int = 0,
    device: str | torch.device | None = None, state_folder: str | Path | None = None,
    verbose: bool = False, name: str = "", claim: float | None = None, data: str = "",
    command: str = "demur.audit", worst_score: bool = False,
) -> AuditReport:  # fmt: skip
    """Return an audit of a classifier, with or without a rejector.

    Args:
        model: A model from images, N, C, H, W in [0, 1], to logits or an `Output`; a function of
            NumPy arrays, a classifier of scikit-learn or Keras, or a text as for `demur audit`.
        x: Test images: a tensor, a NumPy array, or a DataLoader that yields labels too.
        y: True labels, N; None if x yields them.
        rejector: A rejector such as Con(), or a detector from images to scores (high accepts). None
            takes what a `RejectClassModel` or a service rejects, else the classifier alone.
        eps: The radius of the ball.
        norm: "Linf", "L2" or "L1".
        threshold: The threshold of the rejector; None chooses it on calibration images.
        tpr: Share of the correct predictions on calibration images that the threshold accepts.
        cal: Calibration images and labels. None takes a random 30% of the given images away.
        version: "standard", "fast" (fewer queries), "rand" (randomised models), "black-box" (models
            without a gradient); "auto" chooses, "fast" where a CPU may need more than ten minutes.
        bs: Batch size.
        seed: The seed of all random numbers, those of a randomised model among them.
        device: Where to move model and images; None leaves the model where it is.
        state_folder: A folder for the progress of each attack; the same call resumes from it.
        verbose: Write progress to standard output.
        name: The name of the model in the report.
        claim: The claimed share of images that no attack breaks (by an error that is accepted).
        data: The data set; cifar10, cifar100 and imagenet have best known figures to compare with.
        command: What the report names as the command that made it.
        worst_score: Also find the accepted errors at every threshold of the rejector.

    Example:
        >>> import demur, torch
        >>> x, y = demur.Digits().load()["test"].batch(slice(0, 60))
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)).eval()
        >>> report = demur.audit(net, x, y, eps=0.1, version="fast")
    """
    at = _check_threshold(rejector, threshold, cal)
    name = name or (model if isinstance(model, str) else type(model).__name__)
    options = device, state_folder, verbose, name, claim, data.lower(), command
    task = _Audit(norm, eps, version, bs, seed, *options)
    images, criterion, rule, model = _whole(x, y), None, "", as_model(model)
    if rejector is None and isinstance(model, RejectClassModel):
        rejector, at = ModelScore(), 0.0
    empty = images[0][:0].to(device_for(model, images[0], task.device))
    resumes = state_folder is not None and any(Path(state_folder).glob("*.state*"))
    # After a resume an example is judged by other draws than those that led to it.
    with forked_rng(empty, None if resumes else seed):
        bound = task.begin(model, rejector, *images)
        if bound is not None:
            criterion, rule, images = task.freeze(bound, images, cal and _whole(*cal), at, tpr)
        return task.report(*images, criterion, rule, worst_score)


def _check_threshold(rejector: object, at: Any, cal: Any) -> float | None:
    """Return the threshold; raise BadInput if it, or what it is chosen on, is no possible one."""
    if rejector is None and at is not None:
        raise BadInput("a threshold belongs to a rejector; give rejector=Con(), or leave it out")
    if at is not None and not isinstance(at, Real):
        raise BadInput(f"the threshold must be a number, not {at!r}")
    if cal is not None and not (isinstance(cal, tuple | list) and len(cal) == 2):
        raise BadInput("cal must be a pair (images, labels)")
    return at  # type: ignore[return-value]


def _whole(x: Any, y: Any = None) -> Images:
    images, labels = Spool(), []
    for part, own in image_parts(x, y):
        images.append(part)
        labels.append(own)
    return images.tensor(), torch.cat(labels)


def _split(images: Images, seed: int) -> tuple[Images, Images]:
    """Return calibration images and the others, which keep their order."""
    x, y = images
    count = int(CAL_SHARE * len(y))
    if count < 2:
        raise BadInput(
            f"{len(y)} images are too few to hold some out; give cal=(x, y) or a threshold"
        )
    order = permutation(seed, len(y), stream=0).to(y.device)
    cal, test = order[:count].sort().values, order[count:].sort().values
    return (x[cal], y[cal]), (x[test], y[test])
