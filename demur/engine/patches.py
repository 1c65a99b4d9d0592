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

from demur.attacks.attack_model import Gradient, ObjectiveFunction
from demur.engine.fused_resnet import FusedResNet, FusedTrunk, convolve
from demur.nets.layers import Conv3x3, pad_weight_channels
from demur.numerics import autocast, no_autocast, products_dtype

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch
    triton = None

SQUARE = 5  # pixels: the side of the largest squares, those of four in five queries of Square
MAX_AREA = 1 / 3  # of an image that a window may cover: a larger one saves too little
PIXELS = 128  # of a program that crops or surrounds a window
STORED_PIXELS = 256  # of a program that stores a window


def first_stage(trunk: FusedTrunk) -> int:
    """Return the number of blocks before the first one with a shortcut; 0 if there is none."""
    with_shortcut = [i for i, block in enumerate(trunk.blocks) if block.shortcut is not None]
    return with_shortcut[0] if with_shortcut else 0


def window_side(depth: int) -> int:
    """Return the side of what a square changes after the stem and `depth` blocks."""
    return SQUARE + 2 * (1 + 2 * depth)


def pays(trunk: FusedTrunk, height: int, width: int) -> bool:
    """Return whether the window is much smaller than the images."""
    depth = first_stage(trunk)
    side = window_side(depth)
    fits = side <= min(height, width) and side**2 <= MAX_AREA * height * width
    return depth > 0 and not trunk.train and fits


def stage_bytes(copy: FusedResNet, shape: torch.Size) -> int:
    """Return the memory of a PatchedStage in bytes."""
    depth, (count, _, height, width) = first_stage(copy.fused_trunk), shape
    window = window_side(depth) ** 2
    pixels = 2 * depth * ((height + 2) * (width + 2) + window) + height * width + window
    channels = copy.fused_trunk.blocks[0].conv1.in_channels
    return count * pixels * channels * products_dtype(copy.precision).itemsize


