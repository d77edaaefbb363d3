"""The batches every implementation is tested on, each with its reason, and how a rung runs one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from hypothesis import strategies as st

from gdpa_kernels.calling import ladder
from gdpa_kernels.gdpa import reference
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.mask import FIELDS, Mask
from gdpa_lab.measuring.inputs import cu_seqlens
from tests.budget import within_budget
from tests.calls import DEVICE, TENSORS, kernels_run


@dataclass(frozen=True)
class Case:
    """A jagged batch and the options of the call."""

    name: str
    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...] | None = None
    num_heads: int = 2
    num_heads_k: int = 2
    head_dim: int = 64
    shared_q: bool = False
    packed: bool = False
    options: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def arguments(self, dtype: torch.dtype, seed: int = 0) -> dict:
        """Keyword arguments for `gdpa` on DEVICE; q, k, v from N(0, 1)."""
        seqlens_k = self.seqlens_q if self.seqlens_k is None else self.seqlens_k
        make = torch.Generator().manual_seed(seed)

        def draw(rows: int, heads: int) -> torch.Tensor:
            return torch.randn(rows, heads, self.head_dim, generator=make).to(DEVICE, dtype)

        if self.packed:
            qkv = draw(sum(self.seqlens_q), self.num_heads + 2 * self.num_heads_k)
            q, k, v = qkv.split([self.num_heads, self.num_heads_k, self.num_heads_k], dim=1)
        else:
            q = draw(max(self.seqlens_q) if self.shared_q else sum(self.seqlens_q), self.num_heads)
            k, v = (draw(sum(seqlens_k), self.num_heads_k) for _ in range(2))
        return {
            "q": q,
            "k": k,
            "v": v,
            "cu_seqlens_q": None if self.shared_q else cu_seqlens(self.seqlens_q, DEVICE),
            "cu_seqlens_k": cu_seqlens(seqlens_k, DEVICE),
            "max_seqlen_q": max(self.seqlens_q, default=0),
            "max_seqlen_k": max(seqlens_k, default=0),
            **self.options,
        }

    def call(self, dtype: torch.dtype, seed: int = 0) -> dict:
        """`arguments`, and grad_out from N(0, 1)."""
        found, make = self.arguments(dtype, seed), torch.Generator().manual_seed(seed + 1000)
        rows = batch_of(found).rows, *found["q"].shape[1:]
        return {"grad_out": torch.randn(rows, generator=make).to(found["q"]), **found}


def batch_of(call: dict) -> Batch:
    """What a rung gets of a call, without its grad_out."""
    fields = {"activation": "gelu_tanh", "scale": call["q"].shape[-1] ** -0.5} | call
    fields.pop("grad_out", None)
    fields["mask"] = Mask(**{name: fields.pop(name) for name in FIELDS & fields.keys()})
    names = fields["activation"]
    return Batch(**fields | {"activation": (names,) if isinstance(names, str) else tuple(names)})


def of_pytorch(batch: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """[out] of the definition in fp64, and in the dtype of a batch."""
    exact = replace(batch, **{name: getattr(batch, name).double() for name in "qkv"})
    return [reference.forward(exact)], [reference.forward_in_dtype(batch)]


def drawn(
    data: st.DataObject, head_dims: Sequence[int], *, keys: int = 140, same: bool = False,
    shared_q: bool = False, narrow: bool = False,
) -> Case:  # fmt: skip
    """A batch and options by hypothesis. keys: the most of a sequence. same: its keys may be of the
    queries' tokens, and packed with them. narrow: in the form that lessons take."""
    lengths_q = data.draw(st.lists(st.integers(0, 140), min_size=1, max_size=4))
    same = same and data.draw(st.booleans())
    shared_q = shared_q and data.draw(st.booleans())
    lengths_q = lengths_q[:1] * len(lengths_q) if shared_q else lengths_q
    lengths_k = lengths_q if same else [data.draw(st.integers(0, keys)) for _ in lengths_q]
    groups = [(1, 1), (1, 2)] if narrow else [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)]
    group, heads_k = data.draw(st.sampled_from(groups))
    return Case(
        "random", tuple(lengths_q), tuple(lengths_k), group * heads_k, heads_k,
        head_dim=data.draw(st.sampled_from(head_dims)),
        shared_q=shared_q,
        packed=same and data.draw(st.booleans()),
        options={
            "activation": data.draw(st.sampled_from(sorted(reference.ACTIVATIONS))),
            "causal": not narrow and data.draw(st.booleans()) and "upper_left",
            "window": None if narrow else data.draw(st.none() | st.integers(0, 300)),
            "output_scale": data.draw(st.sampled_from([1.0, 1 / 128])),
        },
    )  # fmt: skip


