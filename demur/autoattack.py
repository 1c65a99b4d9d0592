"""The interface that users of AutoAttack know, for classifiers and for those that refuse.

    AutoAttack(model, norm="Linf", eps=8/255, version="standard").run_standard_evaluation(x, y)
    RejectAutoAttack(model, Slips(Con(), 0.7), eps=8/255).run_standard_evaluation(x, y, bs=250)

Members run one after the other over all images; whoever is not yet broken goes on. With a
`state_path` every finished batch is kept, and the same call goes on where it was stopped.
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
from demur.attacks.chain import NOBODY, Chain, Standing
from demur.attacks.criteria import Slips
from demur.attacks.goals import CE
from demur.attacks.rejecting import RejectVersion
from demur.attacks.victims import Victims
from demur.balls import L2, Ball, Linf
from demur.batch import check_batch
from demur.errors import BadInput, suggestion
from demur.evaluate.standing import State, joined
from demur.gradient import Model, gradient
from demur.output import Output, output_of, prediction
from demur.spec import digest

BALLS: dict[str, type[Ball]] = {"Linf": Linf, "L2": L2}
LOOKED_AT = 64  # images that a model is judged by before it is attacked


class Evaluation:
    """A chain of attacks on one model, told as it goes."""

    def __init__(self, model: Model, chain: Chain, names: Sequence[str], verbose: bool) -> None:
        self.model, self.chain, self.names, self.verbose = model, chain, list(names), verbose

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
        self._look(x_orig[:LOOKED_AT], y_orig[:LOOKED_AT])
        on = Victims(self.model, x_orig, y_orig, torch.arange(len(x_orig)).to(y_orig), None)
        state = State(state_path, digest(self.chain), on)
        standing = state.kept()
        if standing is None:
            standing = joined([self.chain.begun(on.at(rows)) for rows in on.index.split(bs)])
        self._say(f"to begin with: {_told(standing)}")
        for place in range(len(self.chain.attacks)):
            self._run(place, on, bs, standing, state)
        x_adv = standing.x_adv
        return (x_adv, self._labels(x_adv, bs)) if return_labels else x_adv

    def _run(self, place: int, on: Victims, bs: int, standing: Standing, state: State) -> None:
        """One member on all that is left, batch by batch."""
        began = perf_counter()
        for rows in standing.left(place).split(bs):
            self.chain.advance(place, rows, on, standing, stream=0)
            state.keep(standing)
        name, found = self.names[place], int((standing.broken_by == place).sum())
        self._say(f"after {name}: {_told(standing)} ({perf_counter() - began:.1f} s)")
        if name == "square" and found and place > 0:
            warnings.warn(
                f"random squares broke {found} images that no gradient broke: the model may hide "
                "its gradients; attack it by transfer or with a surrogate", stacklevel=3,
            )  # fmt: skip

    def _seen(self, x: Tensor) -> Output:
        with torch.no_grad():
            return output_of(self.model(x)).detached()

    def _labels(self, x: Tensor, bs: int) -> Tensor:
        return torch.cat([prediction(self._seen(part)) for part in x.split(bs)])

    def _say(self, sentence: str) -> None:
        if self.verbose:
            sys.stdout.write(f"{sentence}\n")
            sys.stdout.flush()

    def _look(self, x: Tensor, y: Tensor) -> None:
        """Warnings about what would make the result meaningless."""
        if isinstance(self.model, nn.Module) and self.model.training:
            warnings.warn("the model is in train mode; call model.eval() first", stacklevel=3)
        first, again = self._seen(x), self._seen(x)
        check_batch(x, y, first.logits.shape[-1])
        looks = max((getattr(attack, "looks", 1) for attack in self.chain.attacks), default=1)
        if not torch.equal(first.logits, again.logits) and looks == 1:
            warnings.warn("the model answers at random; use version='rand'", stacklevel=3)
        sums = first.logits.sum(-1)
        if first.logits.min() >= 0 and torch.allclose(sums, torch.ones_like(sums), atol=1e-4):
            warnings.warn("the model returns probabilities; give it logits instead", stacklevel=3)
        grad = gradient(self.model, CE(), x, y).grad.flatten(1)
        zero = int((grad == 0).all(1).sum())
        if zero:
            warnings.warn(
                f"the gradient is zero for {zero} of {len(x)} images; the result may be far too "
                "good, and Square alone tells something", stacklevel=3,
            )  # fmt: skip


class AutoAttack(Evaluation):
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
        spec = attacks.AutoAttack(ball_named(norm, eps), version=whole, seed=seed)
        if attacks_to_run:
            names = list(attacks_to_run)
            chain = Chain(tuple(spec.member(name) for name in names))
        else:
            names = [name for name, _ in VERSIONS[spec.version]]
            chain = spec.chain()
        super().__init__(_on(model, device), chain, names, verbose)


class RejectAutoAttack(Evaluation):
    """The ensemble for a model that may refuse: broken is what is wrong and accepted."""

    def __init__(
        self,
        model: Model,
        rule: Slips,
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
        if not isinstance(rule.at, float):
            raise BadInput("give the rule a number as its threshold: Slips(Con(), 0.7)")
        spec = attacks.RejectAutoAttack(ball_named(norm, eps), rule, version=whole, seed=seed)
        super().__init__(_on(model, device), spec.chain(), spec.names(), verbose)


def _told(standing: Standing) -> str:
    held = int((standing.broken_by == NOBODY).sum())
    return f"{100 * held / len(standing.broken_by):.2f}% of {len(standing.broken_by)} images hold"


def ball_named(norm: str, eps: float) -> Ball:
    """The ball that a norm's usual name means."""
    if norm not in BALLS:
        raise BadInput(f"norm must be {' or '.join(BALLS)}, not {norm!r}")
    return BALLS[norm](eps)


def _on(model: Model, device: str | torch.device | None) -> Model:
    if device is not None and isinstance(model, nn.Module):
        model.to(device)
    return model