class PatchedStage:
    """The first stage of a fused copy in eval mode, for images that change in one square at a time.

    Args:
        copy: the copy.
        shape: the shape of the images, N, C, H, W.

    Attributes:
        stored: the inputs of the convolutions after the stem for the current images, with a border
            of zeros: L, N, H + 2, W + 2, C.
        windows: the same of the last call within the windows, L, N, S, S, C.
        output: the input of the second stage for the images of the last call, 1, N, H, W, C.
        undo: the same for the current images within the windows, 1, N, S, S, C.
        origins: the first row and column of the windows, N, 2.
    """

    def __init__(self, copy: FusedResNet, shape: torch.Size) -> None:
        self.copy, trunk = copy, copy.fused_trunk
        self.depth = first_stage(trunk)
        self.layers = list(zip(trunk.blocks, trunk.first_norms, trunk.folded, strict=True))
        count, _, self.height, self.width = shape
        self.side, levels = window_side(self.depth), 2 * self.depth
        weight = trunk.blocks[0].conv1.weight
        maps = torch.zeros(count, weight.shape[1], device=weight.device)
        maps = maps.to(products_dtype(copy.precision))[:, None, None]  # N, 1, 1, C

        def zeros(levels: int, rows: int, columns: int) -> Tensor:
            return maps.repeat(levels, 1, rows, columns, 1)

        self.stored = zeros(levels, self.height + 2, self.width + 2)
        self.windows, self.undo = (zeros(n, self.side, self.side) for n in (levels, 1))
        self.output = zeros(1, self.height, self.width)
        self.origins = torch.zeros(count, 2, dtype=torch.int64, device=weight.device)
        self.stem_weight = self._padded_stem()

    def _padded_stem(self) -> Tensor:
        """Return the stem's weight with zero channels: few channels make a convolution slow."""
        stem = self.copy.stem_and_head.stem_conv
        assert isinstance(stem, Conv3x3) and stem.stride == (1, 1)
        return pad_weight_channels(stem.weight)

    @torch.no_grad()
    def fill(self, x: Tensor) -> None:
        """Store the maps of the current images, N, C, H, W."""
        self.stem_weight.copy_(self._padded_stem())
        with autocast(self.copy.precision, x.device):
            maps, skip = self.copy.stem_and_head.stem(x), None
            for number, (block, norm, half) in enumerate(self.layers[: self.depth]):
                skip, active = norm(maps, skip)
                hidden = half(active)
                self.stored[2 * number, :, 1:-1, 1:-1] = active.movedim(1, -1)
                self.stored[2 * number + 1, :, 1:-1, 1:-1] = hidden.movedim(1, -1)
                maps = convolve(block.conv2, hidden)
            _, norm, _ = self.layers[self.depth]
            self.output[0] = norm(maps, skip)[1].movedim(1, -1)
        self.undo[0] = self.output[0][_window_index(self.origins, self.side)]

    def __call__(self, x: Tensor, corner: Tensor, kept: Tensor) -> Tensor:
        """Return the active maps after the first stage, N, C, H, W.

        Args:
            x: the current images with another square each, N, C, H, W.
            corner: the first row and column of the squares of at most SQUARE pixels, N, 2.
            kept: which squares of the last call are now part of the current images, N, bool.
        """
        store_windows(self.stored, self.windows, self.origins, kept, border=1)
        store_windows(self.output, self.undo, self.origins, ~kept)
        maps, skip = conv2d(self._crop(x, corner), self.stem_weight), None
        for number, (block, norm, half) in enumerate(self.layers[: self.depth]):
            skip, active = norm(maps, skip)
            hidden = half.without_padding(self._surround(2 * number, active))
            maps = conv2d(self._surround(2 * number + 1, hidden), block.conv2.weight)
        _, norm, _ = self.layers[self.depth]
        window = norm(maps, skip)[1].movedim(1, -1)
        store_windows(
            self.output, window[None], self.origins, torch.ones_like(kept), undo=self.undo
        )
        return self.output[0].movedim(-1, 1)

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

    def _crop(self, x: Tensor, corner: Tensor) -> Tensor:
        """Set the origins; return normalised windows with one more pixel on each side.

        They have as many channels as the padded weight of the stem.
        """
        before, normalise = len(self.stored) + 1, self.copy.net.normalise  # pixels before a square
        channels = self.stem_weight.shape[1]
        if not x.is_cuda:
            for axis, most in enumerate((self.height - self.side, self.width - self.side)):
                self.origins[:, axis] = (corner[:, axis] - before).clamp(0, most)
            images, rows, columns = _window_index(self.origins, self.side + 2)
            extra = channels - x.shape[1]
            pixels = pad(normalise(x), (1, 1, 1, 1, 0, extra)).movedim(1, -1)
            return pixels[images, rows, columns].movedim(-1, 1)
        side = self.side + 2
        crops = self.stored.new_empty(len(x), side, side, channels)
        _crop_kernel[(len(x), triton.cdiv(side**2, PIXELS))](
            x, corner, normalise.mean, normalise.std, self.origins, crops, *x.stride(),
            self.height, self.width, before, self.side, x.shape[1], channels,
            triton.next_power_of_2(channels), PIXELS,
        )  # fmt: skip
        return crops.movedim(-1, 1)

    def _surround(self, level: int, maps: Tensor) -> Tensor:
        """Return the windows with one pixel of stored maps around them; remember the windows."""
        window = maps.contiguous(memory_format=torch.channels_last).movedim(1, -1)
        stored, last = self.stored[level], self.windows[level]
        if not maps.is_cuda:
            last.copy_(window)
            pixels = stored[_window_index(self.origins, self.side + 2)]
            pixels[:, 1:-1, 1:-1] = window
            return pixels.movedim(-1, 1)
        side, channels = self.side, maps.shape[1]
        pixels = window.new_empty(len(maps), side + 2, side + 2, channels)
        _surround_kernel[(len(maps), triton.cdiv((side + 2) ** 2, PIXELS))](
            stored, window, self.origins, last, pixels, *stored.shape[1:3], side,
            channels, triton.next_power_of_2(channels), PIXELS,
        )  # fmt: skip
        return pixels.movedim(-1, 1)


