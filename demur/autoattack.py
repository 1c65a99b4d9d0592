"""AutoAttack's Python interface (Croce and Hein 2020), for classifiers and rejecting models.

    x_adv = AutoAttack(model, norm="Linf", eps=8/255).run_standard_evaluation(x, y)
    x_adv = RejectAutoAttack(model, AcceptedError(Con(), 0.7)).run_standard_evaluation(x, y, bs=250)

The attacks run one after the other, each on the images on which no earlier one succeeded. With
`state_path` the progress is saved, and the same call resumes after an interruption.
"""

import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import get_args

import torch
from torch import Tensor, nn

from demur import attacks
from demur.attacks.attack import AttackBatch
from demur.attacks.autoattack import MEMBERS, VERSIONS, Version
from demur.attacks.chain import NOT_BROKEN, Chain, ChainState
from demur.attacks.checked_model import checked
from demur.attacks.criteria import AcceptedError
from demur.attacks.reject_autoattack import RejectVersion
from demur.balls import L2, Ball, Linf
from demur.engine import accelerated, check_model_engine, cudnn_benchmark
from demur.errors import BadInput, suggestion
from demur.evaluate.ensemble_state import FINGERPRINT_IMAGES, EnsembleState, concat_states
from demur.evaluate.preflight import preflight_warnings
from demur.gradient import Model
from demur.images import check_batch
from demur.nan_checks import raise_deferred
from demur.output import prediction

BALLS: dict[str, type[Ball]] = {"Linf": Linf, "L2": L2}
RESTARTS = dict(VERSIONS["older"])  # for version="custom", as in the original code


