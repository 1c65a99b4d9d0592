"""Attack many images in batches that are stored, resumed and distributed over processes.

Every finished batch is a file, so a killed attack resumes where it stopped. If memory runs out, the
batch size is halved. Under torchrun each process attacks one batch of a round; noise depends on the
index of the image alone, so one process makes the same record.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import Tensor

from demur import distributed
from demur.data import Images
from demur.engine import pad_batch
from demur.errors import BadInput
from demur.files.checked_files import content_digest, write_bytes

ProgressCallback = Callable[[int, int], None]  # images done, images in all
Craft = Callable[[slice, int], Tensor]  # a slice of the images and the batch size it is part of
Piece = tuple[int, int]  # first image, and last image plus one

MAX_BATCH_CUDA = 1024  # larger batches are not faster
MAX_BATCH_CPU = 256
MAX_BATCH_SLOW = 32  # on a CPU, of a rejector that queries the net: a batch takes minutes


def default_batch_size(count: int, device: torch.device, slow: bool = False) -> int:
    """Batch size for `count` images on a device, such that batches have about equal sizes."""
    on_cpu = MAX_BATCH_SLOW if slow else MAX_BATCH_CPU
    most = MAX_BATCH_CUDA if device.type == "cuda" else on_cpu
    batches = -(-count // most)
    return -(-count // batches // 8) * 8 if batches > 1 else most


@dataclass(frozen=True)
class FinishedBatches:
    """Adversarial examples of images in order, in one file a batch."""

    files: Mapping[Piece, Path]

    def __getitem__(self, rows: slice) -> Tensor:
        """Return those of consecutive images: N, C, H, W."""
        parts = []
        for (start, stop), path in sorted(self.files.items()):
            if start < rows.stop and stop > rows.start:
                with safe_open(path, "pt") as file:
                    stored = file.get_slice("x_adv")
                    parts.append(stored[max(rows.start - start, 0) : rows.stop - start])
        return torch.cat(parts)


def attack_in_batches(
    craft: Craft, images: Images, size: int, parts: Path, on_progress: ProgressCallback
) -> FinishedBatches:
    """Adversarial examples of all images in order; of none except on rank 0.

    `craft` makes those of one batch, `parts` is the folder of finished batches; `on_progress` is
    called after each round. Raises BadInput if a single image does not fit into memory.
    """
    here = distributed.current()
    finished = _finished_pieces(parts, images) if here.is_leader else {}
    done: list[Piece] = here.broadcast(sorted(finished))
    while remaining := remaining_pieces(len(images), done, size):
        round_pieces = remaining[: here.size]
        longest = max(stop - start for start, stop in round_pieces)
        own = round_pieces[here.rank : here.rank + 1]
        own_x_adv, out_of_memory = _craft_piece(craft, images, own, longest, size)
        failed = torch.tensor([int(out_of_memory)], device=images.y.device)
        here.all_reduce([failed])
        if failed:  # in any process
            if size == 1:
                raise BadInput(
                    "there is not enough memory to attack a single image; use a smaller net"
                )
            size //= 2
            continue
        for (start, stop), x_adv in zip(round_pieces, here.gather(own_x_adv), strict=False):
            content = bytes_of({"x_adv": x_adv[: stop - start].cpu().contiguous()})
            finished[start, stop] = path = parts / _piece_name((start, stop), content)
            write_bytes(path, content)
        own_x_adv = x_adv = torch.empty(0)  # frees the batch before the next one
        done = sorted([*done, *round_pieces])
        on_progress(sum(stop - start for start, stop in done), len(images))
    return FinishedBatches(finished)


def remaining_pieces(count: int, done: list[Piece], size: int) -> list[Piece]:
    """Pieces of at most `size` images that cover the images which are not done."""
    remaining, first = [], 0
    for start, stop in [*done, (count, count)]:
        remaining += [(at, min(at + size, start)) for at in range(first, start, size)]
        first = stop
    return remaining


def _craft_piece(
    craft: Craft, images: Images, own: list[Piece], longest: int, size: int
) -> tuple[Tensor, bool]:
    """Adversarial examples of this process, padded to `longest`; and whether memory ran out."""
    try:
        if own:
            return pad_batch(craft(slice(*own[0]), size), longest), False
    except torch.OutOfMemoryError:
        pass  # memory is freed below: inside this block the traceback still refers to tensors
    if own and images.y.is_cuda:
        torch.cuda.empty_cache()
    shape = longest, *images.pixels.shape[1:]
    return images.y.new_zeros(shape, dtype=torch.float32), bool(own)


def _piece_name(piece: Piece, content: bytes) -> str:
    """File name of a piece; the digest covers the range, so that a renamed file is damaged."""
    images = f"{piece[0]}-{piece[1]}"
    return f"{images}-{content_digest(images.encode() + content)[:16]}"


def _finished_pieces(parts: Path, images: Images) -> dict[Piece, Path]:
    """Files of finished batches, without damaged, overlapping or foreign ones."""
    found = dict[Piece, Path]()
    for path in parts.iterdir() if parts.is_dir() else ():
        if named := re.fullmatch(r"(\d+)-(\d+)-[0-9a-f]{16}", path.name):
            piece, content = (int(named[1]), int(named[2])), path.read_bytes()
            shape = images.pixels[slice(*piece)].shape
            whole = path.name == _piece_name(piece, content)
            if whole and tensors_of(content)["x_adv"].shape == shape:
                found[piece] = path
    first = 0
    for start, stop in sorted(found):
        if start < first:
            del found[start, stop]
        else:
            first = stop
    return found
