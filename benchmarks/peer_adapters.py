"""Adapters of other libraries' attacks to one signature: craft(x, y, batch_size) -> x_adv.

    craft = pyautoattack_member("square")(PeerSetup(net, Linf(0.15), step=0.0375, classes=10))

The libraries are optional and imported only here. They get a plain torch net from images to logits
with frozen weights. Where a library returns no image for a failed attack, the adapter returns the
clean one.
"""

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, nn

from demur.attacks import (
    APGD,
    CW,
    DLR,
    FAB,
    PGD,
    Attack,
    AutoAttackEnsemble,
    MultiTarget,
    Square,
    TargetedDLR,
)
from demur.attacks.balls import Linf
from demur.errors import BadInput, suggestion
from demur.images import per_image
from demur.nets import RejectingNet

Craft = Callable[[Tensor, Tensor, int], Tensor]
ANY_DISTANCE = 100.0  # a radius that contains every image
ART = "adversarial-robustness-toolbox"
TARGETS = 9  # as in AutoAttack, like `steps` and `queries` below


@dataclass(frozen=True)
class PeerSetup:
    """The net, ball and budget that both sides of a peer comparison use."""

    net: nn.Module  # images to logits
    ball: Linf
    step: float  # step size of PGD
    classes: int
    steps: int = 100
    queries: int = 5000
    cw: CW = CW("L2", searches=6, steps=150, rate=0.04, constant=1.0)

    @property
    def targets(self) -> int:
        """The number of wrong classes that a targeted attack tries."""
        return min(TARGETS, self.classes - 1)


Adapter = Callable[[PeerSetup], Craft]


class LibraryMissing(Exception):
    """A library is not installed."""


def library(name: str) -> Any:
    """Import an optional library without its warnings; raise LibraryMissing if there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(name)
    except ImportError as error:
        raise LibraryMissing(name) from error


def library_of(peer: str) -> str:
    """The library in the name of a peer: the part before the comma."""
    return peer.partition(",")[0]


@contextmanager
def seeded(device: torch.device) -> Iterator[None]:
    """Seed the global generators with 0 inside the block: other libraries draw from them."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.set_rng_state(torch.Generator().manual_seed(0).get_state())
        if device.type == "cuda":
            torch.cuda.set_rng_state(torch.Generator(device).manual_seed(0).get_state(), device)
        yield


def in_batches(craft: Callable[[Tensor, Tensor], Tensor]) -> Craft:
    """Extend an attack on one batch to any number of images."""

    def craft_all(x: Tensor, y: Tensor, size: int) -> Tensor:
        batches = zip(x.split(size), y.split(size), strict=True)
        return torch.cat([craft(*batch).detach() for batch in batches])

    return craft_all


# ------------------------------------------------------------------------------------- foolbox


def foolbox_pgd(steps: int) -> Adapter:
    """PGD from a random start."""

    def adapter(setup: PeerSetup) -> Craft:
        attack_class = library("foolbox").attacks.LinfPGD
        attack = attack_class(steps=steps, abs_stepsize=setup.step)
        return _by_foolbox(setup, attack, setup.ball.eps)

    return adapter


def foolbox_cw(setup: PeerSetup) -> Craft:
    """C&W with demur's searches, steps, rate and first constant."""
    attack_class, cw = library("foolbox").attacks.L2CarliniWagnerAttack, setup.cw
    attack = attack_class(cw.searches, cw.steps, stepsize=cw.rate, initial_const=cw.constant)
    return _by_foolbox(setup, attack, None)


def _by_foolbox(setup: PeerSetup, attack: Any, eps: float | None) -> Craft:
    def craft(x: Tensor, y: Tensor) -> Tensor:
        model = library("foolbox").PyTorchModel(setup.net, bounds=(0, 1), device=x.device)
        x_adv: Tensor = attack(model, x, y, epsilons=eps)[1]
        black = (x_adv == 0).flatten(1).all(1)  # foolbox's C&W returns zeros for a failure
        return torch.where(per_image(black, x), x, x_adv)

    return in_batches(craft)


# -------------------------------------------------------------------------------- torchattacks


def torchattacks_pgd(steps: int) -> Adapter:
    """PGD from a random start."""
    return lambda setup: in_batches(
        library("torchattacks").PGD(setup.net, eps=setup.ball.eps, alpha=setup.step, steps=steps)
    )


def torchattacks_apgd(loss: str) -> Adapter:
    """Auto-PGD on `ce` or `dlr`."""
    return lambda setup: in_batches(
        library("torchattacks").APGD(setup.net, eps=setup.ball.eps, steps=setup.steps, loss=loss)
    )


