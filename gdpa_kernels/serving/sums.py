"""`StoredSums`: attention of fixed queries over events that come and go, kept by applications.

Without normalisation, attention over a set of events is a sum of terms, one of each event. So the
pooled history of a user (PMA: seeds that are the same for everybody) can be stored, and an event
added or deleted for the cost of that event alone. Two things must hold:

- An event's term does not depend on other events, as in a first layer over per-event features, and
  not behind another attention layer: the caller knows that (`HistoryRules.check_subtraction`).
- The same arithmetic adds and deletes, since a kernel that rounds otherwise leaves its difference
  behind: `impl` is one, and stored sums go on by the same `arithmetic` alone.

A call changes all the tensors of its users or, where it fails, none: `_change` computes what is new
in copies, and `_store` writes it.
"""

from __future__ import annotations

from typing import Any

import torch

import gdpa_kernels
from gdpa_kernels.calling import checks, ladder
from gdpa_kernels.calling.lengths import Lengths
from gdpa_kernels.calling.rung import capability
from gdpa_kernels.gdpa import api
from gdpa_kernels.gdpa.api import IMPLS, gdpa
from gdpa_kernels.gdpa.registration import check_activation
from gdpa_kernels.serving.exclusive import Exclusive, exclusively

UNIT = 2.0**-30
"""An exact sum is an int64 that counts these."""
LARGEST = 2.0**62
"""The bound of a term and of a sum, in units: two below it add up in an int64."""
STORED = "total", "count", "updates", "peak"
"""The tensors of the sums, by users."""
ROUNDING, TOLERATED = 1.3e-8, 2e-4
"""The relative error of an fp32 sum grows as ROUNDING sqrt(updates) (largest norm / present norm),
fitted: 1.3e-6 after 10,000 updates of one norm. About an eighth of a rounding to bf16 is tolerated:
that of 10,000 updates after which the norm is 1 / 150 of the largest."""


