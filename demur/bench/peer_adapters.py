"""Other libraries' attacks, each in one shape: craft(x, y, batch_size) -> x_adv.

    craft = pyautoattack_member("square")(PeerSetup(net, Linf(0.15), step_size=0.0375, classes=10))

They are optional, and imported here alone. The net is what they expect: images to logits, weights
held still, plain torch. Where a library keeps no image of its own for a failure, the clean one is
returned.
"""

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from demur.attacks import CW
from demur.balls import Linf
from demur.images import per_image

Craft = Callable[[Tensor, Tensor, int], Tensor]
ANY_DISTANCE = 100.0  # a radius that every image is within
TARGETS = 9  # AutoAttack's, as are steps and queries


@dataclass(frozen=True)
class PeerSetup:
    """What both sides are given, and how much work both may do."""

    net: nn.Module  # images to logits
    ball: Linf
    step: float  # of PGD
    classes: int
    steps: int = 100
    queries: int = 5000
    cw: CW = CW("L2", searches=6, steps=150, rate=0.04, constant=1.0)

    @property
    def targets(self) -> int:
        """The number of wrong classes that a targeted attack tries."""
        return min(TARGETS, self.classes - 1)


Adapter = Callable[[PeerSetup], Craft]


class Absent(Exception):
    """A library that is not installed."""


def library(name: str) -> Any:
    """An optional library, imported without its warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(name)
    except ImportError as error:
        raise Absent(name) from error


def library_of(peer: str) -> str:
    """The library that a peer comes from; what follows a comma says how it is used."""
    return peer.partition(",")[0]


@contextmanager
def seeded(device: torch.device) -> Iterator[None]:
    """The global generators at 0 for a while: other libraries draw from them."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.set_rng_state(torch.Generator().manual_seed(0).get_state())
        if device.type == "cuda":
            torch.cuda.set_rng_state(torch.Generator(device).manual_seed(0).get_state(), device)
        yield


def in_batches(craft: Callable[[Tensor, Tensor], Tensor]) -> Craft:
    """An attack on one batch, made to take any number of images."""

    def craft_all(x: Tensor, y: Tensor, size: int) -> Tensor:
        pieces = zip(x.split(size), y.split(size), strict=True)
        return torch.cat([craft(*piece).detach() for piece in pieces])

    return craft_all


# ------------------------------------------------------------------------------------- foolbox


def foolbox_pgd(steps: int) -> Adapter:
    """PGD from a random start."""

    def adapted(on: PeerSetup) -> Craft:
        kind = library("foolbox").attacks.LinfPGD
        return _by_foolbox(on, kind(steps=steps, abs_stepsize=on.step), on.ball.eps)

    return adapted


def foolbox_cw(on: PeerSetup) -> Craft:
    """C&W with our searches, steps, rate and first constant."""
    kind, cw = library("foolbox").attacks.L2CarliniWagnerAttack, on.cw
    attack = kind(cw.searches, cw.steps, stepsize=cw.rate, initial_const=cw.constant)
    return _by_foolbox(on, attack, None)


def _by_foolbox(on: PeerSetup, attack: Any, eps: float | None) -> Craft:
    def craft(x: Tensor, y: Tensor) -> Tensor:
        model = library("foolbox").PyTorchModel(on.net, bounds=(0, 1), device=x.device)
        x_adv: Tensor = attack(model, x, y, epsilons=eps)[1]
        black = (x_adv == 0).flatten(1).all(1)  # what a C&W that failed leaves
        return torch.where(per_image(black, x), x, x_adv)

    return in_batches(craft)


# -------------------------------------------------------------------------------- torchattacks


def torchattacks_pgd(steps: int) -> Adapter:
    """PGD from a random start."""
    return lambda on: in_batches(
        library("torchattacks").PGD(on.net, eps=on.ball.eps, alpha=on.step, steps=steps)
    )


def torchattacks_apgd(loss: str) -> Adapter:
    """Auto-PGD on `ce` or `dlr`."""
    return lambda on: in_batches(
        library("torchattacks").APGD(on.net, eps=on.ball.eps, steps=on.steps, loss=loss)
    )


def torchattacks_fab(on: PeerSetup) -> Craft:
    """FAB at any distance."""
    kind = library("torchattacks").FAB
    return in_batches(kind(on.net, eps=ANY_DISTANCE, steps=on.steps, n_classes=on.classes))


def torchattacks_cw(on: PeerSetup) -> Craft:
    """C&W with one constant, and the steps of all our searches together."""
    steps = on.cw.searches * on.cw.steps
    return in_batches(library("torchattacks").CW(on.net, c=1, steps=steps, lr=on.cw.rate))


# -------------------------------------------------------------------------------- pyautoattack


def pyautoattack_standard(on: PeerSetup) -> Craft:
    """The authors' AutoAttack."""
    return _by_pyautoattack(on, on.ball.eps, version="standard")


def pyautoattack_as_it_comes(on: PeerSetup) -> Craft:
    """The authors' AutoAttack with nothing made easier: its own batches, a net that could learn."""
    usual = replace(on, net=copy.deepcopy(on.net).requires_grad_())
    return _by_pyautoattack(usual, on.ball.eps, own_batches=True, version="standard")


def pyautoattack_member(name: str) -> Adapter:
    """One of its attacks, as its standard version runs it."""
    return lambda on: _by_pyautoattack(on, on.ball.eps, version="custom", attacks=[name])


def pyautoattack_fab(on: PeerSetup) -> Craft:
    """FAB at any distance."""
    return _by_pyautoattack(on, ANY_DISTANCE, version="custom", attacks=["fab"])


def _by_pyautoattack(on: PeerSetup, eps: float, own_batches: bool = False, **asked: Any) -> Craft:
    kind = library("pyautoattack").AutoAttack

    def craft_all(x: Tensor, y: Tensor, size: int) -> Tensor:
        whole = kind(on.net, device=x.device, eps=eps, norm="Linf", seed=0, **asked)
        whole.apgd.n_restarts = whole.fab.n_restarts = 1  # five where a version is spelt out
        whole.apgd_targeted.n_target_classes = whole.fab.n_target_classes = on.targets
        whole.apgd.n_iter = whole.apgd_targeted.n_iter = whole.fab.n_iter = on.steps
        whole.square.n_queries = on.queries
        logging.getLogger("auto-attack").setLevel(logging.ERROR)
        batches = {} if own_batches else {"batch_size": size}
        x_adv: Tensor = whole.run_standard_evaluation(x, y, **batches)[0]
        return x_adv.detach()

    return craft_all
