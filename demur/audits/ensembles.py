"""AutoAttack's Python interface: runs its members on any model, in parts that are saved.

With `state_path` the progress is saved, and the same call resumes after an interruption.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, get_args
from warnings import warn

import torch
from torch import Tensor, nn

from demur import attacks
from demur.attacks.attack import AcceptedError, AttackBatch, Rejected, RuleCriterion
from demur.attacks.attack_model import CheckedModel, Model, checked, on_outputs
from demur.attacks.autoattack import (
    BROKEN_CLEAN,
    MEMBERS,
    NOT_BROKEN,
    PASSES,
    VERSIONS,
    Chain,
    ChainState,
    MeanChain,
    RejectVersion,
    Version,
    check_version,
)
from demur.attacks.balls import ball_by_name
from demur.attacks.margins import cost
from demur.audits import ray_cluster
from demur.audits.ensemble_result import CLEAN, EnsembleResult, Member, joined
from demur.audits.ensemble_state import (
    FINGERPRINT_IMAGES,
    EnsembleState,
    MemberProgress,
    concat_states,
)
from demur.audits.flags import masking_checks, success_checks
from demur.audits.image_parts import (
    ArrayWriter,
    Decisions,
    Spool,
    decide_by_passes,
    device_for,
    image_parts,
    succeeded,
)
from demur.audits.masking import SURROGATE, OnMasking, square_signs
from demur.audits.model_loading import as_model
from demur.audits.preflight import (
    foreign_checks,
    preflight_warnings,
    rejector_warnings,
    with_logits,
)
from demur.engine import accelerated, check_model_engine, cudnn_benchmark
from demur.errors import BadInput, NoGradientError
from demur.evaluate.probing import is_random
from demur.images import check_batch, pixels_of
from demur.numerics import device_by_name, raise_deferred
from demur.sanity import CheckResult
from demur.spec import show

NO_AUTOATTACK = ", which is no AutoAttack"
RESTARTS = dict(VERSIONS["older"])  # for version="custom", as in the original code


class PartRun(NamedTuple):
    """What the attacks on images that fit into memory share."""

    model: CheckedModel
    batch: AttackBatch
    bs: int
    skip_without_gradient: bool  # skip members that need a gradient which is missing
    chain_state: ChainState
    state: EnsembleState
    seconds: dict[str, float]  # of each attack that ran
    skipped: dict[str, list[str]]  # attacks, by the reason
    workers: ray_cluster.Workers | None  # None attacks in this process


class EnsembleEvaluation:
    """Run a chain of attacks on one model, with progress messages and resumption."""

    def __init__(
        self, model: Model, chain: Chain, names: Sequence[str], verbose: bool,
        device: str | torch.device | None, engine: str = "auto",
        on_masking: OnMasking | None = None,
    ) -> None:  # fmt: skip
        check_model_engine(engine)
        self.engine = engine
        self.on_masking = on_masking or OnMasking(chain)
        self.chain, self.names, self.verbose, self.device = chain, list(names), verbose, device
        model = self.model = as_model(model)
        self.passes = 1  # that decide on an image, more for a randomised model
        self.masking: list[CheckResult] | None = None  # checks that were made during the attacks
        if isinstance(device, str):
            self.device = device = device_by_name(device)
        if device is not None and isinstance(model, nn.Module):
            self.model = model.to(device)

    def _members(self) -> tuple[Chain, list[str]]:
        """Return all attacks as one chain, those on masking last, and their names."""
        more = self.on_masking.attacks
        attacks = (*self.chain.attacks, *more.values())
        names = [*self.names[: len(self.chain.attacks)], *more]
        return replace(self.chain, attacks=attacks), names

    def run_standard_evaluation(
        self, x_orig: Tensor, y_orig: Tensor, bs: int = 250, return_labels: bool = False,
        state_path: str | Path | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Return adversarial examples for all images, N, C, H, W.

        An image on which no attack succeeds is returned unchanged, unless the chain ranks tries.
        `evaluate` returns the counts, too; arguments that are not listed are as there.

        Args:
            return_labels: Return the predicted labels of the adversarial examples as well.
            state_path: A file to save progress to and to resume from. A damaged file, or one of
                another model, other images or other attacks raises BadInput and is kept.
        """
        x_orig = pixels_of(x_orig)
        part = self._attack(x_orig, y_orig, bs, state_path)
        x_adv = part.x_adv.to(x_orig.device)
        return (x_adv, part.labels.to(y_orig)) if return_labels else x_adv

    def evaluate(
        self, x: Any, y: Any = None, bs: int = 250, state_path: str | Path | None = None,
        sanity: bool = True, x_adv_path: str | Path | None = None,
    ) -> EnsembleResult:  # fmt: skip
        """Return what the attacks found: counts, intervals, adversarial examples, sanity checks.

        Images are read in parts, so they may be larger than memory; noise and results do not depend
        on the parts. An attack that needs a gradient is skipped, with a warning, if the model has
        none.

        Args:
            x: Images in [0, 1], N, C, H, W: a tensor or a NumPy array, which may be memory-mapped
                (uint8 values are divided by 255); or an iterable of batches (images, labels) such
                as a DataLoader that does not shuffle. The model may be on another device.
            y: True labels, N; None if x yields them.
            bs: Batch size.
            state_path: A file to save progress to and to resume from, as in
                `run_standard_evaluation`; part k > 0 has the file STATE_PATH.k.
            sanity: Check for signs that the attacks were too weak, on the first 500 images. This
                takes 60 gradient queries per image.
            x_adv_path: A .npy file for the adversarial examples, which are then not held in memory.

        Raises:
            BadInput: The images, labels or paths are not as described, or a value is NaN.
        """
        with ExitStack() as files:
            writer = files.enter_context(ArrayWriter(x_adv_path)) if x_adv_path else None
            parts, count, spool = list[EnsembleResult](), 0, Spool()
            for number, (images, labels) in enumerate(image_parts(x, y)):
                path = state_path and (f"{state_path}.{number}" if number else state_path)
                part = self._attack(images, labels, bs, path, count, sanity and not number, True)
                count += len(labels)
                x_adv = part.x_adv.to(images.device)
                (spool if writer is None else writer).append(x_adv)
                parts.append(replace(part, x_adv=x_adv.new_empty(0)))
        x_adv = spool.tensor() if writer is None else writer.mapped()
        result = replace(joined(parts), x_adv=x_adv)
        more = success_checks(result) if result.sanity else ()
        return replace(result, sanity=(*result.sanity, *more))

    @property
    def title(self) -> str:
        return type(self).__name__

    def _attack(
        self, x_orig: Tensor, y_orig: Tensor, bs: Any, path: str | Path | None,
        first: int = 0, sanity: bool = False, skip: bool = False,
    ) -> EnsembleResult:  # fmt: skip
        """Run all attacks on images that fit into memory; `first` is the position of the first."""
        if not (isinstance(bs, int) and bs >= 1):
            raise BadInput(f"the batch size bs must be a whole number of at least 1, not {bs!r}")
        check_batch(x_orig, y_orig)
        with ExitStack() as stack:
            engine = "plain" if ray_cluster.RAY.get() else self.engine
            if engine != "plain":  # the checks would tune kernels for batches of their own
                stack.enter_context(cudnn_benchmark(False))
            device, given = device_for(self.model, x_orig, self.device), self.model
            x, y = x_orig.to(device), y_orig.to(device)
            if self.on_masking.rule is None:  # else the threshold is of the outputs as they are
                given = with_logits(given, x, y)
            model, x, y = stack.enter_context(checked(given, x, y))
            if not first:  # the first images decide for all parts
                random, self.masking = is_random(model, x[:FINGERPRINT_IMAGES]), None
                self.passes = PASSES if random or isinstance(self.chain, MeanChain) else 1
            clean = decide_by_passes(model, self.chain.criterion, x, y, bs, self.passes)
            warnings = [*map(_warn, self._first_warnings(model, clean, x, y))]
            fast = stack.enter_context(accelerated(model, x, y, bs, engine, self._log))
            index = first + torch.arange(len(x)).to(y)
            batch = AttackBatch(fast, x, y, index, None)
            state = EnsembleState(path, self._members()[0], model, batch)
            rows = torch.arange(len(x)).to(y).split(bs)
            start = [self.chain.start(batch.select(some)) for some in rows]
            chain_state = state.load(concat_states(start), bs)
            begun = "resumed" if chain_state.tried.any() else "initially"
            self._log(f"{begun}: {self._summary(chain_state)}")
            workers = None
            if ray_cluster.RAY.get():
                workers = ray_cluster.Workers(self._members()[0], model.model, batch, bs)
                stack.callback(workers.close)
            part = PartRun(model, batch, bs, skip, chain_state, state, {}, {}, workers)
            for member in range(len(self.chain.attacks)):
                self._run(member, part, batch)
            warnings += map(_warn, self._run_on_masking(part))
            result = self._part(part, y.cpu(), clean)
            if sanity:
                near, rule = {type(self).__name__: (self.chain, result.x_adv)}, self.on_masking.rule
                checks, _ = foreign_checks(model, x, y, near, clean.labels, rule, bs, self.masking)
                result = replace(result, sanity=tuple(checks))
            return replace(result, warnings=tuple(dict.fromkeys(warnings)))

    def _part(self, part: PartRun, y: Tensor, clean: Decisions) -> EnsembleResult:
        """Return what the attacks found on images that fit into memory."""
        (chain, names), criterion = self._members(), self.chain.criterion
        at = part.chain_state.x_adv, part.batch.y, part.bs
        attacked = decide_by_passes(part.model, criterion, *at, self.passes)
        broken_by, ball = part.chain_state.broken_by.cpu(), self.on_masking.ball
        left, blind = broken_by == NOT_BROKEN, self.on_masking.attacks
        members = tuple(
            Member(
                name, show(attack), attack.gradient_queries > 0 and name not in blind,
                attack.gradient_queries, attack.forward_queries, part.seconds.get(name, 0.0),
                int(((broken_by >= k) | left).sum()), int((broken_by == k).sum()),
            )
            for k, (name, attack) in enumerate(zip(names, chain.attacks, strict=True))
        )  # fmt: skip
        unconfirmed = int((~left & ~succeeded(criterion, attacked, y)).sum())
        words = [*names, CLEAN, ""]  # a negative broken_by counts from the end
        assert (words[BROKEN_CLEAN], words[NOT_BROKEN]) == (CLEAN, "")
        return EnsembleResult(
            f"{self.title}, {show(ball)}", isinstance(criterion, RuleCriterion),
            part.chain_state.x_adv, y, attacked.labels, attacked.accepted, clean.labels,
            clean.accepted,
            tuple(words[k] for k in broken_by.tolist()), part.seconds, members=members,
            # Other passes have judged the examples of a MeanChain.
            unconfirmed=0 if isinstance(chain, MeanChain) else unconfirmed,
            seeks_errors=not isinstance(criterion, Rejected), passes=self.passes,
            kinds=attacked.kinds, clean_kinds=clean.kinds,
        )  # fmt: skip

    def _first_warnings(
        self, model: CheckedModel, clean: Decisions, x: Tensor, y: Tensor
    ) -> list[str]:
        """Return a sentence for each problem that clean images show of model and rejector."""
        first = x[:FINGERPRINT_IMAGES], y[:FINGERPRINT_IMAGES]
        of_first = clean.passes[0, :, :FINGERPRINT_IMAGES].numpy()
        warnings = list(preflight_warnings(model, self.chain, *first, of_first))
        if isinstance(self.chain.criterion, RuleCriterion):
            right = (clean.labels == y.cpu()).numpy()
            scores = [score.double().numpy() for score in clean.scores]
            rule = self.chain.criterion.accept_rule
            warnings += rejector_warnings(rule, scores, clean.accepted.numpy(), right)
        return warnings

    def _run_on_masking(self, part: PartRun) -> list[str]:
        """Run the attacks on masking if there are signs of it; return warnings of all attacks."""
        masking, after = self.on_masking, len(self.chain.attacks)
        ran = [name for name in self.names if name in part.seconds]
        signs = square_signs(self.names, part.chain_state) if "square" in ran[1:] else []
        needed = bool(masking.attacks) and len(part.chain_state.remaining(after)) > 0
        if needed:
            if self.masking is None:
                self.masking = masking_checks(
                    part.model, part.batch.x, part.batch.y, masking.ball, masking.rule
                )
            signs = [*(check.kind for check in self.masking if check.flags), *signs]
        for member, name in enumerate(masking.attacks, after):
            if needed and (signs or (name == SURROGATE and masking.surrogate is not None)):
                started, size = perf_counter(), len(part.batch.x)
                with MemberProgress("student", size, self.verbose) as bar, bar.batch(1):
                    own = masking.batch(name, part.model, part.batch, part.bs)
                self._run(member, part, own)
                part.seconds[name] = perf_counter() - started
        skipped = [
            f"{', '.join(names)} {'was' if len(names) == 1 else 'were'} skipped: {reason}"
            for reason, names in part.skipped.items()
        ]
        return [*skipped, *(f"gradients may be masked: {sign}" for sign in signs)]

    def _run(self, member: int, part: PartRun, batch: AttackBatch) -> None:
        """Run one member of the chain on the remaining images."""
        chain, names = self._members()
        started, name, chain_state = perf_counter(), names[member], part.chain_state
        remaining, part.seconds[name] = chain_state.remaining(member), 0.0
        with MemberProgress(name, len(remaining), self.verbose) as progress:
            try:
                for rows in _blocks(chain, member, part, batch, progress):
                    self.chain.check_result(batch.x[rows], chain_state.x_adv[rows])
                    part.state.save(chain_state)
            except NoGradientError as error:
                if not part.skip_without_gradient:
                    raise
                del part.seconds[name]  # it is no attack of the result
                part.skipped.setdefault(str(error), []).append(name)
                return
        part.state.save(chain_state, at_once=True)
        part.seconds[name] = perf_counter() - started
        spent, work = part.seconds[name], cost(chain.attacks[member]) * len(remaining)
        later = sum(map(cost, self.chain.attacks[member + 1 :]))
        later *= len(chain_state.remaining(member + 1))
        left = f"; at most about {spent * later / work:.0f} s left" if later and work else ""
        self._log(f"after {name}: {self._summary(chain_state)} ({spent:.1f} s{left})")

    def _summary(self, chain_state: ChainState) -> str:
        robust, count = int((chain_state.broken_by == NOT_BROKEN).sum()), len(chain_state.broken_by)
        what = "are robust" if self.on_masking.rule is None else "are not rejected"
        if isinstance(self.chain.criterion, AcceptedError):
            what = "have no accepted error"
        return f"{100 * robust / count:.2f}% of {count} images {what}"

    def _log(self, sentence: str) -> None:
        if self.verbose:
            sys.stdout.write(f"{sentence}\n")
            sys.stdout.flush()


