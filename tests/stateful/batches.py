"""`Lengths` that calls of both operators and layers share."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable
from unittest import mock

import torch
import triton
import triton.language as tl

import tritonemu
from gdpa_kernels import (
    PFFN,
    PMA,
    BlockAttention,
    GDPASelfAttention,
    Lengths,
    RelativeBias,
    block_attention,
    gdpa,
    register_activation,
)
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa.device.custom import CUSTOM
from gdpa_kernels.gdpa.reference import ACTIVATIONS
from tests.stateful.machine import (
    LINES_OF_TWO,
    MODES,
    Machine,
    Refusal,
    interleaved,
    mode_of,
    operation,
)

SIZES = ((5, 25, 1), (5, 25, 1), (0, 16, 15), (40, 3, 70), (25, 5, 1))
MOST = (None, None, None, None, 64)
POOL = tuple(range(len(SIZES)))
PRODUCTS = [rung for rung in ladder.LADDERS["gdpa"] if not rung.is_lesson]
KERNELS = (
    *("auto", "auto backward", "v8_own_waits", "v4_warp_specialized_backward") * 3,
    *(rung.impl for rung in PRODUCTS if rung.requires.capability),
)
LIST_KERNELS = ("work_list_kernel", "order_kernel", "block_list_kernel")
EMBED = 32


@functools.cache
@torch.inference_mode(False)
def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def new_lengths(sizes: tuple[int, ...], most: int | None = None) -> Lengths:
    return Lengths(torch.tensor((0, *sizes), dtype=torch.int32).cumsum(0), most)


def _targets(keys: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([min(n, 2 + i) for i, n in enumerate(keys)], dtype=torch.int32)


def _bias(rows: tuple[int, ...], keys: tuple[int, ...]) -> RelativeBias:
    times = torch.arange(sum(keys)) * 7 % 50
    of_rows = torch.arange(sum(rows)) * 3 % 50
    return RelativeBias(drawn(1, 21), drawn(2, 12), times, of_rows)


OPTIONS: dict[str, Callable[[tuple[int, ...], tuple[int, ...], int], dict]] = {
    "plain": lambda rows, keys, heads: {},
    "causal": lambda rows, keys, heads: {"causal": True},
    "upper_left": lambda rows, keys, heads: {"causal": "upper_left"},
    "lower_right": lambda rows, keys, heads: {"causal": "lower_right"},
    "window": lambda rows, keys, heads: {"window": 3},
    "causal window": lambda rows, keys, heads: {"causal": "upper_left", "window": 3},
    "targets": lambda rows, keys, heads: {"causal": True, "num_targets": _targets(keys)},
    "groups": lambda rows, keys, heads: {
        "causal": True, "num_targets": _targets(keys), "target_group_size": 2,
    },
    "contexts": lambda rows, keys, heads: {"causal": True, "num_contexts": 2},
    "full_rows": lambda rows, keys, heads: {"causal": True, "window": 3, "full_rows": 2},
    "own ranks": lambda rows, keys, heads: {
        "causal": True, "window": 3, "num_targets": _targets(keys), "target_ranks": "own",
    },
    "bias": lambda rows, keys, heads: {"relative_bias": _bias(rows, keys)},
    "partial sum": lambda rows, keys, heads: {"out_dtype": torch.float32},
    "added": lambda rows, keys, heads: {"add_to": drawn(3, sum(rows), heads, 1)},
    "per head": lambda rows, keys, heads: {"activation": ("relu", "silu", "gelu", "relu")[:heads]},
    "precise": lambda rows, keys, heads: {"precise": True, "output_scale": 0.1},
}  # fmt: skip


@triton.jit
def rectified(x):
    return tl.maximum(x, 0.0)


@triton.jit
def rectified_and_slope(x):
    return tl.maximum(x, 0.0), tl.where(x > 0, 1.0, 0.0)


@triton.jit
def unchanged(x):
    return x


@triton.jit
def unchanged_and_slope(x):
    return x, x * 0.0 + 1.0


NAME = "registered_by_the_machine"
ACTIVATION = {
    "relu": (rectified, rectified_and_slope, torch.relu),
    "identity": (unchanged, unchanged_and_slope, lambda x: x * 1.0),
}


def forget_activation() -> None:
    CUSTOM.pop(NAME, None)
    ACTIVATIONS.pop(NAME, None)


class Call:
    """A call of `gdpa` on two of SIZES."""

    def __init__(
        self, q: int, k: int, options: str, heads: tuple[int, int], head_dim: int,
        shared_q: bool = False, dtype: torch.dtype = torch.float32, gradients: bool = True,
    ):  # fmt: skip
        rows, keys = SIZES[q], SIZES[k]
        self.shared_q = shared_q
        total = 7 if shared_q else sum(rows)
        shapes = (total, heads[0]), (sum(keys), heads[1]), (sum(keys), heads[1])
        self.tensors = [drawn(i, *x, head_dim, dtype=dtype) for i, x in enumerate(shapes)]
        every = (total,) * len(keys) if shared_q else rows
        self.options = OPTIONS[options](every, keys, heads[0])
        if "add_to" in self.options:
            self.options["add_to"] = self.options["add_to"].to(dtype).expand(-1, -1, head_dim)
        self.gradients = gradients

    def forward(self, q: Lengths, k: Lengths, **chosen) -> tuple[torch.Tensor, list[torch.Tensor]]:
        leaves = [x.clone().requires_grad_(self.gradients) for x in self.tensors]
        ends = None if self.shared_q else q, k
        return gdpa(*leaves, *ends, **self.options, **chosen), leaves

    def __call__(self, q: Lengths, k: Lengths, **chosen) -> tuple[torch.Tensor, ...]:
        out, leaves = self.forward(q, k, **chosen)
        return out, *differentiated(out, leaves)


def differentiated(out: torch.Tensor, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    if not out.requires_grad:
        return ()
    grad = drawn(9, *out.shape, dtype=out.dtype)
    return torch.autograd.grad(out, leaves, grad, allow_unused=True, materialize_grads=True)


class Lists:
    """Kernels that make lists run, others are noted with what integers they read."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, list[torch.Tensor]]] = []

    @contextlib.contextmanager
    def alone(self):
        run = tritonemu.run_enabled

        def selected(kernel, grid, *arguments, **options):
            if kernel.__name__ in LIST_KERNELS:
                return run(kernel, grid, *arguments, **options)
            tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
            integers = [x.clone() for x in tensors if not x.dtype.is_floating_point]
            self.launched.append((kernel.__name__, integers))

        with mock.patch.object(tritonemu, "run_enabled", selected):
            yield self