BACKWARD = {
    impl: ladder.rung(impl)
    for impl in ladder.impls(direction="backward")[1:]
    if DEVICE == "cpu" or not impl.startswith("b")  # elsewhere only on an sm_100
}
"""The backward rungs that run on DEVICE."""
NAMES = ("dq", "dk", "dv")


def gradients(impl: str, call: dict, **more) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv) of a backward rung; `more` are options that only some rungs have."""
    with kernels_run(impl):
        return BACKWARD[impl].module().backward(call["grad_out"], batch_of(call), **more)


def check_gradients(
    compute: Callable[[dict], tuple], case: Case, dtype: torch.dtype, seed: int = 0,
    change: Callable[[dict], dict] = lambda call: call, **budget,
) -> None:  # fmt: skip
    """Hold gradients to the error budget. compute: (dq, dk, dv) of a call. change: what is done to
    the call first. budget: of `within_budget`."""

    def defined(call: dict, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        cast = {name: x.to(dtype) if name in TENSORS else x for name, x in call.items()}
        return reference.backward_in_dtype(cast["grad_out"], batch_of(cast))

    def draw(i: int) -> tuple:
        call = change(case.call(dtype, seed + i))
        return compute(call), defined(call, torch.float64), defined(call, dtype)

    within_budget(draw, NAMES, **{"least": 4096} | budget)


CASES = [
    Case("tile_edges", seqlens_q=(127, 128, 129, 1, 31, 33)),
    Case("key_edges", seqlens_q=(5, 7, 9, 11), seqlens_k=(31, 32, 33, 65)),
    Case("empty_sequences", seqlens_q=(0, 17, 0, 40), seqlens_k=(20, 0, 0, 33)),
    # Of many heads: `check` draws a small output again until it has enough elements.
    Case("one_token", seqlens_q=(1,), seqlens_k=(1,), num_heads=16, num_heads_k=16),
    Case("empty_batch", seqlens_q=(), seqlens_k=()),
    Case("no_tokens", seqlens_q=(0, 0), seqlens_k=(0, 0)),
    Case("no_keys_at_all", seqlens_q=(3, 4), seqlens_k=(0, 0)),
    Case("packed_qkv", seqlens_q=(40, 3, 70), packed=True),
    Case("shared_q", seqlens_q=(36, 36, 36), seqlens_k=(50, 0, 129), shared_q=True),
    Case("grouped_heads", seqlens_q=(30, 80), num_heads=4, num_heads_k=2),
    Case("one_kv_head", seqlens_q=(30, 80), num_heads=3, num_heads_k=1),
    Case("causal", seqlens_q=(150, 64, 3), options={"causal": True}),
    Case("causal_cross", (150, 3), (40, 90), options={"causal": "upper_left"}),
    Case("lower_right", (150, 3, 40, 0), (40, 90, 0, 7), 4, 2, options={"causal": "lower_right"}),
    Case(
        "lower_right_window", (150, 70), (40, 200), options={"causal": "lower_right", "window": 30}
    ),
    Case(
        "lower_right_shared",
        (36, 36, 36),
        (50, 20, 129),
        shared_q=True,
        options={"causal": "lower_right"},
    ),
    Case("window", seqlens_q=(200, 70), options={"window": 19}),
    Case("window_zero", seqlens_q=(40, 3), options={"window": 0}),
    Case("causal_window", seqlens_q=(200, 9), options={"causal": True, "window": 40}),
    Case("scales", seqlens_q=(50, 60), options={"scale": 0.5, "output_scale": 1 / 60}),
    Case("negative_scale", seqlens_q=(50,), options={"scale": -0.3, "output_scale": -2.0}),
    Case(
        "per_head",
        seqlens_q=(60, 20),
        num_heads=4,
        num_heads_k=4,
        options={"activation": ("gelu", "silu", "relu", "gelu_tanh")},
    ),
    Case("head_dim_128", seqlens_q=(140, 5), head_dim=128),
    Case("head_dim_16", seqlens_q=(40, 5), head_dim=16),
    Case("head_dim_96", seqlens_q=(40, 5), head_dim=96),
    Case("head_dim_256", seqlens_q=(70, 5), head_dim=256),
]