def _blocks(
    chain: Chain, member: int, part: PartRun, batch: AttackBatch, progress: MemberProgress
) -> Iterator[Tensor]:
    """Run one member on the remaining images in batches; yield the rows of each when it is done."""
    blocks = part.chain_state.remaining(member).split(part.bs)
    if part.workers is not None and batch is part.batch:
        for rows in part.workers.advance(member, blocks, part.chain_state):
            progress.add(len(rows))
            yield rows
        return
    for rows in blocks:
        with progress.batch(len(rows)):
            chain.advance(member, rows, batch, part.chain_state, stream=0)
        raise_deferred()
        yield rows


def _warn(sentence: str) -> str:
    warn(sentence, stacklevel=4)
    return sentence


class AutoAttack(EnsembleEvaluation):
    """AutoAttack (Croce and Hein 2020) on any model that returns logits.

    The signature is that of the authors' code. Unlike there, `seed` must be an integer, and the
    noise of an image depends on neither the batch size nor the engine. With engine="plain" on a CPU
    with the same number of threads a run repeats bit by bit. With "auto" the images may differ by
    rounding, and so may the verdict of an image on the edge: a trial of speed chooses the copy.

    Args:
        model: A model from images, N, C, H, W in [0, 1], to logits or an `Output`.
        norm: "Linf", "L2" or "L1".
        eps: The radius of the ball.
        seed: The seed of all random numbers.
        verbose: Write one line per attack to standard output.
        attacks_to_run: Names of attacks for version="custom": apgd-ce, apgd-dlr, apgd-t, fab,
            fab-t, square, hopskipjump, rays.
        version: "standard", "fast" (fewer steps and queries, no FAB), "plus", "rand" (for
            randomised models, other attacks than theirs: see `attacks.AutoAttackEnsemble`), "older"
            (before August 2020), "black-box" (Square,
            HopSkipJump and RayS, for a model without a gradient) or "custom". After "standard" and
            "plus", HopSkipJump, RayS and a student of the model run where gradients may be masked.
        device: Where to move the model and the images; None leaves them where they are.
        engine: "auto" queries a faster copy of an `nn.Module` where that is possible; the model
            itself confirms every success. "plain" queries the model itself.
        surrogate: A net whose gradients lead one more attack on the model; None trains a student
            where gradients may be masked.

    Example:
        >>> import torch
        >>> from demur import AutoAttack
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> attack = AutoAttack(model, version="custom", attacks_to_run=["apgd-ce"], verbose=False)
        >>> x_adv = attack.run_standard_evaluation(torch.rand(4, 1, 8, 8), torch.arange(4))
    """

    def __init__(
        self, model: Model, norm: str = "Linf", eps: float = 8 / 255, seed: int = 0,
        verbose: bool = True, attacks_to_run: Sequence[str] = (), version: str = "standard",
        device: str | torch.device | None = None, engine: str = "auto",
        surrogate: Model | None = None,
    ) -> None:  # fmt: skip
        check_version("AutoAttack", version, (*VERSIONS, "custom"))
        if (version == "custom") != bool(attacks_to_run):
            raise BadInput(
                "attacks_to_run and version='custom' must be used together; "
                f"choose from {', '.join(MEMBERS)}"
            )
        base: Version = next((known for known in VERSIONS if known == version), "standard")
        spec = attacks.AutoAttackEnsemble(ball_by_name(norm, eps), version=base, seed=seed)
        self.version = version
        if attacks_to_run:
            names = [attacks_to_run] if isinstance(attacks_to_run, str) else list(attacks_to_run)
            chain = Chain(tuple(spec.member(name, RESTARTS.get(name, 1)) for name in names))
        else:
            names, chain = list(spec.members()), spec.chain()
        on_masking = OnMasking(chain, version, seed, surrogate)
        super().__init__(model, chain, names, verbose, device, engine, on_masking)

    @property
    def title(self) -> str:
        if self.version == "custom":
            return f"{' and '.join(self.names)} alone{NO_AUTOATTACK}"
        if self.version == "fast":
            return f"a part of AutoAttack (fewer steps and queries, no FAB){NO_AUTOATTACK}"
        return f"AutoAttack ({self.version})"


