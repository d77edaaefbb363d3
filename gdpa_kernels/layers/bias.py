"""`BiasTables`: the learned tables of a relative bias, of the layers that have one."""

from __future__ import annotations

import torch
from torch import nn

from gdpa_kernels.calling import checks, private
from gdpa_kernels.gdpa.bias import MOST_BUCKETS, RelativeBias, check_times, hstu_thresholds


class BiasTables(private.Constants):
    """The parameters position_bias and time_bias of a layer, and the thresholds of the latter.

    `GDPASelfAttention` and `HSTULayer` call `make_tables` in their `__init__`.
    """

    position_bias: nn.Parameter | None
    time_bias: nn.Parameter | None
    time_thresholds: torch.Tensor | None

    def make_tables(
        self, position_bias: int | None, time_bias: int | None, next_time: bool,
        device: torch.device | str | None, dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        """Make the tables, drawn from N(0, 0.02): `[2 * position_bias - 1]` and `[time_bias]`, None
        for None."""
        checks.check_bool(next_time=next_time)
        sizes = {"position_bias": position_bias, "time_bias": time_bias}
        checks.check_positive(**{name: size for name, size in sizes.items() if size is not None})
        if time_bias is not None and time_bias > MOST_BUCKETS:
            raise ValueError(f"time_bias must be at most {MOST_BUCKETS}, got {time_bias}")
        self.next_time, self.position_bias, self.time_bias = next_time, None, None
        thresholds, factory = None, {"device": device, "dtype": dtype}
        if position_bias is not None:
            self.position_bias = nn.Parameter(torch.empty(2 * position_bias - 1, **factory))
        if time_bias is not None:
            self.time_bias = nn.Parameter(torch.empty(time_bias, **factory))
            thresholds = self.thresholds(device)
        self.register_buffer("time_thresholds", thresholds, persistent=False)
        self.register_load_state_dict_post_hook(_move_thresholds)
        self.reset_parameters()

    def thresholds(self, device: torch.device | str | None) -> torch.Tensor:
        """The thresholds of time_bias."""
        return hstu_thresholds(len(self.time_bias), device)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the tables of the relative bias and make its thresholds; needed after `to_empty`."""
        for table in (self.position_bias, self.time_bias):
            if table is not None:
                table.normal_(std=0.02)
        self.make_constants()

    def make_constants(self, device: torch.device | None = None) -> None:
        """Make the thresholds, which no state dict holds, on `device`; None for where they are."""
        if self.time_thresholds is not None:
            device = self.time_thresholds.device if device is None else device
            with torch.inference_mode(False):  # training may follow
                self.time_thresholds = self.thresholds(device)

    def relative_bias(
        self, timestamps: torch.Tensor | None, query_timestamps: torch.Tensor | None = None
    ) -> RelativeBias | None:
        """The relative bias as `gdpa` takes it, of timestamps and query_timestamps as
        `RelativeBias`; None without tables."""
        if timestamps is not None and self.time_bias is None:
            raise ValueError("timestamps must be None without time_bias, got a value")
        if self.position_bias is None and self.time_bias is None:
            return None
        if self.time_bias is not None:
            check_times("timestamps", timestamps, "time_bias")
        return RelativeBias(
            self.position_bias, self.time_bias, timestamps, query_timestamps,
            time_thresholds=self.time_thresholds, next_time=self.next_time,
        )  # fmt: skip


def _move_thresholds(layer: BiasTables, _: object) -> None:
    """Make the thresholds where `load_state_dict(assign=True)` has brought their table. A table on
    the CPU may only wait there for its use: thresholds stay unless they have no values at all."""
    if layer.time_thresholds is None:
        return
    table, thresholds = layer.time_bias.device, layer.time_thresholds.device
    if table != thresholds and (thresholds.type == "meta" or table.type != "cpu"):
        layer.make_constants(table)