def torchattacks_fab(setup: PeerSetup) -> Craft:
    """FAB at any distance."""
    attack_class = library("torchattacks").FAB
    return in_batches(
        attack_class(setup.net, eps=ANY_DISTANCE, steps=setup.steps, n_classes=setup.classes)
    )


def torchattacks_square(setup: PeerSetup) -> Craft:
    """Square with demur's number of queries."""
    attack_class = library("torchattacks").Square
    return in_batches(attack_class(setup.net, eps=setup.ball.eps, n_queries=setup.queries))


def torchattacks_cw(setup: PeerSetup) -> Craft:
    """C&W with one constant and the total steps of demur's searches."""
    steps = setup.cw.searches * setup.cw.steps
    return in_batches(library("torchattacks").CW(setup.net, c=1, steps=steps, lr=setup.cw.rate))


# ----------------------------------------------------------------------------------------- ART


def art_attack(name: str, options: Callable[[PeerSetup], dict[str, Any]]) -> Adapter:
    """An attack of the Adversarial Robustness Toolbox, one restart."""

    def adapter(setup: PeerSetup) -> Craft:
        attacks, estimators = (
            library("art.attacks.evasion"),
            library("art.estimators.classification"),
        )

        def craft(x: Tensor, y: Tensor) -> Tensor:
            model = estimators.PyTorchClassifier(
                setup.net, nn.CrossEntropyLoss(), x.shape[1:], setup.classes, clip_values=(0, 1),
                device_type=x.device.type,
            )  # fmt: skip
            attack = getattr(attacks, name)(
                model, batch_size=len(x), verbose=False, **options(setup)
            )
            with torch.enable_grad():
                found = attack.generate(x.cpu().numpy(), y.cpu().numpy())
            return torch.from_numpy(found).to(x)

        return in_batches(craft)

    return adapter


def art_pgd(steps: int) -> Adapter:
    """PGD from a random start."""
    return art_attack(
        "ProjectedGradientDescentPyTorch",
        lambda setup: {
            "eps": setup.ball.eps, "eps_step": setup.step, "max_iter": steps, "num_random_init": 1,
        },
    )  # fmt: skip


def art_apgd(setup: PeerSetup) -> Craft:
    """Auto-PGD on the cross-entropy."""
    options = {"eps": setup.ball.eps, "eps_step": 2 * setup.ball.eps, "max_iter": setup.steps,
               "nb_random_init": 1, "loss_type": "cross_entropy"}  # fmt: skip
    return art_attack("AutoProjectedGradientDescent", lambda _: options)(setup)


def art_square(setup: PeerSetup) -> Craft:
    """Square with demur's number of queries."""
    options = {"eps": setup.ball.eps, "max_iter": setup.queries, "nb_restarts": 1}
    return art_attack("SquareAttack", lambda _: options)(setup)


def art_cw(setup: PeerSetup) -> Craft:
    """C&W with demur's searches, steps, rate and first constant."""
    cw = setup.cw
    options = {"binary_search_steps": cw.searches, "max_iter": cw.steps, "learning_rate": cw.rate,
               "initial_const": cw.constant}  # fmt: skip
    return art_attack("CarliniL2Method", lambda _: options)(setup)


# -------------------------------------------------------------------------------- pyautoattack


def pyautoattack_standard(setup: PeerSetup, version: str = "standard") -> Craft:
    """AutoAttack in its standard version, or another one."""
    return _by_pyautoattack(setup, setup.ball.eps, version=version)


def pyautoattack_as_it_comes(setup: PeerSetup) -> Craft:
    """AutoAttack as installed: its own batch size, and weights that require gradients."""
    trainable = replace(setup, net=copy.deepcopy(setup.net).requires_grad_())
    return _by_pyautoattack(trainable, setup.ball.eps, own_batches=True, version="standard")


def pyautoattack_member(name: str) -> Adapter:
    """One attack of AutoAttack, as the standard version runs it."""
    return lambda setup: _by_pyautoattack(setup, setup.ball.eps, version="custom", attacks=[name])


def pyautoattack_fab(setup: PeerSetup) -> Craft:
    """FAB at any distance."""
    return _by_pyautoattack(setup, ANY_DISTANCE, version="custom", attacks=["fab"])


def _by_pyautoattack(
    setup: PeerSetup, eps: float, own_batches: bool = False, **options: Any
) -> Craft:
    autoattack_class = library("pyautoattack").AutoAttack

    def craft_all(x: Tensor, y: Tensor, size: int) -> Tensor:
        ensemble = autoattack_class(
            setup.net, device=x.device, eps=eps, norm="Linf", seed=0, **options
        )
        ensemble.apgd.n_restarts = ensemble.fab.n_restarts = 1  # "custom" would use five
        ensemble.apgd_targeted.n_target_classes = ensemble.fab.n_target_classes = setup.targets
        ensemble.apgd.n_iter = ensemble.apgd_targeted.n_iter = ensemble.fab.n_iter = setup.steps
        ensemble.square.n_queries = setup.queries
        logging.getLogger("auto-attack").setLevel(logging.ERROR)
        batches = {} if own_batches else {"batch_size": size}
        x_adv: Tensor = ensemble.run_standard_evaluation(x, y, **batches)[0]
        return x_adv.detach()

    return craft_all


