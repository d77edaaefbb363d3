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

    def __init__(self, base: Tile, given: Any):
        self.pixels, channels = given.block_shape
        ones = (1,) * (len(given.shape) - 1)
        super().__init__(base, given.shape, given.strides, (*ones, channels), given.padding)
        self.pixel, self.block_shape = self.with_box(self.block_shape), tuple(given.block_shape)
        spatial = list(given.shape)[1:-1]
        self.first = list(given.pixel_box_lower_corner)
        ends = zip(spatial, given.pixel_box_upper_corner, strict=True)
        self.last = [size - 1 + corner for size, corner in ends]
        self.jumps = list(given.element_strides or (1, *ones))[1:-1]

    def fetch(self, start: Any, by: Operation | None = None) -> Tile:
        """The pixels from `start`, which is coordinates and offsets."""
        (batch, *at, channel), offsets = ([int(x) for x in part] for part in start)
        for x, first, last in zip(at, self.first, self.last, strict=True):
            if not first <= x <= last:
                raise OutOfBounds(
                    f"im2col load of {self.region.name} begins at pixel {at}, and its box goes "
                    f"from {self.first} to {self.last}"
                )
        rows, left = [], self.pixels
        while left:
            run = min(left, self.last[-1] - at[-1] + 1) if self.jumps[-1] == 1 else 1
            where = (x + offset for x, offset in zip(at, offsets, strict=True))
            box = self.pixel.with_box((*(1,) * len(at), run, self.block_shape[1]))
            found = self.region.memory.load_box(box, (batch, *where, channel), by)
            rows.append(found.data.reshape(run, -1))
            left -= run
            at[-1] += (run - 1) * self.jumps[-1]
            for d in reversed(range(len(at))):
                at[d] += self.jumps[d]
                if at[d] <= self.last[d]:
                    break
                at[d] = self.first[d]
            else:
                batch += 1
        return Tile(torch.cat(rows), self.dtype)
