"""Guards in other libraries: attack libraries."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from demur import Guard, LoadedRun
from demur.data import Images

EPS = 0.3


@pytest.fixture(scope="module")
def guard(tiny_source: LoadedRun) -> Guard:
    return Guard.from_run(tiny_source, tpr=0.9)


@pytest.fixture(scope="module")
def images(test_images: Images) -> tuple[Tensor, Tensor]:
    return test_images.batch(slice(0, 16))


def torchattacks_pgd(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    library = pytest.importorskip("torchattacks")
    return torch.as_tensor(library.PGD(net, eps=EPS, alpha=EPS / 4, steps=5)(x, y))


def foolbox_pgd(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    library = pytest.importorskip("foolbox")
    model = library.PyTorchModel(net, bounds=(0, 1), device="cpu")
    _, clipped, _ = library.attacks.LinfPGD(steps=5)(model, x, y, epsilons=EPS)
    return torch.as_tensor(clipped)


def art_pgd(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    estimators = pytest.importorskip("art.estimators.classification")
    from art.attacks.evasion import ProjectedGradientDescent

    model = estimators.PyTorchClassifier(
        net, loss=nn.CrossEntropyLoss(), input_shape=tuple(x.shape[1:]), nb_classes=10,
        clip_values=(0, 1), device_type="cpu",
    )  # fmt: skip
    attack = ProjectedGradientDescent(model, eps=EPS, eps_step=EPS / 4, max_iter=5, verbose=False)
    return torch.as_tensor(attack.generate(x.numpy(), y.numpy()))


def pyautoattack_apgd(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    library = pytest.importorskip("pyautoattack")
    attack = library.AutoAttack(net, eps=EPS, version="custom", attacks=["apgd-ce"], seed=0)
    attack.apgd.n_restarts, attack.apgd.n_iter, attack.apgd.n_iter_orig = 1, 5, 5
    found = attack.run_standard_evaluation(x, y)
    return torch.as_tensor(found[0] if isinstance(found, tuple) else found)


@pytest.mark.parametrize(
    "attack", [torchattacks_pgd, foolbox_pgd, art_pgd, pyautoattack_apgd], ids=lambda a: a.__name__
)
def test_a_guards_classifier_is_attacked_by_other_libraries(
    attack: Callable[..., Tensor], guard: Guard, images: tuple[Tensor, Tensor]
) -> None:
    x, y = images
    x_adv = attack(guard.classifier(), x.clone(), y)
    assert (x_adv - x).abs().max() <= EPS + 1e-6
    before, after = guard(x), guard(x_adv.detach().clamp(0, 1))
    assert (after.labels == y.numpy()).sum() < (before.labels == y.numpy()).sum()
