"""Forward passes of images that differ from earlier ones in one small square, as in Square.

    stage = PatchedStage(copy, x.shape)
    stage.fill(x)                                  # the maps of the current images
    active = stage(proposal, corner, kept)         # input of the second stage

A square of 5 pixels changes a window of 15 pixels of a ResNet-18's first stage. Only this window is
computed; around it the convolutions read stored maps. Values equal those of the net up to rounding.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from demur.engine.fused_resnet import FusedResNet, FusedTrunk, convolve
from demur.gradient import Gradient, ObjectiveFunction
from demur.precision import autocast, no_autocast, products_dtype

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch
    triton = None

SQUARE = 5  # pixels; the largest square
MAX_AREA = 1 / 3  # of an image that a window may cover: a larger one saves too little
BLOCK = 32  # pixels of a program


def first_stage(trunk: FusedTrunk) -> int:
    """Return the number of blocks before the first one with a shortcut; 0 if there is none."""
    with_shortcut = [i for i, block in enumerate(trunk.blocks) if block.shortcut is not None]
    return with_shortcut[0] if with_shortcut else 0


def window_side(depth: int) -> int:
    """Return the pixels that a square changes after the stem and `depth` blocks."""
    return SQUARE + 2 * (1 + 2 * depth)


def pays(trunk: FusedTrunk, height: int, width: int) -> bool:
    """Return whether the window is much smaller than the images."""
    depth, side = first_stage(trunk), window_side(first_stage(trunk))
    fits = side <= min(height, width) and side**2 <= MAX_AREA * height * width
    return depth > 0 and not trunk.train and fits


class PatchedStage:
    """The first stage of a fused copy in eval mode, for images that change in one square at a time.

    Args:
        copy: the copy.
        shape: the shape of the images, N, C, H, W.

    Attributes:
        stored: the inputs of all convolutions after the stem and that of the second stage, for the
            current images, with a border of zeros: L, N, H + 2, W + 2, C.
        windows: the same of the last call within the windows, L, N, S, S, C.
        origins: the first row and column of the windows, N, 2.
    """

    def __init__(self, copy: FusedResNet, shape: torch.Size) -> None:
        self.copy, trunk = copy, copy.fused_trunk
        self.depth = first_stage(trunk)
        self.layers = list(zip(trunk.blocks, trunk.first_norms, trunk.folded, strict=True))
        self.side, levels = window_side(self.depth), 2 * self.depth + 1
        count, _, self.height, self.width = shape
        weight = trunk.blocks[0].conv1.weight
        channels, device = weight.shape[1], weight.device
        dtype = products_dtype(copy.precision)
        sizes = (self.height + 2, self.width + 2), (self.side, self.side)
        self.stored, self.windows = (
            torch.zeros(levels, count, *size, channels, dtype=dtype, device=device)
            for size in sizes
        )
        self.origins = torch.zeros(count, 2, dtype=torch.int64, device=device)
        limits = (self.height - self.side, self.width - self.side)
        self.limits = torch.tensor(limits, device=device)

    @torch.no_grad()
    def fill(self, x: Tensor) -> None:
        """Store the maps of the current images, N, C, H, W."""
        with autocast(self.copy.precision, x.device):
            maps, skip = self.copy.stem_and_head.stem(x), None
            for number, (block, norm, half) in enumerate(self.layers[: self.depth]):
                skip, active = norm(maps, skip)
                hidden = half(active)
                self._store(2 * number, active)
                self._store(2 * number + 1, hidden)
                maps = convolve(block.conv2, hidden)
            _, norm, _ = self.layers[self.depth]
            self._store(2 * self.depth, norm(maps, skip)[1])

    def _store(self, level: int, maps: Tensor) -> None:
        self.stored[level, :, 1:-1, 1:-1] = maps.movedim(1, -1)

    def __call__(self, x: Tensor, corner: Tensor, kept: Tensor) -> Tensor:
        """Return the active maps after the first stage, N, C, H, W.

        Args:
            x: the current images with another square each, N, C, H, W.
            corner: the first row and column of the squares of at most SQUARE pixels, N, 2.
            kept: which squares of the last call are now part of the current images, N, bool.
        """
        store_windows(self.stored, self.windows, self.origins, kept)
        origins = (corner - len(self.stored)).clamp(min=0)
        self.origins.copy_(torch.minimum(origins, self.limits))
        stem, skip = self.copy.stem_and_head, None
        maps = stem.stem_conv(self._crop(stem.net.normalise(x)))[:, :, 1:-1, 1:-1]
        for number, (block, norm, half) in enumerate(self.layers[: self.depth]):
            skip, active = norm(maps, skip)
            hidden = half.without_padding(self._surround(2 * number, active))
            maps = conv2d(self._surround(2 * number + 1, hidden), block.conv2.weight)
        _, norm, _ = self.layers[self.depth]
        return self._surround(2 * self.depth, norm(maps, skip)[1], whole=True)

    def value(
        self,
        objective: ObjectiveFunction,
        x: Tensor,
        y: Tensor,
        corner: Tensor,
        kept: Tensor,
        *inputs: Tensor,
    ) -> Gradient:
        """Return the objective's value and the output of the whole net, without a gradient."""
        with torch.no_grad():
            with autocast(self.copy.precision, x.device):
                active = self(x, corner, kept)
                maps = self.copy.fused_trunk.from_active(self.depth, active)
            with no_autocast(x.device):
                out = self.copy.stem_and_head.head(maps)
                return Gradient(x[:, :0], objective(out, y, *inputs), out)

    def _crop(self, x: Tensor) -> Tensor:
        """Return the windows of normalised images with one more pixel on each side."""
        across = torch.arange(self.side + 2, device=x.device)
        rows, columns = (self.origins[:, axis, None] + across for axis in (0, 1))  # N, S + 2
        images = torch.arange(len(x), device=x.device)[:, None, None]
        padded = pad(x, (1, 1, 1, 1))
        return padded[images, :, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)

    def _surround(self, level: int, maps: Tensor, whole: bool = False) -> Tensor:
        """Return the window's maps with one pixel of stored maps around it, or with all of them."""
        window = maps.contiguous(memory_format=torch.channels_last).movedim(1, -1)
        surround = _surround_by_kernel if maps.is_cuda else _surround_by_index
        pixels = surround(self.stored[level], window, self.origins, self.windows[level], whole)
        return pixels.movedim(-1, 1)


