"""TMA descriptors that load the pixels under a filter: rows of a matrix [pixels, channels]."""

from typing import Any

import torch

from ..errors import OutOfBounds
from ..memory import Descriptor
from ..scheduler import Operation
from ..tile import Tile


class Im2Col(Descriptor):
    """A descriptor of an image [N, ..., C], with spatial dimensions between.

    Pixels follow each other in the box from `first` to `last`, both included, the last dimension
    fastest and in steps of `jumps`, then in that of the next image. Offsets move what is loaded,
    not the box; outside the image it is padding.
    """

    def __init__(self, base: Tile, host: Any):
        self.pixels, channels = host.block_shape
        ones = (1,) * (len(host.shape) - 1)
        super().__init__(base, host.shape, host.strides, (*ones, channels), host.padding)
        self.pixel, self.block_shape = self.with_box(self.block_shape), tuple(host.block_shape)
        spatial = list(host.shape)[1:-1]
        self.first = list(host.pixel_box_lower_corner)
        ends = zip(spatial, host.pixel_box_upper_corner, strict=True)
        self.last = [size - 1 + corner for size, corner in ends]
        self.jumps = list(host.element_strides or (1, *ones))[1:-1]

    def fetch(self, start: Any, by: Operation | None = None) -> Tile:
        """Load the pixels from `start`, which is coordinates and offsets."""
        (batch, *position, channel), offsets = ([int(x) for x in part] for part in start)
        for x, first, last in zip(position, self.first, self.last, strict=True):
            if not first <= x <= last:
                raise OutOfBounds(
                    f"im2col load of {self.region.name} begins at pixel {position}, and its box "
                    f"goes from {self.first} to {self.last}"
                )
        rows, left = [], self.pixels
        while left:
            run = min(left, self.last[-1] - position[-1] + 1) if self.jumps[-1] == 1 else 1
            where = (x + offset for x, offset in zip(position, offsets, strict=True))
            box = self.pixel.with_box((*(1,) * len(position), run, self.block_shape[1]))
            pixels = self.region.memory.load_box(box, (batch, *where, channel), by)
            rows.append(pixels.data.reshape(run, -1))
            left -= run
            position[-1] += (run - 1) * self.jumps[-1]
            for d in reversed(range(len(position))):
                position[d] += self.jumps[d]
                if position[d] <= self.last[d]:
                    break
                position[d] = self.first[d]
            else:
                batch += 1
        return Tile(torch.cat(rows), self.dtype)