class StoredSums:
    """A sum `[rows, num_heads, head_dim]` for each of `users`, empty at first.

    Args:
        q: the queries of all users, `[rows, num_heads, head_dim]`; copied.
        users: how many sums.
        activation, scale, output_scale, precise: as `gdpa`.
        impl: the kernel that computes every term, by name: "auto" may change with a batch's shape.
        exact: sums of integers, in units of 2**-30: what is deleted leaves nothing, in whatever
            order, by an implementation that is batch invariant (`Rung.batch_invariant`): others are
            refused. Each event is computed alone, and the terms take up to `16 * q.numel()` bytes
            an event while they are added. False: fp32, 1.3e-6 after 10,000 updates.

    Attributes: total (fp32, or int64 with exact) `[users, rows, num_heads, head_dim]`; count and
    updates int64 `[users]`, events held and added or deleted; peak fp32 `[users]`, the largest
    norm. Threads may share the sums.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received;
            or an exact sum would leave its range, 4.3e9, or get what is not finite.
    """

    def __init__(
        self,
        q: torch.Tensor,
        users: int,
        *,
        activation: str | tuple[str, ...] = "gelu_tanh",
        scale: float | None = None,
        output_scale: float = 1.0,
        precise: bool = False,
        impl: str = "v1_tiled",
        exact: bool = False,
    ):
        if not isinstance(q, torch.Tensor):
            raise TypeError(f"q must be a tensor, got {type(q).__name__}")
        if q.dim() != 3 or q.dtype not in checks.DTYPES:
            raise ValueError(f"q must be [rows, num_heads, head_dim] up to fp32, got {_shown(q)}")
        users = checks.check_count("users", users, least=1)
        checks.check_bool(precise=precise, exact=exact)
        checks.check_impl(impl, IMPLS)
        if impl == "auto":
            raise ValueError("impl must be the name of one implementation, got 'auto'")
        if exact and not ladder.rung(impl).batch_invariant:
            raise ValueError(
                "impl must be batch invariant for an exact sum, one of "
                f"{', '.join(x for x in IMPLS if ladder.rung(x).batch_invariant)}, got {impl!r}"
            )
        api.check_scalars(scale, output_scale)
        names = check_activation(activation, q.shape[1])
        self._options = {
            "activation": names, "scale": scale, "output_scale": output_scale,
            "precise": precise, "impl": impl, "out_dtype": torch.float32,
        }  # fmt: skip
        kind = torch.int64 if exact else torch.float32
        self.exact, self.exclusive = exact, Exclusive(q.device)
        with torch.inference_mode(False):  # what is added may follow an evaluation
            self.q = q.detach().clone()
            self.total = self.q.new_zeros(users, *q.shape, dtype=kind)
            self.count, self.updates = (self.q.new_zeros(users).long() for _ in range(2))
            self.peak = self.q.new_zeros(users, dtype=torch.float32)
        with self.exclusive:
            pass  # other streams wait until the memory is zero

    @property
    def arithmetic(self) -> str:
        """What computed the terms, in words: sums of another one cannot go on."""
        options = ", ".join(
            f"{name} {x}" for name, x in self._options.items() if name != "out_dtype"
        )
        kind, device = "int64" if self.exact else "fp32", self.q.device.type
        if (version := capability(self.q.device)) is not None:
            import triton

            device += f" {version[0]}.{version[1]} by Triton {triton.__version__}"
        return (
            f"gdpa_kernels {gdpa_kernels.__version__}, {options}, {self.q.dtype} into {kind} on "
            f"{device}"
        )

    @exclusively
    @torch.no_grad()
    def add(
        self, users: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        cu_seqlens: torch.Tensor | Lengths, max_seqlen: int | None = None,
    ) -> None:  # fmt: skip
        """Add events: sequence i of k and v, `[events, num_kv_heads, head_dim]` with offsets
        `cu_seqlens` `[n + 1]` or `Lengths`, to the sum of users[i], int64 `[n]`, each once."""
        self._change(1, users, k, v, cu_seqlens, max_seqlen)

    @exclusively
    @torch.no_grad()
    def delete(
        self, users: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        cu_seqlens: torch.Tensor | Lengths, max_seqlen: int | None = None,
    ) -> None:  # fmt: skip
        """Take events away again that were added: their keys and values as they were."""
        self._change(-1, users, k, v, cu_seqlens, max_seqlen)

    @exclusively
    def value(self, users: torch.Tensor | None = None) -> torch.Tensor:
        """The sums of these users, int64 `[n]` or bool `[users]`, None for all: `[n, rows,
        num_heads, head_dim]`, in q's dtype, rounded once."""
        if users is None:
            total = self.total
        elif self._check_index(users).dtype == torch.bool:
            total = self.total[users]
        else:  # index_select, for which a negative number is no user
            total = self.total.index_select(0, users)
        if self.exact:
            return (_to_fp32(total, self.q.dtype) * UNIT).to(self.q.dtype)
        return total.to(self.q.dtype, copy=users is None)

    @exclusively
    def stale(self) -> torch.Tensor:
        """Bool `[users]`: whose sum should be computed again from its events, since its rounding
        may reach an eighth of bf16's, or it is not finite; none with `exact`."""
        if self.exact:
            return torch.zeros_like(self.count, dtype=torch.bool)
        present = self.total.flatten(1).norm(dim=1)
        error = ROUNDING * self.updates.sqrt() * self.peak
        return ~((error <= TOLERATED * present) & present.isfinite())

    @exclusively
    def clear(self, users: torch.Tensor) -> None:
        """Empty the sums of these users, int64 `[n]` or bool `[users]`, before they are computed
        again."""
        self._check_users(self._check_index(users))
        self._store(users, **dict.fromkeys(STORED, 0))

    @exclusively
    def state_dict(self) -> dict[str, Any]:
        """The sums, of which queries they are, and what computed them; of a module's kind, whose
        tensors are not copied."""
        return {name: getattr(self, name) for name in (*STORED, "q", "arithmetic")}

    @exclusively
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with sums that were stored. Raises ValueError if another arithmetic made them, for
        another number of users, and for other queries. That keys and values are still made by the
        same weights is the caller's to know."""
        if state["arithmetic"] != self.arithmetic:
            raise ValueError(
                f"arithmetic of state must be {self.arithmetic}, got {state['arithmetic']}: "
                "compute the sums again"
            )
        for name in STORED:
            shape, received = getattr(self, name).shape, state[name].shape
            if received != shape:
                raise ValueError(
                    f"{name} of state must have shape {list(shape)}, got {list(received)}"
                )
        if not torch.equal(state["q"].to(self.q), self.q):
            raise ValueError(
                "q of state must be the queries of these sums, got others: compute them again"
            )
        self._store(slice(None), **{name: state[name] for name in STORED})

    def _change(
        self, sign: int, users: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        cu_seqlens: torch.Tensor | Lengths, max_seqlen: int | None,
    ) -> None:  # fmt: skip
        """Add events for a sign of 1, delete them for -1."""
        for name, x in (("k", k), ("v", v)):
            if not isinstance(x, torch.Tensor) or x.dtype != self.q.dtype:
                raise TypeError(f"{name} must be a tensor of {self.q.dtype}, got {_shown(x)}")
        if not isinstance(users, torch.Tensor) or users.dtype != torch.int64:
            raise TypeError(f"users must be an int64 tensor, got {_shown(users)}")
        if not isinstance(cu_seqlens, Lengths):
            cu_seqlens = Lengths(cu_seqlens, max_seqlen)
        ends, _ = cu_seqlens.offsets_for("cu_seqlens", k.shape[0], k.device, max_seqlen)
        events = ends.diff().to(torch.int64)
        if users.shape != events.shape or users.unique().numel() != users.numel():
            raise ValueError(
                f"users must name each of {events.numel()} users once, got {users.tolist()}"
            )
        self._check_users(users)
        count, updates = self.count[users] + sign * events, self.updates[users] + events
        if (count < 0).any():
            raise ValueError(
                "cu_seqlens must have no more events to delete than are held, "
                f"{self.count[users].tolist()}, got {events.tolist()}"
            )
        total, peak = self.total[users], self.peak[users]
        if self.exact:
            self._add_exactly(sign, total, k, v, events)
        else:
            total += sign * self._attention(k, v, cu_seqlens, max_seqlen)
        empty = count == 0
        total[empty], updates[empty], peak[empty] = 0, 0, 0
        if not self.exact:
            peak = torch.maximum(peak, total.flatten(1).norm(dim=1))
        self._store(users, total=total, count=count, updates=updates, peak=peak)

    def _add_exactly(
        self, sign: int, total: torch.Tensor, k: torch.Tensor, v: torch.Tensor, events: torch.Tensor
    ) -> None:
        """Add the terms of all events, events[i] of them to total[i], in units. Each is a sequence
        of its own, so that its term does not depend on the others; an fp32 term has 24 bits, which
        fp64 holds. What int64 wraps around on its way to a sum within the bound comes back."""
        owners = torch.arange(len(total), device=k.device).repeat_interleave(events)
        ends = torch.arange(k.shape[0] + 1, dtype=torch.int32, device=k.device)
        terms = (self._attention(k, v, ends, 1).double() / UNIT).round()
        reached = total.double().index_add_(0, owners, terms, alpha=sign)
        for x in (terms, reached):
            if not (x.abs() < LARGEST).all():
                raise ValueError(
                    f"terms of an exact sum, and the sum, must be below {LARGEST * UNIT:.3g}, got "
                    f"{x.abs().max() * UNIT:.3g}"
                )
        total.index_add_(0, owners, terms.to(torch.int64), alpha=sign)

    def _store(self, users: torch.Tensor | slice, **rows: torch.Tensor | int) -> None:
        """Store rows of these users in all tensors, or in none if that fails."""
        previous = {name: getattr(self, name)[users].clone() for name in rows}
        try:
            for name, x in rows.items():
                getattr(self, name)[users] = x
        except BaseException:
            for name, x in previous.items():
                getattr(self, name)[users] = x
            raise

    def _check_index(self, users: torch.Tensor) -> torch.Tensor:
        """`users`. Raises TypeError or ValueError unless they are int64 `[n]` or bool `[users]`."""
        if not isinstance(users, torch.Tensor) or users.dtype not in (torch.int64, torch.bool):
            raise TypeError(f"users must be an int64 or bool tensor, got {_shown(users)}")
        known = self.count.shape
        if users.dim() != 1 or (users.dtype == torch.bool and users.shape != known):
            raise ValueError(f"users must be int64 [n] or bool {list(known)}, got {_shown(users)}")
        return users

    def _check_users(self, users: torch.Tensor) -> None:
        """Waits for the device: what is negative would count from the end."""
        known = self.count.numel()
        if users.dtype != torch.bool and not ((users >= 0) & (users < known)).all():
            raise ValueError(f"users must be from 0 to {known - 1}, got {users.tolist()}")

    def _attention(
        self, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | Lengths,
        max_seqlen: int | None,
    ) -> torch.Tensor:  # fmt: skip
        """The sum of each sequence's terms, `[sequences, rows, num_heads, head_dim]` in fp32, of
        keys and values in q's dtype, which autocast does not change."""
        rows = self.q.shape[0]
        with checks.without_autocast(self.q):
            out = gdpa(self.q, k, v, None, cu_seqlens, rows, max_seqlen, **self._options)
        return out.view(-1, *self.q.shape)


def _to_fp32(units: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """int64 of at most 2**62 in fp32, so that a rounding to dtype gives what one alone would: where
    fp32 is not dtype and rounds, the odd one of its two neighbours, in the middle between no two
    values of fewer bits."""
    wide = units.float()
    if dtype != torch.float32:
        outwards = (units - wide.long()).sign() * units.sign()  # from zero; 0 where nothing rounds
        bits = wide.view(torch.int32)
        bits += (outwards * (1 - bits % 2)).int()
    return wide


def _shown(x: object) -> str:
    return f"{list(x.shape)} of {x.dtype}" if isinstance(x, torch.Tensor) else repr(x)
