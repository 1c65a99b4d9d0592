"""The interface that users of AutoAttack know, for classifiers and for those that refuse.

    AutoAttack(model, norm="Linf", eps=8/255, version="standard").run_standard_evaluation(x, y)
    RejectAutoAttack(model, AcceptedError(Con(), 0.7), eps=8/255).run_standard_evaluation(x, y, bs=250)

Members run one after the other over all images; whoever is not yet broken goes on. With a
`state_path` what is done is kept as it goes, and the same call goes on where it was stopped.
"""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import get_args

import torch
from torch import Tensor, nn

from demur import attacks
from demur.attacks.autoattack import MEMBERS, VERSIONS, Version
from demur.attacks.batch import AttackBatch
from demur.attacks.chain import NOBODY, Chain, ChainState
from demur.attacks.criteria import AcceptedError
from demur.attacks.reject_autoattack import RejectVersion
from demur.balls import L2, Ball, Linf
from demur.errors import BadInput, suggestion
from demur.evaluate.ensemble_state import LOOKED_AT, EnsembleState, concat_states
from demur.evaluate.preflight import preflight_warnings
from demur.gradient import Model
from demur.images import check_batch
from demur.output import as_output, prediction

BALLS: dict[str, type[Ball]] = {"Linf": Linf, "L2": L2}
RESTARTS = dict(VERSIONS["older"])  # of members chosen one by one, as in the original


class EnsembleEvaluation:
    """A chain of attacks on one model, told as it goes."""

    def __init__(
        self,
        model: Model,
        chain: Chain,
        names: Sequence[str],
        verbose: bool,
        device: str | torch.device | None,
    ) -> None:
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
        """Attacked images, and with `return_labels` what the model calls them."""
        check_batch(x_orig, y_orig)
        if bs < 1:
            raise BadInput(f"the batch size bs must be at least 1, not {bs}")
        x, y = (part.to(self.device or part.device) for part in (x_orig, y_orig))
        for sentence in preflight_warnings(self.model, self.chain, x[:LOOKED_AT], y[:LOOKED_AT]):
            warnings.warn(sentence, stacklevel=2)
        batch = AttackBatch(self.model, x, y, torch.arange(len(x)).to(y), None)
        state = EnsembleState(state_path, self.chain, batch)
        chain_state = state.kept()
        if chain_state is None:
            chain_state = concat_states(
                [self.chain.begun(batch.select(rows)) for rows in batch.index.split(bs)]
            )
        self._say(f"to begin with: {_told(chain_state)}")
        for member in range(len(self.chain.attacks)):
            self._run(member, batch, bs, chain_state, state)
        x_adv = chain_state.x_adv.to(x_orig.device)
        return (x_adv, self._labels(chain_state.x_adv, bs).to(y_orig)) if return_labels else x_adv

    def _run(
        self,
        member: int,
        batch: AttackBatch,
        bs: int,
        chain_state: ChainState,
        state: EnsembleState,
    ) -> None:
        """One member on all that is left, batch by batch."""
        began = perf_counter()
        for rows in chain_state.left(member).split(bs):
            self.chain.advance(member, rows, batch, chain_state, stream=0)
            state.keep(chain_state)
        state.keep(chain_state, at_once=True)
        name, found = self.names[member], int((chain_state.broken_by == member).sum())
        self._say(f"after {name}: {_told(chain_state)} ({perf_counter() - began:.1f} s)")
        if name == "square" and found and member > 0:
            warnings.warn(
                f"random squares broke {found} images that no gradient broke: the model may hide "
                "its gradients; attack it by transfer or with a surrogate", stacklevel=3,
            )  # fmt: skip

    @torch.no_grad()
    def _labels(self, x: Tensor, bs: int) -> Tensor:
        return torch.cat([prediction(as_output(self.model(part))) for part in x.split(bs)])

    def _say(self, sentence: str) -> None:
        if self.verbose:
            sys.stdout.write(f"{sentence}\n")
            sys.stdout.flush()


class AutoAttack(EnsembleEvaluation):
    """The four attacks of a version on any model that returns logits; images lie in [0, 1].

    With version="custom", `attacks_to_run` says which. A whole number of `seed` makes it
    repeatable; `device` may stay unset, since images and model say where they are.
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
    ) -> None:
        known = (*VERSIONS, "custom")
        if version not in known:
            raise BadInput(f"AutoAttack has no version {version!r}; {suggestion(version, known)}")
        if (version == "custom") != bool(attacks_to_run):
            raise BadInput("attacks_to_run goes with version='custom'; name some of its members: "
                           f"{', '.join(MEMBERS)}")  # fmt: skip
        whole: Version = next((one for one in VERSIONS if one == version), "standard")
        spec = attacks.AutoAttackEnsemble(ball_by_name(norm, eps), version=whole, seed=seed)
        if attacks_to_run:
            names = [attacks_to_run] if isinstance(attacks_to_run, str) else list(attacks_to_run)
            chain = Chain(tuple(spec.member(name, RESTARTS.get(name, 1)) for name in names))
        else:
            names = [name for name, _ in VERSIONS[spec.version]]
            chain = spec.chain()
        super().__init__(model, chain, names, verbose, device)


class RejectAutoAttack(EnsembleEvaluation):
    """The ensemble for a model that may refuse: broken is what is wrong and accepted."""

    def __init__(
        self,
        model: Model,
        rule: AcceptedError,
        norm: str = "Linf",
        eps: float = 8 / 255,
        seed: int = 0,
        verbose: bool = True,
        version: str = "standard",
        device: str | torch.device | None = None,
    ) -> None:
        known: tuple[RejectVersion, ...] = get_args(RejectVersion)
        whole = next((one for one in known if one == version), None)
        if whole is None:
            raise BadInput(f"RejectAutoAttack is {' or '.join(known)}, not {version!r}")
        if not isinstance(rule.threshold, float):
            raise BadInput("give the rule a number as its threshold: AcceptedError(Con(), 0.7)")
        spec = attacks.RejectAutoAttackEnsemble(
            ball_by_name(norm, eps), rule, version=whole, seed=seed
        )
        super().__init__(model, spec.chain(), list(spec.members()), verbose, device)


def _told(chain_state: ChainState) -> str:
    held = int((chain_state.broken_by == NOBODY).sum())
    return f"{100 * held / len(chain_state.broken_by):.2f}% of {len(chain_state.broken_by)} images hold"


def ball_by_name(norm: str, eps: float) -> Ball:
    """The ball that a norm's usual name means."""
    if norm not in BALLS:
        raise BadInput(f"norm must be {' or '.join(BALLS)}, not {norm!r}")
    return BALLS[norm](eps)
