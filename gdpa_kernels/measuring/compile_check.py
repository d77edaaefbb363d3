"""Compile a kernel for a GPU that is not here, and read what the compiler made of it.

Registers and spills come from ptxas, instructions from the disassembly; both ship with Triton. A
kernel that spills or whose wgmma are serialised is slow on every machine, and shows so on a CPU
within seconds.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from gdpa_kernels.calling import ladder
from gdpa_kernels.gdpa.activations import foldable

KERNELS = {
    "v1_tiled": "tiled_kernel",
    "v2_tma": "tma_kernel",
    "v3_persistent": "persistent_kernel",
    "v4_warp_specialized": "specialized_kernel",
    "v5_pingpong": "pipelined_kernel",
    "v6a_persistent": "persistent_pipeline_kernel",
    "v6b_stream": "stream_kernel",
    "v6_short_kv": "short_kv_kernel",
    "v7_packed": "packed_kernel",
    "v8_own_waits": "own_waits_kernel",
}


@dataclass(frozen=True)
class Compiled:
    """What one kernel became: per-thread registers, bytes spilled, bytes of shared memory.

    `serialised`: ptxas reported that wgmma instructions wait for each other.
    `instructions`: how often each SASS mnemonic occurs, e.g. HGMMA, UTMALDG, LDGSTS, MUFU.
    `wide`: how often each occurs with the modifier .128, which moves 16 bytes a thread: LDG, STG,
    LDGSTS, LDS, STS.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    serialised: bool
    instructions: Mapping[str, int]
    wide: Mapping[str, int]


@cache
def compile_rung(impl: str, **options: object) -> Compiled:
    """`read(build_rung(impl, **options))`, compiled once."""
    return read(build_rung(impl, **options))


def build_rung(
    impl: str,
    *,
    capability: int = 90,
    head_dim: int = 128,
    dtype: str = "bf16",
    activation: str = "gelu_tanh",
    causal: bool = False,
    window: int | None = None,
    config: object | None = None,
    max_seqlen_k: int = 1024,
) -> CompiledKernel:
    """Compile the kernel of rung `impl` for sm_<capability> as its launcher would.

    `dtype` is Triton's name: bf16, fp16 or fp32. Raises ValueError for a rung without a kernel.
    """
    if impl not in KERNELS:
        raise ValueError(f"impl must be one of {', '.join(KERNELS)}, got {impl!r}")
    module = ladder.rung(impl).module()
    kernel = getattr(module, KERNELS[impl])
    full = {name: full for full, name in _DTYPES.items()}[dtype]
    masked = causal or window is not None
    config = config or ladder.rung(impl).config(head_dim, full, max_seqlen_k, masked=masked)
    launch = asdict(config)
    specialized = ladder.rung(impl).requires.only_major  # its products are at least 32 wide
    width = max(32 if specialized else 16, triton.next_power_of_2(head_dim))
    launch.setdefault("BLOCK_M", 64)  # the rows of a math role
    launch.setdefault("num_warps", 4)
    strides = (4 * head_dim, head_dim, 1)
    constants = {
        "NUM_HEADS": 4, "GROUP": 1, "HEAD_DIM": head_dim, "ACTIVATION": activation,
        "CAUSAL": causal, "WINDOW": window, "BLOCK_D": width,
        "PAIRS": foldable(tuple(activation.split(",")), full),
        **{name: launch[name] for name in ("BLOCK_M", "BLOCK_N")},
        **{name.upper(): value for name, value in launch.items() if name.islower()},
        **{f"{name}_STRIDES": strides for name in ("Q", "K", "V", "OUT")},
    }  # fmt: skip
    types = {
        name: _type(name, dtype, launch, width)
        for name in kernel.arg_names
        if name not in constants
    }
    options = {"num_warps": launch["num_warps"], "num_stages": launch["num_stages"]}
    return build(kernel, types, constants, capability=capability, options=options)


def _type(name: str, dtype: str, launch: Mapping[str, int], width: int) -> str:
    """The type of a kernel argument, by the naming rules of the rungs."""
    if name.endswith("_desc"):
        rows = launch["BLOCK_M"] if name in ("q_desc", "out_desc") else launch["BLOCK_N"]
        return f"tensordesc<{dtype}[1, 1, 1, {rows}, {width}]>"
    if name in ("q_ptr", "k_ptr", "v_ptr", "out_ptr"):
        return f"*{dtype}"
    if name.endswith("_ptr"):
        return "*i32"
    return "fp32" if name.endswith("scale") else "i32"


_DTYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32",
}  # fmt: skip


def type_of(value: object) -> str:
    """Triton's type of an argument of a launch, for `build`: a TMA descriptor, tensor or number."""
    if isinstance(value, TensorDescriptor):
        shape = ", ".join(map(str, value.block_shape))
        return f"tensordesc<{_DTYPES[value.base.dtype]}[{shape}]>"
    if isinstance(value, torch.Tensor):
        return "*" + _DTYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def build(
    kernel: triton.JITFunction,
    types: Mapping[str, str],
    constants: Mapping[str, object],
    *,
    capability: int = 90,
    multiples_of_16: Container[str] = (),
    options: Mapping[str, object],
) -> CompiledKernel:
    """Compile `kernel` for sm_<capability>; nothing runs.

    `types` holds Triton's types of the arguments that a launch gives, e.g. "*bf16", "i32" or
    "tensordesc<bf16[64, 128]>"; pointers are taken to be aligned to 16 bytes. All other arguments
    are `constants`. `options` are num_warps and the like.
    """
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name not in types:
            signature[name], values[(index,)] = "constexpr", constants[name]
            continue
        signature[name] = types[name]
        if types[name].startswith("*") or name in multiples_of_16:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes),
        target=GPUTarget("cuda", capability, 32),
        options=dict(options),
    )


def build_launch(
    kernel: triton.JITFunction, arguments: Sequence[object], options: Mapping[str, object]
) -> CompiledKernel:
    """`build` for sm_90a of what `launch(kernel, grid, device, *arguments, **options)` launches."""
    given = dict(zip(kernel.arg_names, arguments, strict=False))
    types = {name: type_of(value) for name, value in given.items() if value is not None}
    own = {name: value for name, value in options.items() if name not in kernel.arg_names}
    return build(kernel, types, given | options, options=own)


_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9]+)((?:\.\w+)*)", re.M)


def read(compiled: CompiledKernel) -> Compiled:
    """What ptxas says about a compiled kernel, and the instructions in it."""
    capability, tools = compiled.metadata.target.arch, triton.knobs.nvidia
    assembler = tools.ptxas_blackwell if capability >= 100 else tools.ptxas
    target = f"sm_{capability}" + ("a" if capability >= 90 else "")
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(compiled.asm["ptx"])
        done = _run(assembler.path, f"-arch={target}", "-v", str(ptx), "-o", "/dev/null")
    report = done.stdout + done.stderr
    used = re.search(r"Used (\d+) registers", report)
    if used is None:
        raise RuntimeError(f"ptxas must report registers, got {report[:300]!r}")
    spilled = re.search(r"(\d+) bytes spill stores", report)
    found = _INSTRUCTION.findall(disassemble(compiled.asm["cubin"]))
    return Compiled(
        registers=int(used.group(1)),
        spill_bytes=int(spilled.group(1)) if spilled else 0,
        shared_bytes=compiled.metadata.shared,
        serialised="serialized" in report,
        instructions=Counter(name for name, _ in found),
        wide=Counter(name for name, modifiers in found if "128" in modifiers.split(".")),
    )


def disassemble(cubin: bytes) -> str:
    """The machine code of a compiled kernel's `asm["cubin"]` in words (SASS), by nvdisasm."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return _run(triton.knobs.nvidia.nvdisasm.path, "-c", str(path)).stdout


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True)


_PLACE = re.compile(r"^\s*(\.L_x_\d+):")
_WHOLE = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9]+)(.*)")


def shortest_loop(built: CompiledKernel, mnemonic: str, least: int) -> list[str]:
    """The mnemonics of the shortest loop with at least `least` instructions `mnemonic`.

    Raises ValueError if there is none.
    """
    found: list[str] = []
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    for line in disassemble(built.asm["cubin"]).splitlines():
        if label := _PLACE.match(line):
            labels[label[1]] = len(found)
        elif instruction := _WHOLE.match(line):
            if instruction[1] == "BRA" and (target := re.search(r"\.L_x_\d+", instruction[2])):
                jumps.append((len(found), target[0]))
            found.append(instruction[1])
    loops = [found[labels[to] : at + 1] for at, to in jumps if labels.get(to, len(found)) <= at]
    loops = [body for body in loops if body.count(mnemonic) >= least]
    if not loops:
        raise ValueError(f"built must have a loop with {least} {mnemonic}, got none")
    return min(loops, key=len)
