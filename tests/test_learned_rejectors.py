"""Rejectors fitted to features: formulas on small cases, and scikit-learn as reference."""

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.covariance import EmpiricalCovariance
from sklearn.neighbors import KernelDensity, NearestNeighbors
from torch import Tensor

from demur.calibrate import TPR
from demur.data import CIFAR10, CIFAR100, Digits
from demur.errors import BadInput
from demur.output import Output
from demur.rejectors import (
    GDA,
    GMM,
    KD,
    KNN,
    LID,
    Con,
    GDAStar,
    PerClass,
    TooFewImages,
    ViM,
    paper_grid,
)
from demur.rejectors.certainty import energy
from demur.rejectors.rule import Rejector, first_per_class

CLASSES = 3


def output(z: Tensor, label: Tensor, classes: int = CLASSES) -> Output:
    """Output with these features and predictions."""
    logits = 5 * torch.nn.functional.one_hot(label, classes).to(z.dtype)
    return Output(logits, z, z.new_zeros(len(z), 0))


@pytest.fixture
def cloud() -> tuple[Output, Tensor]:
    """Three classes in eight dimensions; a tenth of the predictions is wrong."""
    g = torch.Generator().manual_seed(0)
    y = torch.arange(300) % CLASSES
    centres = 4 * torch.randn(CLASSES, 8, generator=g, dtype=torch.float64)
    spread = torch.randn(8, 8, generator=g, dtype=torch.float64)
    z = centres[y] + torch.randn(300, 8, generator=g, dtype=torch.float64) @ spread
    predicted = torch.where(torch.rand(300, generator=g) < 0.1, (y + 1) % CLASSES, y)
    return output(z, predicted), y


def correct_part(cloud: tuple[Output, Tensor]) -> tuple[Tensor, Tensor]:
    out, y = cloud
    chosen = out.logits.argmax(1) == y
    return out.feature[chosen], y[chosen]


def test_kd_equals_its_formula() -> None:
    bank = torch.tensor([[0.0], [2.0], [10.0]], dtype=torch.float64)
    y = torch.tensor([0, 0, 1])
    score = KD(sigma=0.5).fit(output(bank, y, 2), y)
    asked = output(torch.tensor([[1.0], [1.0]], dtype=torch.float64), torch.tensor([0, 1]), 2)
    by_hand = [math.log((math.exp(-0.5) + math.exp(-0.5)) / 2), -0.5 * 81]
    assert torch.allclose(score(asked), torch.tensor(by_hand, dtype=torch.float64))


def test_kd_equals_scikit_learn_at_the_matching_bandwidth(cloud: tuple[Output, Tensor]) -> None:
    out, _ = cloud
    z, y = correct_part(cloud)
    sigma = 0.02
    theirs = np.empty(len(out.logits))
    predicted = out.logits.argmax(1)
    for label in range(CLASSES):
        estimator = KernelDensity(bandwidth=math.sqrt(1 / (2 * sigma))).fit(z[y == label].numpy())
        own = (predicted == label).numpy()
        theirs[own] = estimator.score_samples(out.feature[predicted == label].numpy())
    volume = -4 * math.log(math.pi / sigma)  # scikit-learn normalises the kernel
    assert np.allclose(KD(sigma).fit(*cloud)(out).numpy() + volume, theirs, atol=1e-9)


def test_kd_uses_the_first_correct_predictions_of_each_class() -> None:
    y = torch.tensor([0, 1, 0, 0, 1, 2])
    assert first_per_class(y, 2).tolist() == [True, True, True, False, True, True]
    z = torch.arange(6, dtype=torch.float64)[:, None]
    predicted = torch.tensor([1, 1, 0, 0, 1, 2])  # the first one is wrong
    score = KD(sigma=1.0, per_class=1).fit(output(z, predicted), y)
    assert torch.equal(score(output(z[2:3], predicted[2:3])), torch.zeros(1, dtype=torch.float64))


def test_kd_orders_images_far_from_the_bank() -> None:
    y = torch.zeros(2, dtype=torch.long)
    bank = torch.zeros(2, 1, dtype=torch.float32)
    score = KD(sigma=1.0).fit(output(bank, y, 1), y)
    far = torch.tensor([[1e3], [2e3]])
    near, further = score(output(far, y, 1))
    assert near > further
    assert further.isfinite()


