"""Guards in other libraries: attack libraries, scikit-learn and the Hugging Face Hub."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.utils import estimator_checks
from torch import Tensor, nn

from demur import BadInput, Guard, LoadedRun, RejectingClassifier
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


def test_every_check_of_scikit_learn_that_applies_passes() -> None:
    """One is skipped unless SCIPY_ARRAY_API is set."""
    found = estimator_checks.check_estimator(RejectingClassifier(), on_fail=None, on_skip=None)
    assert len(found) > 40
    status = {one["check_name"]: one["status"] for one in found}
    assert {name for name, result in status.items() if result != "passed"} <= {
        "check_array_api_input"
    }


@pytest.mark.parametrize("labels", [[0, 0, 0, 0, 0, 1, 1, 1, 1], [*[0] * 19, 1]], ids=str)
def test_too_few_samples_to_hold_some_out_are_refused(labels: list[int]) -> None:
    """A threshold from training samples would accept too little of what comes later."""
    X = np.random.default_rng(0).random((len(labels), 2))
    with pytest.raises(BadInput, match="samples of 2 classes are too few to hold some out"):
        RejectingClassifier().fit(X, labels)
    enough = np.arange(10) % 2
    assert RejectingClassifier().fit(X[:1].repeat(10, 0), enough).threshold_ >= 0.5


def test_a_classifier_of_scikit_learn_gets_a_reject_option() -> None:
    X, y = load_iris(return_X_y=True)
    noisy = X + np.random.default_rng(0).normal(0, 0.6, X.shape)
    forest = RejectingClassifier(RandomForestClassifier(20, random_state=0), tpr=0.8).fit(noisy, y)
    accepted, correct = forest.accepts(noisy), forest.predict(noisy) == y
    assert 0.3 < accepted.mean() < 1
    assert correct[accepted].mean() > correct.mean()
    assert not hasattr(forest, "decision_function"), "a forest has none"
    assert cross_val_score(RejectingClassifier(), X, y).mean() > 0.9
    with pytest.raises(NotFittedError):
        RejectingClassifier().accepts(X)
    with pytest.raises(BadInput, match="of one class"):
        RejectingClassifier().fit(X, np.zeros(len(X), int))


def test_guards_are_saved_and_read_as_pretrained_models(
    guard: Guard, images: tuple[Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = guard.save_pretrained(tmp_path / "local")
    expected = guard(images[0])
    assert np.array_equal(Guard.from_pretrained(folder)(images[0]).accepted, expected.accepted)
    hub = pytest.importorskip("huggingface_hub")
    pushed: dict[str, Path] = {}
    made = SimpleNamespace(repo_id="me/guard")
    monkeypatch.setattr(hub, "create_repo", lambda name, **options: made)
    monkeypatch.setattr(
        hub,
        "upload_folder",
        lambda repo_id, folder_path, **options: pushed.update({repo_id: folder_path}),
    )
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **options: str(pushed[name]))
    guard.save_pretrained(tmp_path / "pushed", repo_id="me/guard", push_to_hub=True)
    assert (tmp_path / "pushed" / "README.md").read_text().startswith("---")
    assert np.array_equal(Guard.from_pretrained("me/guard")(images[0]).scores, expected.scores)
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(BadInput, match="is no folder and cannot be read from the Hub"):
        Guard.from_pretrained("not a name")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(BadInput, match="pip install huggingface_hub"):
        Guard.from_pretrained("me/guard")