class EnsembleEvaluation:
    """Run a chain of attacks on one model, with progress messages and resumption."""

    def __init__(
        self,
        model: Model,
        chain: Chain,
        names: Sequence[str],
        verbose: bool,
        device: str | torch.device | None,
        engine: str = "auto",
    ) -> None:
        check_model_engine(engine)
        self.engine = engine
        self.chain, self.names, self.verbose, self.device = chain, list(names), verbose, device
        self.model: Model = model
        if device is not None and isinstance(model, nn.Module):
            self.model = model.to(device)

    def run_standard_evaluation(
        self,
        x_orig: Tensor,
        y_orig: Tensor,
        bs: int = 250,
        return_labels: bool = False,
        state_path: str | Path | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return adversarial examples for all images, N, C, H, W.

        An image on which no attack succeeds is returned unchanged, unless the chain ranks tries.

        Args:
            x_orig: Images, N, C, H, W, in [0, 1].
            y_orig: True labels, N, int64.
            bs: Batch size.
            return_labels: Return the predicted labels of the adversarial examples as well.
            state_path: A file to save progress to and to resume from. A damaged file, or one of
                another model, other images or other attacks raises BadInput and is kept.
        """
        if bs < 1:
            raise BadInput(f"the batch size bs must be at least 1, not {bs}")
        check_batch(x_orig, y_orig)
        x, y = (part.to(self.device or part.device) for part in (x_orig, y_orig))
        with ExitStack() as stack:
            if self.engine != "plain":  # the checks would tune kernels for batches of their own
                stack.enter_context(cudnn_benchmark(False))
            model, x, y = stack.enter_context(checked(self.model, x, y))
            first = x[:FINGERPRINT_IMAGES], y[:FINGERPRINT_IMAGES]
            for sentence in preflight_warnings(model, self.chain, *first):
                warnings.warn(sentence, stacklevel=2)
            fast = stack.enter_context(accelerated(model, x, y, bs, self.engine, self._log))
            batch = AttackBatch(fast, x, y, torch.arange(len(x)).to(y), None)
            state = EnsembleState(state_path, self.chain, model, batch)
            start = [self.chain.start(batch.select(rows)) for rows in batch.index.split(bs)]
            chain_state = state.load(concat_states(start), bs)
            self._log(f"initially: {_summary(chain_state)}")
            for member in range(len(self.chain.attacks)):
                self._run(member, batch, bs, chain_state, state)
            x_adv = chain_state.x_adv.to(x_orig.device)
            if not return_labels:
                return x_adv
            labels = [prediction(fast(part)) for part in chain_state.x_adv.split(bs)]
            return x_adv, torch.cat(labels).to(y_orig)

    def _run(
        self,
        member: int,
        batch: AttackBatch,
        bs: int,
        chain_state: ChainState,
        state: EnsembleState,
    ) -> None:
        """Run one member of the chain on the remaining images, batch by batch."""
        started = perf_counter()
        for rows in chain_state.remaining(member).split(bs):
            self.chain.advance(member, rows, batch, chain_state, stream=0)
            raise_deferred()
            self.chain.check_result(batch.x[rows], chain_state.x_adv[rows])
            state.save(chain_state)
        state.save(chain_state, at_once=True)
        name, count = self.names[member], int((chain_state.broken_by == member).sum())
        self._log(f"after {name}: {_summary(chain_state)} ({perf_counter() - started:.1f} s)")
        if name == "square" and count and member > 0:
            warnings.warn(
                f"Square succeeded on {count} images where every gradient attack failed: the "
                "model may mask its gradients; use a transfer attack or a surrogate", stacklevel=3,
            )  # fmt: skip

    def _log(self, sentence: str) -> None:
        if self.verbose:
            sys.stdout.write(f"{sentence}\n")
            sys.stdout.flush()


class AutoAttack(EnsembleEvaluation):
    """AutoAttack (Croce and Hein 2020) on any model that returns logits.

    The signature is that of the authors' code. Unlike there, `seed` must be an integer, every
    run is repeatable, and the noise of an image does not depend on the batch size.

    Args:
        model: A model from images, N, C, H, W in [0, 1], to logits or an `Output`.
        norm: "Linf" or "L2".
        eps: The radius of the ball.
        seed: The seed of all random numbers.
        verbose: Write one line per attack to standard output.
        attacks_to_run: Names of attacks for version="custom": apgd-ce, apgd-dlr, apgd-t, fab,
            fab-t, square.
        version: "standard", "plus", "rand", "older" (before August 2020) or "custom".
        device: Where to move the model and the images; None leaves them where they are.
        engine: "auto" queries a faster copy of an `nn.Module` where that is possible; the model
            itself confirms every success. "plain" queries the model itself.

    Example:
        >>> import torch
        >>> from demur import AutoAttack
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> attack = AutoAttack(model, version="custom", attacks_to_run=["apgd-ce"], verbose=False)
        >>> x_adv = attack.run_standard_evaluation(torch.rand(4, 1, 8, 8), torch.arange(4))
    """

    def __init__(
        self,
        model: Model,
        norm: str = "Linf",
        eps: float = 8 / 255,
        seed: int = 0,
        verbose: bool = True,
        attacks_to_run: Sequence[str] = (),
        version: str = "standard",
        device: str | torch.device | None = None,
        engine: str = "auto",
    ) -> None:
        versions = (*VERSIONS, "custom")
        if version not in versions:
            hint = suggestion(version, versions)
            raise BadInput(f"AutoAttack has no version {version!r}; {hint}")
        if (version == "custom") != bool(attacks_to_run):
            raise BadInput(
                "attacks_to_run and version='custom' must be used together; "
                f"choose from {', '.join(MEMBERS)}"
            )
        base: Version = next((known for known in VERSIONS if known == version), "standard")
        spec = attacks.AutoAttackEnsemble(ball_by_name(norm, eps), version=base, seed=seed)
        if attacks_to_run:
            names = [attacks_to_run] if isinstance(attacks_to_run, str) else list(attacks_to_run)
            chain = Chain(tuple(spec.member(name, RESTARTS.get(name, 1)) for name in names))
        else:
            names = [name for name, _ in VERSIONS[spec.version]]
            chain = spec.chain()
        super().__init__(model, chain, names, verbose, device, engine)


class RejectAutoAttack(EnsembleEvaluation):
    """Attack ensemble for a model that rejects: success is a wrong and accepted prediction.

    AutoAttack skips an image once it is misclassified, even if the model rejects it. This
    ensemble counts accepted errors only; see `attacks.RejectAutoAttackEnsemble`.

    Args:
        model: A model from images, N, C, H, W in [0, 1], to logits or an `Output`.
        criterion: The success criterion, with a number as threshold: AcceptedError(Con(), 0.7).
        norm: "Linf" or "L2".
        eps: The radius of the ball.
        seed: The seed of all random numbers.
        verbose: Write one line per attack to standard output.
        version: "standard" or "fast".
        device: Where to move the model and the images; None leaves them where they are.
        engine: "auto" queries a faster copy of an `nn.Module` where that is possible; the model
            itself confirms every success. "plain" queries the model itself.

    Example:
        >>> import torch
        >>> from demur import AcceptedError, Con, RejectAutoAttack
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> criterion = AcceptedError(Con(), 0.2)
        >>> attack = RejectAutoAttack(model, criterion, version="fast", verbose=False)
        >>> x_adv = attack.run_standard_evaluation(torch.rand(4, 1, 8, 8), torch.arange(4))
    """

    def __init__(
        self,
        model: Model,
        criterion: AcceptedError,
        norm: str = "Linf",
        eps: float = 8 / 255,
        seed: int = 0,
        verbose: bool = True,
        version: str = "standard",
        device: str | torch.device | None = None,
        engine: str = "auto",
    ) -> None:
        known: tuple[RejectVersion, ...] = get_args(RejectVersion)
        chosen = next((name for name in known if name == version), None)
        if chosen is None:
            raise BadInput(
                f"the version of RejectAutoAttack must be {' or '.join(known)}, not {version!r}"
            )
        if not isinstance(criterion.threshold, float):
            raise BadInput(
                "the criterion needs a number as its threshold: AcceptedError(Con(), 0.7)"
            )
        spec = attacks.RejectAutoAttackEnsemble(
            ball_by_name(norm, eps), criterion, version=chosen, seed=seed
        )
        super().__init__(model, spec.chain(), list(spec.members()), verbose, device, engine)


def _summary(chain_state: ChainState) -> str:
    robust, count = int((chain_state.broken_by == NOT_BROKEN).sum()), len(chain_state.broken_by)
    return f"{100 * robust / count:.2f}% of {count} images are robust"


def ball_by_name(norm: str, eps: float) -> Ball:
    """Return the ball of the norm "Linf" or "L2"; raise BadInput for another name."""
    if norm not in BALLS:
        raise BadInput(f"norm must be {' or '.join(BALLS)}, not {norm!r}")
    return BALLS[norm](eps)