def test_lid_equals_its_formula() -> None:
    bank = torch.tensor([[1.0], [2.0], [4.0], [100.0]], dtype=torch.float64)
    y = torch.zeros(4, dtype=torch.long)
    score = LID(k=3).fit(output(bank, y, 1), y)
    asked = output(torch.zeros(1, 1, dtype=torch.float64), y[:1], 1)
    logs = [math.log(r) for r in (1, 2, 4)]
    assert score(asked).item() == pytest.approx(1 / (sum(logs) / 3 - logs[-1]))


def test_lid_estimates_the_dimension_of_a_cube() -> None:
    g = torch.Generator().manual_seed(0)
    y = torch.zeros(4000, dtype=torch.long)
    for dimension in (2, 8):
        z = torch.rand(4000, dimension, generator=g, dtype=torch.float64)
        score = LID(k=50, size=4000).fit(output(z, y, 1), y)
        middle = output(0.4 + 0.2 * z[:100], y[:100], 1)
        assert -score(middle).mean().item() == pytest.approx(dimension, rel=0.15)


def test_an_image_of_the_bank_has_a_finite_score(cloud: tuple[Output, Tensor]) -> None:
    for rejector in (LID(5), KNN(5), KD()):
        out = cloud[0]._replace(feature=cloud[0].feature.clone().requires_grad_())
        score = rejector.fit(*cloud)(out)
        assert score.isfinite().all()
        (grad,) = torch.autograd.grad(score.sum(), out.feature)
        assert grad.isfinite().all()


def test_knn_equals_scikit_learn(cloud: tuple[Output, Tensor]) -> None:
    out, _ = cloud
    z, _ = correct_part(cloud)
    unit = [t / t.norm(dim=1, keepdim=True) for t in (z, out.feature)]
    theirs = NearestNeighbors(n_neighbors=7).fit(unit[0].numpy()).kneighbors(unit[1].numpy())[0]
    assert np.allclose(KNN(7).fit(*cloud)(out).numpy(), -theirs[:, -1], atol=1e-7)


def test_gaussian_scores_equal_their_formulas() -> None:
    z = torch.tensor([[-3.0], [-1.0], [1.0], [5.0]], dtype=torch.float64)
    y = torch.tensor([0, 0, 1, 1])  # means -2 and 3, tied variance (1 + 1 + 4 + 4) / 4
    asked = output(torch.tensor([[0.0], [4.0]], dtype=torch.float64), torch.tensor([0, 1]), 2)
    fit_data = output(z, y, 2), y
    tied = GDA(ridge=1e-12).fit(*fit_data)(asked)
    assert torch.allclose(tied, torch.tensor([-4 / 2.5, -1 / 2.5], dtype=torch.float64))
    star = GDAStar(ridge=1e-12).fit(*fit_data)(asked)  # variances 1 and 4
    assert torch.allclose(star, torch.tensor([-9 / 4, -1 / 4], dtype=torch.float64))
    predicted = GMM(ridge=1e-12).fit(*fit_data)(asked)
    assert torch.allclose(predicted, torch.tensor([-4.0, -1 / 4], dtype=torch.float64))
    dense = GMM(ridge=1e-12, log_det=True).fit(*fit_data)(asked)
    assert torch.allclose(dense, predicted - torch.tensor([0, math.log(4)], dtype=torch.float64))


def test_gaussian_scores_equal_scikit_learn(cloud: tuple[Output, Tensor]) -> None:
    out, _ = cloud
    z, y = correct_part(cloud)
    means = torch.stack([z[y == label].mean(0) for label in range(CLASSES)])
    tied = EmpiricalCovariance(assume_centered=True).fit((z - means[y]).numpy())
    distances = [tied.mahalanobis((out.feature - mean).numpy()) for mean in means]
    for inverse in ("ridge", "pseudo"):
        ours = GDA(inverse, ridge=1e-12).fit(*cloud)(out)
        assert np.allclose(ours.numpy(), -np.min(distances, axis=0), rtol=1e-6)
    by_class = []
    for label in range(CLASSES):
        own = EmpiricalCovariance().fit(z[y == label].numpy())
        by_class.append(own.mahalanobis(out.feature.numpy()))
    assert np.allclose(GDAStar(ridge=1e-12).fit(*cloud)(out).numpy(), -np.min(by_class, axis=0))
    predicted = out.logits.argmax(1).numpy()
    own = np.array(by_class)[predicted, np.arange(len(predicted))]
    assert np.allclose(GMM(ridge=1e-12).fit(*cloud)(out).numpy(), -own)