def emulated(impl: str):
    """An emulated GPU of few multiprocessors, so that lists wrap."""
    return tritonemu.enabled("sm_100" if impl.startswith("b") else "sm_90", multiprocessors=2)


def chosen_by(impl: str) -> dict[str, str]:
    """Arguments that choose one of KERNELS."""
    if "backward" not in impl:
        return {"impl": impl}
    return {"impl": "reference", "backward_impl": impl.removesuffix(" backward")}


def _layers() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    return {
        "rotary": GDPASelfAttention(EMBED, 2, causal=True, rotary=100.0, qk_norm=True),
        "window": GDPASelfAttention(EMBED, 2, 1, causal=True, window=3, position_bias=5),
        "pool": PMA(EMBED, 2, 3),
        "personal": PFFN(EMBED, 2, 8, 5),
        "wide personal": PFFN(EMBED, 2, 8, 7),
        "blocks": BlockAttention(EMBED, 2, block_size=16, rotary=100.0),
        "slow rotary": BlockAttention(EMBED, 2, block_size=32, rotary=1e4),
    }


LAYERS = tuple(_layers())


class Batches(Machine):
    """`Lengths` in a pool, and layers that share them."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths = [new_lengths(*each) for each in zip(SIZES, MOST, strict=True)]
        self.layers = _layers()
        self.registered: str | None = None
        forget_activation()
        self.begun: list[tuple[torch.Tensor, list[torch.Tensor], tuple[torch.Tensor, ...]]] = []

    def fresh(self, i: int) -> Lengths:
        return new_lengths(SIZES[i], MOST[i])

    def pair(self, q: int, k: int) -> tuple[Lengths, Lengths]:
        return self.lengths[q], self.lengths[k]

    def fresh_pair(self, q: int, k: int) -> tuple[Lengths, Lengths]:
        one = self.fresh(q)
        return one, one if q == k else self.fresh(k)

    @operation(
        12, q=POOL, k=(None, None, *POOL), options=tuple(OPTIONS),
        heads=((2, 2), (2, 1), (4, 2)), head_dim=(32, 64, 128), shared_q=(False, False, True),
        mode=MODES,
    )  # fmt: skip
    def attend(self, q, k, options, heads, head_dim, shared_q, mode) -> None:
        """`gdpa` without kernels."""
        k = q if k is None else k
        call = Call(q, k, options, heads, head_dim, shared_q, gradients=mode != "no_grad")
        with mode_of(mode):
            self.judge(
                lambda: call(*self.pair(q, k)),
                lambda: call(*self.fresh_pair(q, k)),
            )

    @operation(1, q=POOL, options=tuple(OPTIONS), impl=KERNELS, head_dim=(128, 64, 256))
    def kernel(self, q, options, impl, head_dim) -> None:
        """`gdpa` by an emulated kernel of one direction."""
        with emulated(impl):
            self._results(Call(q, q, options, (2, 2), head_dim, False, torch.bfloat16), q, q, impl)

    def _results(self, call: Call, q: int, k: int, impl: str) -> None:
        chosen = chosen_by(impl)
        call.gradients = len(chosen) > 1
        self.judge(
            lambda: call(*self.pair(q, k), **chosen),
            lambda: call(*self.fresh_pair(q, k), **chosen),
        )

    @operation(24, q=(0, 3), k=(None, None, None, 4), options=tuple(OPTIONS), impl=KERNELS,
               heads=((2, 2), (2, 2), (2, 1)), head_dim=(128, 64, 256),
               shared_q=(False, False, False, True))  # fmt: skip
    def plan(self, q, k, options, impl, heads, head_dim, shared_q) -> None:
        """The lists of `kernel`; where they differ, its results decide."""
        k = q if k is None else k
        call = Call(q, k, options, heads, head_dim, shared_q, torch.bfloat16)
        call.gradients = len(chosen_by(impl)) > 1

        def lists(pair: tuple[Lengths, Lengths]) -> list:
            with Lists().alone() as seen:
                call(*pair, **chosen_by(impl))
            return seen.launched

        with emulated(impl):
            try:
                shared = self.attempt(lambda: lists(self.pair(q, k)))
            except Refusal:
                return
            self.answered["plan"] += 1
            if not _same(shared, lists(self.fresh_pair(q, k))):
                self._results(call, q, k, impl)

    @operation(2, q=(0, 3), options=tuple(OPTIONS), impl=KERNELS, head_dim=(128, 64, 256))
    def recorded(self, q, options, impl, head_dim) -> None:
        """Launches are noted and not made: results are what memory held, and leave nothing."""
        call = Call(q, q, options, (2, 2), head_dim, False, torch.bfloat16)
        call.gradients = len(chosen_by(impl)) > 1
        with emulated(impl), launches(run=False):
            self.attempt(lambda: call(*self.pair(q, q), **chosen_by(impl)))
        self.answered["recorded"] += 1

    @operation(4, q=POOL, size=(16, 32, 64), heads=((2, 2), (2, 1)), mode=MODES,
               impl=("auto",) * 5 + ("v1_one_tile",))  # fmt: skip
    def blocks(self, q, size, heads, impl, mode) -> None:
        """`block_attention`, at times by an emulated kernel."""
        total = sum(SIZES[q])
        dtype = torch.float32 if impl == "auto" else torch.bfloat16
        shapes = (total, heads[0], 32), (total, heads[1], 32), (total, heads[1], 32)

        def call(lengths: Lengths) -> tuple[torch.Tensor, ...]:
            tensors = [drawn(i, *x, dtype=dtype) for i, x in enumerate(shapes)]
            leaves = [x.clone().requires_grad_(mode != "no_grad") for x in tensors]
            out = block_attention(*leaves, lengths, block_size=size, impl=impl)
            return out, *differentiated(out, leaves)

        kernels = contextlib.nullcontext() if impl == "auto" else emulated(impl)
        with kernels, mode_of(mode):
            self.judge(lambda: call(self.lengths[q]), lambda: call(self.fresh(q)))

    def _through(self, name: str, layer: torch.nn.Module, lengths: Lengths) -> tuple:
        x = drawn(5, lengths.total, EMBED).clone().requires_grad_()
        more = (drawn(6, lengths.batch, 8),) if "personal" in name else ()
        y = layer((x, lengths), *more)
        y = y if isinstance(y, torch.Tensor) else y[0]
        return y, *differentiated(y, [x, *layer.parameters()])

    @operation(8, name=LAYERS, q=POOL, mode=MODES)
    def layer(self, name, q, mode) -> None:
        """A layer on shared lengths; a copy of it on its own."""
        layer = self.layers[name]
        with mode_of(mode):
            self.judge(
                lambda: self._through(name, layer, self.lengths[q]),
                lambda: self._through(name, copy.deepcopy(layer), self.fresh(q)),
            )

    @operation(1, names=(("rotary", "blocks"), ("personal", "wide personal")), q=POOL,
               line=LINES_OF_TWO)  # fmt: skip
    def two_layers(self, names, q, line) -> None:
        """Two layers in two threads on the same lengths."""
        calls = [
            lambda name=name: self._through(name, self.layers[name], self.lengths[q])
            for name in names
        ]
        for name, result in zip(names, interleaved(*calls, line), strict=True):
            if isinstance(result, Exception):
                raise result
            layer = copy.deepcopy(self.layers[name])
            self.answered["two_layers"] += 1
            self.compare(result, lambda n=name, x=layer: self._through(n, x, self.fresh(q)))

    @operation(2, name=LAYERS)
    def optimize(self, name) -> None:
        """An optimizer's step: parameters change where they are."""
        with torch.no_grad():
            for i, parameter in enumerate(self.layers[name].parameters()):
                parameter.add_(drawn(20 + i, *parameter.shape), alpha=0.1)

    @operation(3, q=POOL, options=tuple(OPTIONS))
    def begin(self, q, options) -> None:
        """A call whose gradients come later."""
        call = Call(q, q, options, (2, 2), 32)
        try:
            out, leaves = self.attempt(lambda: call.forward(*self.pair(q, q)))
        except Refusal:
            return
        self.begun.append((out, leaves, call(*self.fresh_pair(q, q))))

    @operation(3, at=tuple(range(4)))
    def finish(self, at) -> None:
        """The gradients of a call that has begun."""
        if not self.begun:
            return
        out, leaves, expected = self.begun.pop(at % len(self.begun))
        self.judge(lambda: (out, *differentiated(out, leaves)), lambda: expected)

    @operation(1, q=POOL, how=("pickle", "copy", "to", "extended"))
    def renew(self, q, how) -> None:
        """Lengths take the place of those that they were made from."""
        before = self.lengths[q]
        if how == "extended":
            longer = self.attempt(lambda: before.extended(2))
            sizes = tuple(n + 2 for n in SIZES[q])
            expected = new_lengths(sizes, before.max_seqlen + 2)
            self.compare(
                (longer.cu_seqlens, longer.max_seqlen, longer.total),
                lambda: (expected.cu_seqlens, expected.max_seqlen, expected.total),
            )
            return
        self.lengths[q] = {
            "pickle": lambda: pickle.loads(pickle.dumps(before)),
            "copy": lambda: copy.copy(before),
            "to": lambda: before.to("cpu"),
        }[how]()

    @operation(1, of=tuple(ACTIVATION))
    def register(self, of) -> None:
        """One name for what one function computes; for another one it is refused."""
        self.attempt(lambda: register_activation(NAME, *ACTIVATION[of]))
        self.answered["register"] += 1
        self.registered = of

    @operation(2, q=POOL, impl=("reference",) * 9 + ("v1_tiled",))
    def activate(self, q, impl) -> None:
        """What was registered against the package's own function."""
        if self.registered is None:
            return
        call, gradients = Call(q, q, "plain", (2, 2), 32), impl == "reference"
        call.gradients = gradients
        with emulated(impl):
            self.judge(
                lambda: call(*self.pair(q, q), impl=impl, activation=NAME),
                lambda: call(*self.fresh_pair(q, q), impl=impl, activation=self.registered),
            )

    @operation(0.05, q=POOL, options=("plain", "causal", "targets"), backend=("eager", "aot_eager"))
    def compiled(self, q, options, backend) -> None:
        """A compiled call on lengths that eager calls share."""
        call = Call(q, q, options, (2, 2), 32)
        both = torch.compile(gdpa, backend=backend)

        def run(pair: tuple[Lengths, Lengths]) -> tuple[torch.Tensor, ...]:
            with mock.patch.dict(globals(), {"gdpa": both}):
                return call(*pair)

        self.judge(lambda: run(self.pair(q, q)), lambda: call(*self.fresh_pair(q, q)))


def _same(shared: list, fresh: list) -> bool:
    if [name for name, _ in shared] != [name for name, _ in fresh]:
        return False
    pairs = zip(shared, fresh, strict=True)
    return all(
        torch.equal(a, b) for (_, one), (_, two) in pairs for a, b in zip(one, two, strict=True)
    )