def _window_index(origins: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, rows and columns of the windows' pixels."""
    steps = torch.arange(side, device=origins.device)
    rows, columns = (origins[:, axis, None] + steps for axis in (0, 1))
    images = torch.arange(len(origins), device=origins.device)[:, None, None]
    return images, rows[:, :, None], columns[:, None, :]


def store_windows(
    maps: Tensor,
    windows: Tensor,
    origins: Tensor,
    chosen: Tensor,
    border: int = 0,
    undo: Tensor | None = None,
) -> None:
    """Copy the windows of the chosen images into maps; copy what they replace to `undo`.

    Args:
        maps: Maps of all levels, L, N, H, W, C.
        windows: Their new pixels, L, N, S, S, C.
        origins: First row and column of the windows, N, 2, without the border.
        chosen: The images, N, bool.
        border: Pixels by which the maps are larger on each side.
        undo: Shape of windows.
    """
    levels, count, side, _, channels = windows.shape
    if not maps.is_cuda:
        images, rows, columns = (part[chosen] for part in _window_index(origins + border, side))
        if undo is not None:
            undo[:, chosen] = maps[:, images, rows, columns]
        maps[:, images, rows, columns] = windows[:, chosen]
        return
    _store_kernel[(levels * count, triton.cdiv(side**2, STORED_PIXELS))](
        maps, windows, origins, chosen.view(torch.uint8), windows if undo is None else undo,
        count, *maps.shape[2:4], border, side, channels, triton.next_power_of_2(channels),
        undo is not None, STORED_PIXELS,
    )  # fmt: skip


if triton is not None:

    @triton.jit
    def _crop_kernel(
        x, corner, mean, std, origins, out,
        image_stride, channel_stride, row_stride, column_stride,
        height, width, before, side, image_channels, channels,
        block_channels: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        """Write some pixels of the window of one image; zeros outside it and in added channels."""
        image = tl.program_id(0).to(tl.int64)
        top = tl.minimum(tl.maximum(tl.load(corner + 2 * image) - before, 0), height - side)
        left = tl.minimum(tl.maximum(tl.load(corner + 2 * image + 1) - before, 0), width - side)
        if tl.program_id(1) == 0:
            tl.store(origins + 2 * image, top)
            tl.store(origins + 2 * image + 1, left)
        pixel = tl.program_id(1) * block + tl.arange(0, block)
        row, column = top - 1 + pixel // (side + 2), left - 1 + pixel % (side + 2)
        known = pixel < (side + 2) * (side + 2)
        inside = known & (row >= 0) & (row < height) & (column >= 0) & (column < width)
        channel = tl.arange(0, block_channels)[None, :]
        exists = channel < image_channels
        offset = (image * image_stride + row * row_stride + column * column_stride)[:, None]
        mask = inside[:, None] & exists
        value = tl.load(x + offset + channel * channel_stride, mask=mask, other=0.0)
        value -= tl.load(mean + channel, mask=exists, other=0.0)
        value /= tl.load(std + channel, mask=exists, other=1.0)
        to = (image * (side + 2) * (side + 2) + pixel)[:, None] * channels + channel
        written = known[:, None] & (channel < channels)
        tl.store(out + to, tl.where(mask, value, 0.0), mask=written)

    @triton.jit
    def _surround_kernel(
        stored, window, origins, last, out, rows, columns, side, channels,
        block_channels: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        """Write some pixels of one image: the window's own, and stored ones around it."""
        image = tl.program_id(0).to(tl.int64)
        pixel = tl.program_id(1) * block + tl.arange(0, block)
        out_row, out_column = pixel // (side + 2), pixel % (side + 2)
        known = pixel < (side + 2) * (side + 2)
        inside = (out_row > 0) & (out_row <= side) & (out_column > 0) & (out_column <= side)
        row = out_row + tl.load(origins + 2 * image)  # the border of the maps is one pixel
        column = out_column + tl.load(origins + 2 * image + 1)
        channel = tl.arange(0, block_channels)[None, :]
        exists = channel < channels
        from_window = (image * side + out_row - 1) * side + out_column - 1
        from_window = from_window[:, None] * channels + channel
        from_stored = ((image * rows + row) * columns + column)[:, None] * channels + channel
        own, around = (known & inside)[:, None] & exists, (known & (inside == 0))[:, None] & exists
        new = tl.load(window + from_window, mask=own, other=0.0)
        old = tl.load(stored + from_stored, mask=around, other=0.0)
        to = (image * (side + 2) * (side + 2) + pixel)[:, None] * channels + channel
        tl.store(out + to, tl.where(inside[:, None], new, old), mask=known[:, None] & exists)
        tl.store(last + from_window, new, mask=own)

    @triton.jit
    def _store_kernel(
        maps, windows, origins, chosen, undo, count, rows, columns, border, side, channels,
        block_channels: tl.constexpr, keep_old: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        """Copy some pixels of the window of one image and level, if the image is chosen."""
        map_number = tl.program_id(0).to(tl.int64)  # level * count + image
        image = map_number % count
        pixel = tl.program_id(1) * block + tl.arange(0, block)
        copied = (pixel < side * side) & (tl.load(chosen + image) != 0)
        row = pixel // side + tl.load(origins + 2 * image) + border
        column = pixel % side + tl.load(origins + 2 * image + 1) + border
        channel = tl.arange(0, block_channels)[None, :]
        mask = copied[:, None] & (channel < channels)
        in_window = (map_number * side * side + pixel)[:, None] * channels + channel
        to = ((map_number * rows + row) * columns + column)[:, None] * channels + channel
        if keep_old:
            tl.store(undo + in_window, tl.load(maps + to, mask=mask, other=0.0), mask=mask)
        tl.store(maps + to, tl.load(windows + in_window, mask=mask, other=0.0), mask=mask)