def _surround_by_index(
    stored: Tensor, window: Tensor, origins: Tensor, last: Tensor, whole: bool
) -> Tensor:
    """Copy the window to `last`; return it with its surroundings, N, H, W, C."""
    last.copy_(window)
    images, rows, columns = _window_index(origins, window.shape[1])
    changed = stored.clone()
    changed[images, rows, columns] = window
    if whole:
        return changed[:, 1:-1, 1:-1]
    return changed[_window_index(origins - 1, window.shape[1] + 2)]


def _window_index(origins: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, rows and columns of the windows' pixels in maps with a border."""
    steps = torch.arange(1, side + 1, device=origins.device)
    rows, columns = (origins[:, axis, None] + steps for axis in (0, 1))
    images = torch.arange(len(origins), device=origins.device)[:, None, None]
    return images, rows[:, :, None], columns[:, None, :]


def store_windows(stored: Tensor, windows: Tensor, origins: Tensor, kept: Tensor) -> None:
    """Copy the windows of the kept squares into the stored maps of all levels."""
    levels, count, side = windows.shape[:3]
    if not stored.is_cuda:
        images, rows, columns = _window_index(origins, side)
        where = (slice(None), images[kept], rows[kept], columns[kept])
        stored[where] = windows[:, kept]
        return
    _store_kernel[(levels * count, triton.cdiv(side**2, BLOCK))](
        stored, windows, origins, kept.view(torch.uint8), count, *stored.shape[2:4], side,
        stored.shape[-1], triton.next_power_of_2(stored.shape[-1]), BLOCK,
    )  # fmt: skip


def _surround_by_kernel(
    stored: Tensor, window: Tensor, origins: Tensor, last: Tensor, whole: bool
) -> Tensor:
    """The same as `_surround_by_index` in one launch."""
    count, rows, columns, channels = stored.shape
    side = window.shape[1]
    size = (rows - 2, columns - 2) if whole else (side + 2, side + 2)
    out = window.new_empty(count, *size, channels)
    _surround_kernel[(count, triton.cdiv(size[0] * size[1], BLOCK))](
        stored, window, origins, last, out, rows, columns, side, *size,
        channels, triton.next_power_of_2(channels), whole, BLOCK,
    )  # fmt: skip
    return out


if triton is not None:

    @triton.jit
    def _surround_kernel(
        stored, window, origins, last, out, rows, columns, side, out_rows, out_columns, channels,
        block_channels: tl.constexpr, whole: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        """Write some pixels of one image: the window's own, and stored ones around it."""
        image = tl.program_id(0).to(tl.int64)
        pixel = tl.program_id(1) * block + tl.arange(0, block)
        top, left = tl.load(origins + 2 * image), tl.load(origins + 2 * image + 1)
        if whole:  # row and column in the stored maps, whose border is not part of the result
            row, column = pixel // out_columns + 1, pixel % out_columns + 1
        else:
            row, column = pixel // out_columns + top, pixel % out_columns + left
        window_row, window_column = row - top - 1, column - left - 1
        known = pixel < out_rows * out_columns
        inside = (window_row >= 0) & (window_row < side)
        inside = known & inside & (window_column >= 0) & (window_column < side)
        channel = tl.arange(0, block_channels)[None, :]
        exists = channel < channels
        from_window = ((image * side + window_row) * side + window_column)[:, None] * channels
        from_stored = ((image * rows + row) * columns + column)[:, None] * channels
        new = tl.load(window + from_window + channel, mask=inside[:, None] & exists, other=0.0)
        around = known & (inside == 0)
        old = tl.load(stored + from_stored + channel, mask=around[:, None] & exists, other=0.0)
        to = (image * out_rows * out_columns + pixel)[:, None] * channels + channel
        tl.store(out + to, tl.where(inside[:, None], new, old), mask=known[:, None] & exists)
        tl.store(last + from_window + channel, new, mask=inside[:, None] & exists)

    @triton.jit
    def _store_kernel(
        stored, windows, origins, kept, count, rows, columns, side, channels,
        block_channels: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        """Copy some pixels of the window of one image and level, if its square was kept."""
        map_number = tl.program_id(0).to(tl.int64)  # level * count + image
        image = map_number % count
        pixel = tl.program_id(1) * block + tl.arange(0, block)
        copied = (pixel < side * side) & (tl.load(kept + image) != 0)
        row = pixel // side + tl.load(origins + 2 * image) + 1
        column = pixel % side + tl.load(origins + 2 * image + 1) + 1
        channel = tl.arange(0, block_channels)[None, :]
        mask = copied[:, None] & (channel < channels)
        source = (map_number * side * side + pixel)[:, None] * channels + channel
        to = ((map_number * rows + row) * columns + column)[:, None] * channels + channel
        tl.store(stored + to, tl.load(windows + source, mask=mask, other=0.0), mask=mask)