@pytest.mark.parametrize("rejector", [GDAStar(), GMM(), GMM("pseudo"), GDA("pseudo"), GDA()])
def test_scores_are_finite_and_ordered_with_fewer_images_than_dimensions(
    rejector: Rejector,
) -> None:
    """A hundred classes with five images each in 64 dimensions, in the fp32 of records."""
    g = torch.Generator().manual_seed(0)
    y = torch.arange(500) % 100
    z = (3 * torch.randn(100, 64, generator=g))[y] + torch.randn(500, 64, generator=g)
    score = rejector.fit(output(z, y, 100), y)
    inside = score(output(z, y, 100))
    away = score(output(z + 20 * torch.randn(500, 64, generator=g), y, 100))
    assert inside.isfinite().all()
    assert (inside <= 0).all(), "a negative distance"
    assert inside.median() > away.median()


@pytest.mark.parametrize("rejector", [GDAStar(), GMM(), GMM("pseudo")])
def test_a_class_without_variance_keeps_all_scores_finite(rejector: Rejector) -> None:
    g = torch.Generator().manual_seed(0)
    y = torch.arange(90) % CLASSES
    z = (10 * torch.eye(CLASSES, 5))[y] + torch.randn(90, 5, generator=g)
    z[y == 0] = z[0].clone()  # all features of class 0 are equal
    out = output(z, y)._replace(feature=z.requires_grad_())
    score = rejector.fit(out, y)(out)
    assert score.isfinite().all()
    (grad,) = torch.autograd.grad(score.sum(), z)
    assert grad.isfinite().all()
    with pytest.raises(TooFewImages, match="class 2 has one image"):
        rejector.fit(out.select(torch.arange(5)), y[:5])
    with pytest.raises(TooFewImages, match="no variance"):
        rejector.fit(output(torch.ones(9, 4), y[:9]), y[:9])


def test_scores_accept_outputs_of_any_precision(cloud: tuple[Output, Tensor]) -> None:
    out, y = cloud
    single = Output(*(part.float() for part in out))
    for rejector in (KD(), LID(5), KNN(5), GDA(), GMM(), ViM()):
        score = rejector.fit(single, y)
        assert torch.allclose(score(out).float(), score(single), rtol=1e-3, atol=1e-3)


def test_a_ridge_of_zero_raises() -> None:
    with pytest.raises(BadInput, match="use inverse=pseudo"):
        GMM(ridge=0.0)


def test_vim_is_energy_minus_the_scaled_residual() -> None:
    g = torch.Generator().manual_seed(0)
    z = torch.linalg.qr(torch.randn(200, 4, generator=g, dtype=torch.float64)).Q
    z = z * torch.tensor([20.0, 15.0, 10.0, 0.1])  # the last direction has the least variance
    weight = torch.randn(3, 4, generator=g, dtype=torch.float64)
    out = Output(z @ weight.t(), z, z.new_zeros(200, 0))
    y = out.logits.argmax(1)
    score = ViM(principal=3).fit(out, y)
    virtual_logit = energy(out) - score(out)
    scale = out.logits.amax(1).mean() / z[:, 3].abs().mean()
    assert torch.allclose(virtual_logit, scale * z[:, 3].abs(), atol=1e-6)
    with pytest.raises(BadInput, match="leaves no residual"):
        ViM(principal=4).fit(out, y)


