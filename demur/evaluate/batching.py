"""Attacked images of a whole order, batch by batch: kept as they come, resumed, shared out.

Every finished batch lies on disk, so a killed attack goes on where it stopped. Out of memory, the
batch is halved and nothing done is lost. Under torchrun the processes take turns at batch
borders; noise depends on the image alone, so the record is the one that one process makes.
"""

import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import Tensor

from demur import distributed
from demur.data import Images
from demur.engine import pad_batch
from demur.errors import BadInput
from demur.runs.files import content_digest, write_bytes

Watch = Callable[[int, int], None]  # images done, images in all
Craft = Callable[[slice, int], Tensor]  # a piece of the images and the batch size it is part of
Piece = tuple[int, int]  # first image and the one behind the last

ROOMY = 1024  # images at a time on a GPU; larger batches gain nothing
ON_CPU = 256


def default_batch_size(count: int, device: torch.device) -> int:
    """The batch size that suits a device, such that all batches of an order are about equal."""
    most = ROOMY if device.type == "cuda" else ON_CPU
    batches = -(-count // most)
    return -(-count // batches // 8) * 8 if batches > 1 else most


def attack_in_batches(craft: Craft, images: Images, size: int, parts: Path, watch: Watch) -> Tensor:
    """What `craft` makes of all images, in order; on the leading process, empty on the others."""
    here = distributed.current()
    made = _kept(parts) if here.is_leader else {}
    done: list[Piece] = here.broadcast(sorted(made))
    while left := remaining_pieces(len(images), done, size):
        turn = left[: here.size]
        longest = max(stop - start for start, stop in turn)
        mine, full = _tried(craft, images, turn[here.rank : here.rank + 1], longest, size)
        if _anybody(full, images.y.device):
            size = _halved(size)
            continue
        crafted = here.gather(mine)
        for (start, stop), x_adv in zip(turn, crafted, strict=False):
            made[start, stop] = x_adv[: stop - start].cpu()
            _keep(parts, (start, stop), made[start, stop])
        done = sorted([*done, *turn])
        watch(sum(stop - start for start, stop in done), len(images))
    return torch.cat([made[piece] for piece in done]) if here.is_leader else torch.empty(0)


def remaining_pieces(count: int, done: list[Piece], size: int) -> list[Piece]:
    """What of the images is not done yet, in pieces of at most `size`."""
    left, first = [], 0
    for start, stop in [*done, (count, count)]:
        left += [(at, min(at + size, start)) for at in range(first, start, size)]
        first = stop
    return left


def _tried(
    craft: Craft, images: Images, mine: list[Piece], longest: int, size: int
) -> tuple[Tensor, bool]:
    """This process's piece, filled up to the longest of the turn; and whether memory was full."""
    nothing = images.pixels.new_zeros(longest, *images.pixels.shape[1:], dtype=torch.float32)
    if not mine:
        return nothing, False
    try:
        return pad_batch(craft(slice(*mine[0]), size), longest), False
    except torch.OutOfMemoryError:
        pass  # not in here: the error would hold on to the memory
    if images.pixels.is_cuda:
        torch.cuda.empty_cache()
    return nothing, True


def _anybody(claim: bool, device: torch.device) -> bool:
    count = torch.tensor([int(claim)], device=device)
    distributed.current().all_reduce([count])
    return bool(count)


def _halved(size: int) -> int:
    if size == 1:
        raise BadInput("there is not enough memory to attack a single image; use a smaller net")
    return size // 2


def _keep(parts: Path, piece: Piece, x_adv: Tensor) -> None:
    content = bytes_of({"x_adv": x_adv.contiguous()})
    write_bytes(parts / f"{piece[0]}-{piece[1]}-{content_digest(content)[:16]}", content)


def _kept(parts: Path) -> dict[Piece, Tensor]:
    """Batches that earlier calls finished, as far as they are undamaged and do not overlap."""
    found: dict[Piece, Tensor] = {}
    for path in parts.iterdir() if parts.is_dir() else ():
        if named := re.fullmatch(r"(\d+)-(\d+)-([0-9a-f]{16})", path.name):
            content = path.read_bytes()
            if named[3] == content_digest(content)[:16]:
                found[int(named[1]), int(named[2])] = tensors_of(content)["x_adv"]
    kept: dict[Piece, Tensor] = {}
    first = 0
    for piece in sorted(found):
        if piece[0] >= first:
            kept[piece], first = found[piece], piece[1]
    return kept
