"""Batches of an attack: every image once, stored on disk, halved when memory runs out."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from demur.data import Images
from demur.errors import BadInput
from demur.evaluate.resumable_batches import (
    MAX_BATCH_CPU,
    MAX_BATCH_CUDA,
    Piece,
    attack_in_batches,
    default_batch_size,
    remaining_pieces,
)
from demur.progress import ignore

CPU = torch.device("cpu")


@st.composite
def counts_and_done_pieces(draw: st.DrawFn) -> tuple[int, list[Piece]]:
    """A number of images and some pieces of them that are done, in order."""
    count = draw(st.integers(1, 200))
    borders = sorted(draw(st.sets(st.integers(0, count), max_size=12)))
    pieces = list(itertools.pairwise(borders))
    return count, [piece for piece in pieces if draw(st.booleans())]


@given(counts_and_done_pieces(), st.integers(1, 70))
def test_done_and_remaining_pieces_cover_every_image_once(
    count_and_done: tuple[int, list[Piece]], size: int
) -> None:
    count, done = count_and_done
    left = remaining_pieces(count, done, size)
    covered = [i for start, stop in sorted([*done, *left]) for i in range(start, stop)]
    assert covered == list(range(count))
    assert all(0 < stop - start <= size for start, stop in left)
    assert left == sorted(left)


def test_batches_of_a_slow_rejector_are_small_on_a_cpu() -> None:
    """An attack of 290 seconds on 100 images was one batch, of which a stop left nothing."""
    assert default_batch_size(100, CPU, slow=True) <= 32
    assert default_batch_size(100, torch.device("cuda"), slow=True) >= 100


@given(st.integers(1, 30_000))
def test_default_batches_are_small_enough_and_about_equal(count: int) -> None:
    for device, most in ((CPU, MAX_BATCH_CPU), (torch.device("cuda"), MAX_BATCH_CUDA)):
        size = default_batch_size(count, device)
        assert 1 <= size <= most
        batches = -(-count // size)
        assert batches <= -(-count // most)
        if batches > 1:
            assert size % 8 == 0
            assert size - count / batches <= 8, "none is much smaller than the others"


def images(count: int) -> Images:
    pixels = torch.arange(count).view(-1, 1, 1, 1).expand(-1, 1, 2, 2)
    return Images(pixels.to(torch.uint8), torch.zeros(count).long(), torch.arange(count), 255)


class Worker:
    """Adds 1 to each image, whose pixels are its index; out of memory above `capacity` images."""

    def __init__(self, given: Images, capacity: int = 10**6) -> None:
        self.given, self.capacity = given, capacity
        self.calls: list[tuple[int, int, int]] = []

    def __call__(self, piece: slice, size: int) -> Tensor:
        x, _ = self.given.batch(piece)
        self.calls.append((piece.start, piece.stop, size))
        if len(x) > self.capacity:
            raise torch.OutOfMemoryError("full")
        return x + 1


def test_out_of_memory_halves_the_batch_and_loses_nothing(tmp_path: Path) -> None:
    given = images(50)
    whole = attack_in_batches(Worker(given), given, 50, tmp_path / "whole", ignore)
    small = Worker(given, capacity=12)
    progress: list[tuple[int, int]] = []
    found = attack_in_batches(small, given, 40, tmp_path / "parts", lambda *n: progress.append(n))
    assert torch.equal(found[slice(0, 50)], whole[slice(0, 50)])
    assert torch.equal(found[slice(0, 100)], given.batch(slice(None))[0] + 1)
    assert small.calls[:3] == [(0, 40, 40), (0, 20, 20), (0, 10, 10)]
    assert [piece[:2] for piece in small.calls[2:]] == [(i, i + 10) for i in range(0, 50, 10)]
    assert progress == [(n, 50) for n in (10, 20, 30, 40, 50)]


def test_out_of_memory_later_keeps_finished_batches(tmp_path: Path) -> None:
    given = images(40)
    worker = Worker(given)

    def shrink_memory(done: int, total: int) -> None:
        worker.capacity = 6

    found = attack_in_batches(worker, given, 16, tmp_path, shrink_memory)
    assert torch.equal(found[slice(0, 100)], given.batch(slice(None))[0] + 1)
    assert [piece[0] for piece in worker.calls].count(0) == 1
    assert worker.calls[1:4] == [(16, 32, 16), (16, 24, 8), (16, 20, 4)]


def test_an_image_that_never_fits_raises_one_sentence(tmp_path: Path) -> None:
    given = images(5)
    with pytest.raises(BadInput, match="not enough memory to attack a single image"):
        attack_in_batches(Worker(given, capacity=0), given, 5, tmp_path, ignore)


def stop_after(count: int) -> Callable[[int, int], None]:
    def on_progress(done: int, total: int) -> None:
        if done >= count:
            raise KeyboardInterrupt

    return on_progress


def attack_and_stop(given: Images, parts: Path, size: int, images_done: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        attack_in_batches(Worker(given), given, size, parts, stop_after(images_done))


def test_finished_batches_are_not_made_again_at_another_batch_size(tmp_path: Path) -> None:
    given = images(30)
    attack_and_stop(given, tmp_path, 8, images_done=16)
    again = Worker(given)
    found = attack_in_batches(again, given, 5, tmp_path, ignore)
    assert torch.equal(found[slice(0, 100)], given.batch(slice(None))[0] + 1)
    assert [piece[:2] for piece in again.calls] == [(16, 21), (21, 26), (26, 30)]
    third = Worker(given)
    assert torch.equal(
        attack_in_batches(third, given, 30, tmp_path, ignore)[slice(0, 100)], found[slice(0, 100)]
    )
    assert third.calls == []


def test_damaged_and_overlapping_batches_are_made_again(tmp_path: Path) -> None:
    given = images(30)
    attack_and_stop(given, tmp_path, 10, images_done=20)
    attack_and_stop(given, tmp_path / "other", 15, images_done=15)
    (overlapping,) = (tmp_path / "other").glob("0-15-*")
    overlapping.rename(tmp_path / overlapping.name)
    (damaged,) = tmp_path.glob("10-20-*")
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    (tmp_path / ".20-30-0123456789abcdef.7.tmp").write_bytes(b"cut short")
    again = Worker(given)
    found = attack_in_batches(again, given, 10, tmp_path, ignore)
    assert torch.equal(found[slice(0, 100)], given.batch(slice(None))[0] + 1)
    assert [piece[:2] for piece in again.calls] == [(10, 20), (20, 30)]
