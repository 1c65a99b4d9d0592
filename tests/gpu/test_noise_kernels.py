"""The Triton kernels of the noise draw the numbers of the CPU, bit by bit."""

import pytest
import torch
from torch import Tensor

from demur import noise
from demur.engine import capture
from tests.gpu.tools import BATCHES, distance

SEED, STREAM = 2**61 + 5, 2**45 + 9


def test_the_kernels_are_available() -> None:
    assert vars(noise)["triton"] is not None, "CUDA builds of torch include Triton"


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", [(1,), (3, 32, 32), (1, 8, 8), (1025,)], ids=str)
def test_uniform_numbers_equal_those_of_the_cpu(
    device: torch.device, batch: int, shape: tuple[int, ...]
) -> None:
    index = torch.arange(batch) * 2**33 + 7
    expected = noise.uniform(SEED, index, STREAM, shape)
    on_device = torch.tensor([STREAM], device=device)
    for stream in (STREAM, on_device):
        assert torch.equal(noise.uniform(SEED, index.to(device), stream, shape).cpu(), expected)


def test_an_index_with_gaps_is_read_correctly(device: torch.device) -> None:
    index = torch.arange(40)
    every_third = index.to(device)[::3]
    found = noise.uniform(3, every_third, 1, (5,)).cpu()
    assert torch.equal(found, noise.uniform(3, index[::3], 1, (5,)))


@pytest.mark.parametrize("words", [(), (4,), (4, STREAM), (0, 1, 2, 3, 4)], ids=str)
def test_derived_seeds_equal_those_of_the_cpu(device: torch.device, words: tuple[int, ...]) -> None:
    on_device = noise.derive_seed(torch.tensor([SEED], device=device), *words)
    assert isinstance(on_device, Tensor) and on_device.is_cuda
    assert int(on_device) == noise.derive_seed(SEED, *words)


def test_normal_numbers_agree_up_to_rounding(device: torch.device) -> None:
    index = torch.arange(37)
    on_device = noise.normal(SEED, index.to(device), 2, (3, 8, 8))
    assert distance(on_device.cpu(), noise.normal(SEED, index, 2, (3, 8, 8))) < 1e-5


def test_a_replayed_graph_draws_new_numbers(device: torch.device) -> None:
    index, stream = torch.arange(5, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    seed = torch.tensor([SEED], device=device)

    def draw() -> Tensor:
        return noise.uniform(seed, index, noise.derive_seed(seed, stream), (9,))

    graph, drawn = capture(draw)
    for step in range(3):
        stream.fill_(step)
        graph.replay()
        derived = noise.derive_seed(SEED, step)
        assert torch.equal(drawn.cpu(), noise.uniform(SEED, index.cpu(), derived, (9,)))
