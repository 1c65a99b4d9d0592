"""Batches of an attack: every image once, kept on disk, halved when memory is full."""

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
from demur.evaluate.batching import (
    MAX_BATCH_CPU,
    MAX_BATCH_CUDA,
    Piece,
    attack_in_batches,
    default_batch_size,
    remaining_pieces,
)

CPU = torch.device("cpu")


@st.composite
def orders(draw: st.DrawFn) -> tuple[int, list[Piece]]:
    """A number of images and some pieces of them that are done, in order."""
    count = draw(st.integers(1, 200))
    borders = sorted(draw(st.sets(st.integers(0, count), max_size=12)))
    pieces = list(itertools.pairwise(borders))
    return count, [piece for piece in pieces if draw(st.booleans())]


@given(orders(), st.integers(1, 70))
def test_what_is_done_and_what_is_left_is_every_image_once(
    order: tuple[int, list[Piece]], size: int
) -> None:
    count, done = order
    left = remaining_pieces(count, done, size)
    covered = [i for start, stop in sorted([*done, *left]) for i in range(start, stop)]
    assert covered == list(range(count))
    assert all(0 < stop - start <= size for start, stop in left)
    assert left == sorted(left)


@given(st.integers(1, 30_000))
def test_usual_batches_fit_and_are_about_equal(count: int) -> None:
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
    """Crafts images that tell their place, and runs out of memory above `room` images."""

    def __init__(self, given: Images, room: int = 10**6) -> None:
        self.given, self.accept_margin = given, room
        self.asked: list[tuple[int, int, int]] = []

    def __call__(self, piece: slice, size: int) -> Tensor:
        x, _ = self.given.batch(piece)
        self.asked.append((piece.start, piece.stop, size))
        if len(x) > self.accept_margin:
            raise torch.OutOfMemoryError("full")
        return x + 1


def no_progress(done: int, total: int) -> None:
    """Nobody looks."""


def test_a_full_memory_halves_the_batch_and_loses_nothing(tmp_path: Path) -> None:
    given = images(50)
    whole = attack_in_batches(Worker(given), given, 50, tmp_path / "whole", no_progress)
    small = Worker(given, room=12)
    seen: list[tuple[int, int]] = []
    found = attack_in_batches(small, given, 40, tmp_path / "parts", lambda *n: seen.append(n))
    assert torch.equal(found, whole)
    assert torch.equal(found, given.batch(slice(None))[0] + 1)
    assert small.asked[:3] == [(0, 40, 40), (0, 20, 20), (0, 10, 10)]
    assert [piece[:2] for piece in small.asked[2:]] == [(i, i + 10) for i in range(0, 50, 10)]
    assert seen == [(n, 50) for n in (10, 20, 30, 40, 50)]


def test_memory_that_fills_later_keeps_what_was_done_before(tmp_path: Path) -> None:
    given = images(40)
    worker = Worker(given)

    def fuller(done: int, total: int) -> None:
        worker.accept_margin = 6

    found = attack_in_batches(worker, given, 16, tmp_path, fuller)
    assert torch.equal(found, given.batch(slice(None))[0] + 1)
    assert [piece[0] for piece in worker.asked].count(0) == 1
    assert worker.asked[1:4] == [(16, 32, 16), (16, 24, 8), (16, 20, 4)]


def test_an_image_that_never_fits_is_one_sentence(tmp_path: Path) -> None:
    given = images(5)
    with pytest.raises(BadInput, match="not enough memory to attack a single image"):
        attack_in_batches(Worker(given, room=0), given, 5, tmp_path, no_progress)


def stopped_after(count: int) -> Callable[[int, int], None]:
    def watch(done: int, total: int) -> None:
        if done >= count:
            raise KeyboardInterrupt

    return watch


def begun(given: Images, parts: Path, size: int, images_done: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        attack_in_batches(Worker(given), given, size, parts, stopped_after(images_done))


def test_finished_parts_are_not_made_again_at_any_batch_size(tmp_path: Path) -> None:
    given = images(30)
    begun(given, tmp_path, 8, images_done=16)
    again = Worker(given)
    found = attack_in_batches(again, given, 5, tmp_path, no_progress)
    assert torch.equal(found, given.batch(slice(None))[0] + 1)
    assert [piece[:2] for piece in again.asked] == [(16, 21), (21, 26), (26, 30)]
    third = Worker(given)
    assert torch.equal(attack_in_batches(third, given, 30, tmp_path, no_progress), found)
    assert third.asked == []


def test_damaged_and_overlapping_parts_are_made_again(tmp_path: Path) -> None:
    given = images(30)
    begun(given, tmp_path, 10, images_done=20)
    begun(given, tmp_path / "other", 15, images_done=15)
    (overlapping,) = (tmp_path / "other").glob("0-15-*")
    overlapping.rename(tmp_path / overlapping.name)
    (damaged,) = tmp_path.glob("10-20-*")
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    (tmp_path / ".20-30-0123456789abcdef.7.tmp").write_bytes(b"cut short")
    again = Worker(given)
    found = attack_in_batches(again, given, 10, tmp_path, no_progress)
    assert torch.equal(found, given.batch(slice(None))[0] + 1)
    assert [piece[:2] for piece in again.asked] == [(10, 20), (20, 30)]
