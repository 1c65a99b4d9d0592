"""Counter-based noise: a function of (seed, index, stream) with the right statistics."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from demur import noise
from demur.attacks.balls import L2, Linf
from demur.data import CropFlip


def test_uniform_is_uniform_and_uncorrelated() -> None:
    u = noise.uniform(0, torch.arange(500), 0, (8, 8)).flatten(1)
    assert u.min() >= 0
    assert u.max() < 1
    ranked = u.flatten().sort().values
    distance = (ranked - torch.linspace(0, 1, len(ranked))).abs().max()
    assert distance < 1.63 / len(ranked) ** 0.5  # Kolmogorov-Smirnov at 1%
    for a, b in ((u[:-1], u[1:]), (u[:, :-1], u[:, 1:])):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.02


def test_streams_and_seeds_are_uncorrelated() -> None:
    index = torch.arange(300)
    first = noise.uniform(0, index, 0, (32,))
    addresses = ((0, 1), (1, 0), (2**32, 0), (0, 2**32), (0, 2**62), (2**62, 0))
    for seed, stream in addresses:
        other = noise.uniform(seed, index, stream, (32,))
        pair = torch.stack([first.flatten(), other.flatten()])
        assert abs(torch.corrcoef(pair)[0, 1]) < 0.03


def test_batch_composition_does_not_matter() -> None:
    full = noise.uniform(5, torch.arange(10), 2, (3, 4))
    assert torch.equal(full[[7, 3]], noise.uniform(5, torch.tensor([7, 3]), 2, (3, 4)))


def test_normal_has_the_right_moments() -> None:
    z = noise.normal(0, torch.arange(400), 0, (64,))
    assert z.isfinite().all()
    assert z.mean().item() == pytest.approx(0, abs=0.02)
    assert z.std().item() == pytest.approx(1, abs=0.02)
    assert (z**4).mean().item() == pytest.approx(3, abs=0.2)


def test_permutation_contains_every_number_once() -> None:
    order = noise.permutation(0, 1000, 0)
    assert order.sort().values.tolist() == list(range(1000))
    assert not torch.equal(order, noise.permutation(0, 1000, 1))
    assert (order == torch.arange(1000)).sum() < 10


def test_the_global_generator_is_untouched() -> None:
    before = torch.get_rng_state()
    noise.uniform(0, torch.arange(4), 0, (3,))
    noise.permutation(0, 10, 0)
    assert torch.equal(before, torch.get_rng_state())


@settings(max_examples=25)
@given(st.integers(0, 2**62), st.integers(0, 2**62))
def test_tensor_seeds_and_streams_give_the_same_numbers(seed: int, stream: int) -> None:
    index = torch.tensor([0, 3, 2**40])
    seed_tensor, stream_tensor = torch.tensor([seed]), torch.tensor([stream])
    for draw in (noise.uniform, noise.normal):
        plain = draw(seed, index, stream, (2, 3))
        assert torch.equal(draw(seed, index, stream_tensor, (2, 3)), plain)
        assert torch.equal(draw(seed_tensor, index, stream_tensor, (2, 3)), plain)
    assert torch.equal(
        noise.permutation(seed, 9, stream_tensor), noise.permutation(seed, 9, stream)
    )
    for words in ((), (5,), (5, 2**33)):
        derived = noise.derive_seed(seed, *words, stream)
        assert isinstance(derived, int)
        assert int(noise.derive_seed(seed, *words, stream_tensor)) == derived
        assert int(noise.derive_seed(seed_tensor, *words, stream)) == derived


def test_starts_and_crops_accept_a_tensor_stream() -> None:
    x = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    index, stream = torch.tensor([4, 0, 9]), 2**35 + 1
    stream_tensor = torch.tensor([stream])
    for ball in (Linf(0.2), L2(0.7)):
        assert torch.equal(ball.start(x, 1, index, stream_tensor), ball.start(x, 1, index, stream))
        assert not torch.equal(
            ball.start(x, 1, index, stream_tensor + 1), ball.start(x, 1, index, stream_tensor)
        )
    crop = CropFlip(pad=2)
    assert torch.equal(crop(x, 1, index, stream_tensor), crop(x, 1, index, stream))
    assert not torch.equal(crop(x, 1, index, stream_tensor + 1), crop(x, 1, index, stream_tensor))


def test_values_never_change() -> None:
    """Records and splits depend on these numbers, so they must never change."""
    u = noise.uniform(0, torch.tensor([0, 12345]), 7, (2,))
    assert u.flatten().tolist() == pytest.approx(FROZEN_UNIFORM, abs=1e-7)
    assert noise.permutation(0, 6, 0).tolist() == FROZEN_ORDER
    assert noise.derive_seed(3, 1, 2) == FROZEN_SEED


FROZEN_UNIFORM = [0.4443119168281555, 0.7577276229858398, 0.6433038115501404, 0.3280153274536133]
FROZEN_ORDER = [4, 1, 2, 3, 0, 5]
FROZEN_SEED = 6096014833349313809