class RejectAutoAttack(EnsembleEvaluation):
    """Attack ensemble for a model that rejects: success is a wrong and accepted prediction.

    AutoAttack skips an image once it is misclassified, even if the model rejects it. This
    ensemble counts accepted errors only; see `attacks.RejectAutoAttackEnsemble`. Arguments that are
    not listed are those of `AutoAttack`.

    Args:
        criterion: The success criterion, with a number as threshold: AcceptedError(Con(), 0.7).
        version: "standard", "fast", "rand" (for randomised models: the mean over passes counts) or
            "black-box" (Square, HopSkipJump and RayS). After "standard", HopSkipJump, RayS and a
            student of the model run where gradients may be masked.
        attacks_to_run: Names of the only attacks to run: product, balanced, product-t, closest,
            orthogonal, balanced-t, square, hopskipjump, rays.
        most_queries: The most gradient queries per image, for slow models: later attacks get fewer
            targets or passes, or none.

    Example:
        >>> import torch
        >>> from demur import AcceptedError, Con, RejectAutoAttack
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> criterion = AcceptedError(Con(), 0.2)
        >>> attack = RejectAutoAttack(model, criterion, eps=0.3, version="fast", verbose=False)
        >>> x_adv = attack.run_standard_evaluation(torch.rand(4, 1, 8, 8), torch.arange(4))
    """

    def __init__(
        self, model: Model, criterion: AcceptedError, norm: str = "Linf", eps: float = 8 / 255,
        seed: int = 0, verbose: bool = True, version: str = "standard",
        device: str | torch.device | None = None, engine: str = "auto",
        surrogate: Model | None = None, attacks_to_run: Sequence[str] = (),
        most_queries: int | None = None,
    ) -> None:  # fmt: skip
        chosen: RejectVersion = check_version("RejectAutoAttack", version, get_args(RejectVersion))
        if not isinstance(getattr(criterion, "threshold", None), float):
            raise BadInput(
                "the criterion needs a number as its threshold: AcceptedError(Con(), 0.7)"
            )
        criterion, model = on_outputs(criterion, as_model(model))
        asked = [attacks_to_run] if isinstance(attacks_to_run, str) else attacks_to_run
        spec = attacks.RejectAutoAttackEnsemble(
            ball_by_name(norm, eps), criterion, version=chosen, seed=seed,
            attacks_to_run=tuple(asked), most_queries=most_queries,
        )  # fmt: skip
        chain, names, self.part, self.version = spec.chain(), list(spec.members()), "", version
        if asked or most_queries:
            self.part = f" ({', '.join(names)} alone)"
        on_masking = OnMasking(chain, self.part or version, seed, surrogate)
        super().__init__(model, chain, names, verbose, device, engine, on_masking)

    @property
    def title(self) -> str:
        return f"RejectAutoAttack{' (fast)' * (self.version == 'fast')}{self.part}"