Distance = Literal["Linf", "squared L2"]


@dataclass(frozen=True)
class Pair:
    """An attack of demur and the peers it is compared with.

    Attributes:
        ours: demur's attack for a setup.
        peers: Adapters by library; a comma and a remark follow if a library is used in two ways.
        distance: The norm that a minimum-distance attack minimises, None for other attacks. Such
            an attack may leave the ball: a "Linf" image then counts as not broken, a "squared L2"
            image counts at any distance.
    """

    ours: Callable[[PeerSetup], Attack]
    peers: Mapping[str, Adapter]
    distance: Distance | None = None


def _pgd(steps: int) -> Pair:
    return Pair(
        lambda setup: PGD(setup.ball, steps=steps, step_size=setup.step),
        {
            "foolbox": foolbox_pgd(steps),
            "torchattacks": torchattacks_pgd(steps),
            ART: art_pgd(steps),
        },
    )


def _member(name: str, ours: Callable[[PeerSetup], Attack], **more: Adapter) -> Pair:
    """A single member of AutoAttack; torchattacks' versions descend from the same code."""
    return Pair(ours, {"pyautoattack": pyautoattack_member(name), **more})


def _multi_target(attack: Attack, setup: PeerSetup) -> MultiTarget:
    return MultiTarget(attack, targets=setup.targets, keep="success")


PAIRS: dict[str, Pair] = {
    "pgd-10": _pgd(10),
    "pgd-100": _pgd(100),
    "apgd-ce": _member(
        "apgd-ce",
        lambda setup: APGD(setup.ball, steps=setup.steps),
        torchattacks=torchattacks_apgd("ce"),
        **{ART: art_apgd},
    ),
    "apgd-dlr": _member(
        "apgd-dlr",
        lambda setup: APGD(setup.ball, steps=setup.steps, objective=DLR()),
        torchattacks=torchattacks_apgd("dlr"),
    ),
    "apgd-t": _member(
        "apgd-t",
        lambda setup: _multi_target(
            APGD(setup.ball, steps=setup.steps, objective=TargetedDLR()), setup
        ),
    ),
    "fab": Pair(
        lambda setup: FAB(setup.ball, steps=setup.steps, any_distance=True),
        {"pyautoattack": pyautoattack_fab, "torchattacks": torchattacks_fab},
        distance="Linf",
    ),
    "fab-t": _member(
        "fab-t", lambda setup: _multi_target(FAB(setup.ball, steps=setup.steps), setup)
    ),
    "square": _member(
        "square",
        lambda setup: Square(setup.ball, queries=setup.queries),
        torchattacks=torchattacks_square,
        **{ART: art_square},
    ),
    # torchattacks' AutoAttack takes 10 steps per member, so it is not comparable
    "autoattack": Pair(
        lambda setup: AutoAttackEnsemble(setup.ball),
        {
            "pyautoattack": pyautoattack_standard,
            "pyautoattack, as it comes": pyautoattack_as_it_comes,
        },
    ),
    "cw-l2": Pair(
        lambda setup: setup.cw,
        {"foolbox": foolbox_cw, "torchattacks": torchattacks_cw, ART: art_cw},
        distance="squared L2",
    ),
}


def pairs_by_name(names: tuple[str, ...]) -> dict[str, Pair]:
    """The pairs with these names, or all pairs if there are none."""
    for name in names:
        if name not in PAIRS:
            raise BadInput(f"there is no attack {name!r} to compare; {suggestion(name, PAIRS)}")
    return {name: PAIRS[name] for name in names or PAIRS}


def plain_copy(net: RejectingNet) -> RejectingNet:
    """Copy a net, in the same mode and with the same weights, with `torch.nn.Conv2d` layers.

    demur's convolutions have faster backward kernels; a comparison must not lend them to a peer.
    """
    plain = copy.deepcopy(net)
    for module in list(plain.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Conv2d):
                setattr(module, name, _plain_conv(child))
    return plain


def _plain_conv(conv: nn.Conv2d) -> nn.Conv2d:
    size, stride = conv.kernel_size[0], conv.stride[0]  # demur's are square with "same" padding
    plain = nn.Conv2d(conv.in_channels, conv.out_channels, size, stride, size // 2, bias=False)
    plain.weight = conv.weight
    return plain.train(conv.training)