@given(st.integers(0, 2**32))
def test_every_score_is_higher_near_the_class_means(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(60) % CLASSES
    z = (10 * torch.eye(CLASSES, 5))[y] + 0.3 * torch.randn(60, 5, generator=g)
    far = z + 30 * torch.nn.functional.normalize(torch.randn(60, 5, generator=g))
    for rejector in (KD(0.1), KNN(3), GDA(), GDAStar(), GMM()):
        score = rejector.fit(output(z, y), y)
        assert score(output(z, y)).mean() > score(output(far, y)).mean()


def test_outputs_that_cannot_be_fitted_raise(cloud: tuple[Output, Tensor]) -> None:
    out, y = cloud
    with pytest.raises(BadInput, match="needs more than 600 correctly classified images"):
        LID(600).fit(out, y)
    with pytest.raises(BadInput, match="class 2 has no image"):
        GDA().fit(out, y.clamp_max(1))
    with pytest.raises(BadInput, match="needs features"):
        KD().fit(out._replace(feature=out.feature[:, :0]), y)
    with pytest.raises(BadInput, match="needs features"):
        KD().fit(out, y)(out._replace(feature=out.feature[:, :0]))


def test_a_class_without_correct_predictions_contributes_all_its_images() -> None:
    y = torch.tensor([0, 0, 1, 1])
    z = torch.tensor([[0.0], [1.0], [5.0], [6.0]])
    score = KD(1.0).fit(output(z, torch.zeros(4, dtype=torch.long), 2), y)
    assert score(output(z, y, 2)).isfinite().all()


def test_scoring_thousands_of_images_takes_seconds() -> None:
    g = torch.Generator().manual_seed(0)
    z = torch.randn(3_000, 512, generator=g)
    y = torch.arange(3_000) % 10
    out = output(z, y, 10)
    for rejector in (KD(), LID(), KNN()):
        score = rejector.fit(out, y)
        start = time.perf_counter()
        score(out)
        assert time.perf_counter() - start < 10


def test_default_settings_are_the_papers() -> None:
    assert KD.baselines(CIFAR10()) == {"KD": KD(1e-3, 1000)}
    assert LID.baselines(CIFAR10()) == {"LID": LID(600, 10_000)}
    assert LID.baselines(CIFAR100()) == {"LID": LID(20, 10_000)}
    assert set(KD.baselines(CIFAR100()).values()) == {KD(1.0, 100), KD(1e-2, 100)}
    ten, hundred = paper_grid(CIFAR10()), paper_grid(CIFAR100())
    assert {r.sigma for r in ten.values() if isinstance(r, KD)} == {1e-1, 1e-2, 1e-3}
    assert {r.sigma for r in hundred.values() if isinstance(r, KD)} == {10, 1, 1e-1, 1e-2, 1e-3}
    counts = [r.k for r in ten.values() if isinstance(r, LID)]
    assert counts == [100, 200, 300, 400, 500, 600, 700, 800, 1000, 2000]
    counts = [r.k for r in hundred.values() if isinstance(r, LID)]
    assert counts == [10, 20, 40, 60, 80, 100, 200, 300, 400, 500]
    assert "KD" in KD.baselines(Digits())


def test_thresholds_per_class_reject_classes_alike() -> None:
    """Scores of class 1 are lower: one threshold rejects it alone, PerClass both alike."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(2000) % 2
    size = (3 - 2.5 * y) * (1 + 0.3 * torch.rand(2000, generator=generator))
    logits = torch.where(y[:, None] == torch.arange(2), size[:, None] / 2, -size[:, None] / 2)
    out = Output(logits, logits[:, :0], logits[:, :0])
    correct = torch.ones(2000, dtype=torch.bool)
    shares = []
    for score in (Con(), PerClass(Con(), tpr=0.9).fit(out, y)):
        values = score(out)
        threshold = TPR(0.9).threshold(values.double().numpy(), correct.numpy())
        rejected = values < threshold
        shares.append([float(rejected[y == label].float().mean()) for label in (0, 1)])
    assert shares[0] == [0, pytest.approx(0.2, abs=0.01)]
    assert shares[1] == [pytest.approx(0.1, abs=0.01)] * 2
    with pytest.raises(TooFewImages, match="20 correct fit images of each class; class 1 has 0"):
        PerClass().fit(out, torch.zeros_like(y))
    with pytest.raises(BadInput, match="needs no fitting, not KD"):
        PerClass(KD())
