"""The batches every rung is tested on, each with its reason, and the tensors for them."""

from dataclasses import dataclass, replace

import torch

from gdpa_kernels.block_attention import reference
from gdpa_kernels.block_attention.batch import Batch
from gdpa_kernels.calling import ladder
from gdpa_lab.measuring.inputs import cu_seqlens
from tests import calls
from tests.budget import within_budget
from tests.calls import DEVICE

BLACKWELL = ("b1_warp_specialized",) if DEVICE == "cpu" else ()  # elsewhere only on an sm_100
RUNGS = {
    name: ladder.rung(name, "block_attention").module()
    for name in (
        *("v0_flash", "v1_one_tile", "v2_slab", "v3_warp_specialized", "v4_rotary"),
        *("v4a_turning_role", *BLACKWELL),
    )
}
NAMES = ("out", "dq", "dk", "dv")


def kernels_run(module=None):
    """The context in which kernels of a rung run on DEVICE."""
    return calls.kernels_run(module.__name__.rpartition(".")[2] if module else "")


@dataclass(frozen=True)
class Case:
    """A jagged batch, the shape of its tensors and the options of the call."""

    name: str
    seqlens: tuple[int, ...]
    num_heads: int = 2
    num_heads_k: int = 2
    head_dim: int = 64
    block_size: int = 64
    packed: bool = False
    rotary: bool = False
    rotate_v: bool = False
    scale: float | None = None

    def __str__(self) -> str:
        return self.name

    def tensors(self, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
        """grad_out, q, k, v from N(0, 1), and cu_seqlens, on DEVICE."""
        total, make = sum(self.seqlens), torch.Generator().manual_seed(seed)

        def draw(heads: int) -> torch.Tensor:
            return torch.randn(total, heads, self.head_dim, generator=make).to(DEVICE, dtype)

        if self.packed:
            qkv = draw(self.num_heads + 2 * self.num_heads_k)
            q, k, v = qkv.split([self.num_heads, self.num_heads_k, self.num_heads_k], dim=1)
        else:
            q, k, v = draw(self.num_heads), draw(self.num_heads_k), draw(self.num_heads_k)
        ends = cu_seqlens(list(self.seqlens), DEVICE)
        return {"grad_out": draw(self.num_heads), "q": q, "k": k, "v": v, "cu_seqlens": ends}

    def options(self, seed: int = 0) -> dict:
        """block_size, scale, rotary, rotate_v; sin and cos uniform in [-1, 1), so no rotation at
        all. Of N(0, 1) the products with N(0, 1) have few large values, which make an error now and
        then four times that of others."""
        rotary, make = None, torch.Generator().manual_seed(seed + 1)
        if self.rotary:
            shape = (sum(self.seqlens), self.head_dim // 2)
            turns = (torch.rand(shape, generator=make) for _ in range(2))
            rotary = tuple((2 * x - 1).to(DEVICE) for x in turns)
        return {
            "block_size": self.block_size,
            "scale": self.head_dim**-0.5 if self.scale is None else self.scale,
            "rotary": rotary,
            "rotate_v": self.rotate_v,
        }


# The rows of each block of the sequences (5, 70, 64, 3).
BLOCKS = (slice(0, 5), slice(5, 69), slice(69, 75), slice(75, 139), slice(139, 142))
# A block, and whether the values of the others are finite.
NEIGHBOURS = [(0, False), (1, True), (2, False), (4, True)]


def poisoned(tensor: torch.Tensor, own: int, finite: bool) -> torch.Tensor:
    """The tensor, all BLOCKS but one overwritten: by large values, or NaN and infinity in turn."""
    changed = tensor.clone()
    for other, rows in enumerate(BLOCKS):
        if other != own:
            strange = ("nan", "inf")[(own + other) // 2 % 2]
            changed[rows] = -3e38 if finite else float(strange)
    return changed


def rotaries(rung: str) -> tuple[bool, ...]:
    """Whether calls of a rung come with rotary: (False, True) if it takes both kinds."""
    if rung in ("v4_rotary", "v4a_turning_role"):
        return (True,)
    return (False,) if rung == "v3_warp_specialized" else (False, True)


def suited(rung: str, case: Case) -> Case:
    """The case, with rotary where the rung needs it."""
    return replace(case, rotary=case.rotary or rotaries(rung)[0])


def supports(rung: str, case: Case, dtype: torch.dtype) -> bool:
    """Whether a rung takes the case."""
    _, *others = case.tensors(dtype).values()
    batch = Batch(*others, **case.options())
    return ladder.rung(rung, "block_attention").call_problem(batch) is None


def results(module, tensors: dict, options: dict, **more) -> tuple[torch.Tensor, ...]:
    """(out, dq, dk, dv) of a rung."""
    grad_out, *others = tensors.values()
    with kernels_run(module):
        out, saved = module.forward(Batch(*others, **options), **more)
        return out, *module.backward(grad_out, Batch(*others, **options), saved, **more)


def defined(tensors: dict, options: dict, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(out, dq, dk, dv) of the definition, computed in `dtype`."""
    grad_out, *others, ends = (
        t if name == "cu_seqlens" else t.to(dtype) for name, t in tensors.items()
    )
    if dtype == torch.float64 and options["rotary"] is not None:
        options = options | {"rotary": tuple(t.double() for t in options["rotary"])}
    out = reference.forward_in_dtype(Batch(*others, ends, **options))[0]
    return out, *reference.backward_in_dtype(grad_out, Batch(*others, ends, **options))


def check(
    module, case: Case, dtype: torch.dtype, seed: int = 0, change=lambda tensors: tensors, **more
) -> None:
    """Hold output and gradients to the error budget. change: what is done to the tensors first."""

    def draw(i: int) -> tuple:
        tensors, options = change(case.tensors(dtype, seed + i)), case.options(seed + i)
        low, exact = (defined(tensors, options, d) for d in (dtype, torch.float64))
        return results(module, tensors, options, **more), exact, low

    within_budget(draw, NAMES)


EDGES = (0, 1, 63, 64, 65)
CASES = [
    Case("edges", (*EDGES, 0)),
    Case("empty_batch", ()),
    Case("no_tokens", (0, 0, 0)),
    Case("one_and_two_tokens", (1, 2, 1)),
    Case("many_blocks", (200, 3, 129)),
    Case("packed_qkv", (40, 3, 70), num_heads=4, packed=True),
    Case("grouped_heads", (30, 80), num_heads=4),
    Case("one_kv_head", (30, 66), num_heads=3, num_heads_k=1, rotary=True, rotate_v=True),
    Case("negative_scale", (50, 20), scale=-0.7),
    Case("rotary", EDGES, rotary=True),
    Case("rotary_v", (65, 3), rotary=True, rotate_v=True, head_dim=128),
    Case("rotary_v_64", (65, 3), rotary=True, rotate_v=True),
    Case("grouped_rotary_v_128", (65, 3), 2, 1, 128, rotary=True, rotate_v=True),
    Case("head_dim_128", EDGES, head_dim=128),
    Case("grouped_128", (1, 64, 65), num_heads=3, num_heads_k=1, head_dim=128),
    Case("head_dim_96", EDGES, head_dim=96),
    Case("grouped_96", (1, 65), num_heads=3, num_heads_k=1, head_dim=96),
    Case("rotary_v_96", (65, 3), rotary=True, rotate_v=True, head_dim=96),
    Case("head_dim_72", (65,), head_dim=72),
    Case("rotary_v_192", (65, 3), rotary=True, rotate_v=True, head_dim=192),
    Case("two_heads_256", (1, 63, 65), head_dim=256),
    Case("rotary_256", (64, 3), rotary=True, head_dim=256),
    Case("one_block_of_one_head", (7,), num_heads=1, num_heads_k=1),
    Case("large_scores", (65, 40), scale=30.0),
    Case("head_dim_16", (65, 40), head_dim=16),
    Case("head_dim_48_rotary", (65, 40), head_dim=48, rotary=True),
    Case("head_dim_160", (65, 40), head_dim=160, num_heads=2, num_heads_k=1, rotary=True),
    Case("head_dim_256", (65,), head_dim=256, num_heads=1, num_heads_k=1),
    *(
        Case(
            f"block_{size}_head_dim_{dim}", (size - 1, size, size + 1, 0, 1),
            block_size=size, head_dim=dim,
        )
        for size in (16, 32, 128)
        for dim in (16, 48, 64, 128)
    ),
]  # fmt: skip
