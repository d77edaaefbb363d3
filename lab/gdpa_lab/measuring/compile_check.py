"""Compiles a kernel for a GPU that is not present, and reads registers, spills and instructions.

ptxas and nvdisasm ship with Triton, so a CPU shows within seconds whether a kernel spills or has
its wgmma instructions serialised.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.cache import get_cache_manager
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import Launch, launches
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.mask import FIELDS, Mask
from gdpa_lab.measuring.private import compiling_for

SHARED_BYTES = {
    **dict.fromkeys((86, 89, 120), 101_376), 80: 166_912, **dict.fromkeys((90, 100, 103), 232_448),
    "gfx942": 65_536, "gfx950": 163_840,
}  # fmt: skip
"""Maximum shared memory of a program by compute capability, or LDS by AMD architecture."""
TENSOR_COLUMNS = 512
"""Columns of tensor memory, of 128 lanes and 4 bytes; sm_100 has them."""


@dataclass(frozen=True)
class Compiled:
    """Resources of a compiled kernel: registers per thread, bytes spilled, bytes of shared memory.

    For AMD, registers are VGPRs, accumulation registers included, and bytes spilled are scratch
    memory; `instructions` come from its assembly, and `wide` is empty.

    `serialised`: ptxas reported that it serialised wgmma instructions.
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
def compile_rung(impl: str | ModuleType, **options: object) -> Compiled:
    """`read(build_rung(impl, **options))`, compiled once."""
    return read(build_rung(impl, **options))


def build_rung(
    impl: str | ModuleType,
    *,
    capability: int = 90,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    activation: str = "gelu_tanh",
    config: object | None = None,
    max_seqlen_k: int = 1024,
    **fields: object,
) -> CompiledKernel:
    """Compile the last kernel that rung `impl` launches for sm_<capability>, on one sequence of
    `max_seqlen_k` tokens with 4 heads.

    impl: of the ladder "gdpa", or a module like one of its rungs. config: None for the rung's own
    choice. fields: more of the `Batch`, or of its `Mask`.
    Raises ValueError for a rung that launches nothing, and what `build` raises.
    """
    module = impl if isinstance(impl, ModuleType) else ladder.rung(impl).module()
    x = torch.zeros(max_seqlen_k, 4, head_dim, dtype=dtype)
    ends = torch.tensor([0, max_seqlen_k], dtype=torch.int32)
    options = {} if config is None else {"config": config}
    names, lengths = tuple(activation.split(",")), (ends, ends, max_seqlen_k, max_seqlen_k)
    mask = Mask(**{name: fields.pop(name) for name in FIELDS & fields.keys()})
    batch = Batch(x, x, x, *lengths, names, head_dim**-0.5, mask=mask, **fields)
    with launches(run=False) as seen:
        module.forward(batch, **options)
    if not seen:
        raise ValueError(f"impl must be a rung that launches a kernel, got {impl!r}")
    return build_launch(seen[-1], capability=capability)


_DTYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32",
    torch.int64: "i64", torch.uint8: "u8",
}  # fmt: skip
# Writes to global memory: in PTX a store, an atomic operation, or TMA; in AMD's assembly.
_WRITES = re.compile(
    r"\b(st|red|atom)\.\S*global|\bcp\.(reduce\.)?async\.bulk\S*\.global\.shared"
    r"|\b(global|buffer|flat)_(store|atomic)"
)


def type_of(value: object) -> str:
    """Return Triton's type of a launch argument: a TMA descriptor, a tensor or a number."""
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
    capability: int | str = 90,
    multiples_of_16: Container[str] = (),
    options: Mapping[str, object],
) -> CompiledKernel:
    """Compile `kernel` for sm_<capability>, or for an architecture of AMD; nothing runs.

    `types` holds Triton's types of the launch arguments, e.g. "*bf16", "i32" or
    "tensordesc<bf16[64, 128]>"; pointers count as aligned to 16 bytes. All other arguments are
    `constants`. `options` are num_warps and the like. Raises OutOfResources, as a launch would, for
    a kernel that needs too much memory, and ValueError for one that writes nothing.
    """
    if capability not in SHARED_BYTES:
        raise ValueError(f"capability must be one of {(*SHARED_BYTES,)}, got {capability}")
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name not in types:
            signature[name], values[(index,)] = "constexpr", constants[name]
            continue
        signature[name] = types[name]
        if types[name].startswith("*") or name in multiples_of_16:
            attributes[(index,)] = [["tt.divisibility", 16]]
    is_amd = isinstance(capability, str)
    target = GPUTarget("hip", capability, 64) if is_amd else GPUTarget("cuda", capability, 32)
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    with (
        triton.knobs.nvidia.scope(),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        compiling_for(target) if is_amd else contextlib.nullcontext(),
    ):
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=target, options=dict(options))
    if _REGISTERS.search(printed.getvalue()):  # ptxas does not run for cached kernels
        _cached(compiled, _REPORT, printed.getvalue)
    columns = 0 if is_amd else compiled.metadata.tmem_size or 0
    if compiled.metadata.shared > SHARED_BYTES[capability]:
        raise OutOfResources(compiled.metadata.shared, SHARED_BYTES[capability], "shared memory")
    if columns > TENSOR_COLUMNS:
        raise OutOfResources(columns, TENSOR_COLUMNS, "tensor memory")
    if not _WRITES.search(compiled.asm["amdgcn" if is_amd else "ptx"]):
        raise ValueError(f"kernel must write to memory, got {kernel.__name__}, which does not")
    return compiled


def build_launch(launch: Launch, *, capability: int | str = 90) -> CompiledKernel:
    """Compile the kernel of a launch with `build`; numbers are known by their types alone."""
    arguments = launch.arguments.items()
    types = {name: type_of(value) for name, value in arguments if value is not None}
    constants = launch.arguments | launch.constants
    return build(launch.kernel, types, constants, capability=capability, options=launch.options)


def read(compiled: CompiledKernel) -> Compiled:
    """Read the report of ptxas, or AMD's assembly, and the instructions of a compiled kernel."""
    if "amdgcn" in compiled.asm:
        return _read_amd(compiled)
    report = _report(compiled)
    used = _REGISTERS.search(report)
    if used is None:
        raise RuntimeError(f"ptxas must report registers, got {report[:300]!r}")
    spilled = re.search(r"(\d+) bytes spill stores", report)
    opcodes = [_opcode(statement) for statement in sass(compiled)[0]]
    return Compiled(
        registers=int(used.group(1)),
        spill_bytes=int(spilled.group(1)) if spilled else 0,
        shared_bytes=compiled.metadata.shared,
        serialised="serialized" in report,
        instructions=Counter(name for name, *_ in opcodes),
        wide=Counter(name for name, *modifiers in opcodes if "128" in modifiers),
    )


def _read_amd(compiled: CompiledKernel) -> Compiled:
    text = compiled.asm["amdgcn"]

    def metadata(name: str) -> int:
        return int(re.search(rf"^\s+\.{name}:\s+(\d+)", text, re.M)[1])

    code = text[: text.index(".end_amdgpu_metadata")]
    return Compiled(
        registers=metadata("vgpr_count"),
        spill_bytes=metadata("private_segment_fixed_size"),
        shared_bytes=compiled.metadata.shared,
        serialised=False,
        instructions=Counter(re.findall(r"^\t([a-z]\w+)", code, re.M)),
        wide=Counter(),
    )


# Output of ptxas and nvdisasm, stored beside a kernel in Triton's cache under these names.
_REPORT, _SASS = "ptxas.txt", "sass.txt"
_REGISTERS = re.compile(r"Used (\d+) registers")


def _cached(compiled: CompiledKernel, name: str, produce: Callable[[], str]) -> str:
    """Read the text `name` beside a kernel in Triton's cache, or store what `produce` returns."""
    cache = get_cache_manager(compiled.hash)
    path = cache.get_file(name)
    if path is not None:
        return Path(path).read_text()
    text = produce()
    cache.put(text, name, binary=False)
    return text


def _report(compiled: CompiledKernel) -> str:
    """Return the report of ptxas, as `build` cached it or by running ptxas again."""
    capability, tools = compiled.metadata.target.arch, triton.knobs.nvidia
    assembler = tools.ptxas_blackwell if capability >= 100 else tools.ptxas
    target = f"sm_{capability}" + ("a" if capability >= 90 else "")

    def run_ptxas() -> str:
        # --regAllocOptLevel: as Triton's own call has it.
        options = (f"-arch={target}", "-v", "--regAllocOptLevel=2")
        with tempfile.TemporaryDirectory() as folder:
            ptx = Path(folder) / "kernel.ptx"
            ptx.write_text(compiled.asm["ptx"])
            done = _run(assembler.path, *options, str(ptx), "-o", "/dev/null")
        return done.stdout + done.stderr

    return _cached(compiled, _REPORT, run_ptxas)


def disassemble(compiled: CompiledKernel) -> str:
    """Disassemble a compiled kernel (SASS) with nvdisasm."""

    def run_nvdisasm() -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.cubin"
            path.write_bytes(compiled.asm["cubin"])
            return _run(triton.knobs.nvidia.nvdisasm.path, "-c", str(path)).stdout

    return _cached(compiled, _SASS, run_nvdisasm)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True)


_LABEL = re.compile(r"\s*(\.L\w+):")
_STATEMENT = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?);")
_BRANCH = re.compile(r"\bBRA\b.*?(\.L\w+)")


def sass(built: CompiledKernel) -> tuple[list[str], list[range]]:
    """Return the instructions of a compiled kernel and its loops, shortest first: each is the range
    of instructions from a label to a branch back to it."""
    code: list[str] = []
    labels: dict[str, int] = {}
    loops = []
    for line in disassemble(built).splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif statement := _STATEMENT.search(line):
            code.append(statement[1])
            back = _BRANCH.search(statement[1])
            if back and back[1] in labels:
                loops.append(range(labels[back[1]], len(code)))
    return code, sorted(loops, key=len)


def _opcode(statement: str) -> list[str]:
    """Split an instruction into mnemonic and modifiers, without its predicate; UCGABAR_ARV and
    UCGABAR_WAIT share one name."""
    name, *modifiers = re.sub(r"^@\S+\s+", "", statement).split()[0].split(".")
    return [name.partition("_")[0], *modifiers]


def shortest_loop(built: CompiledKernel, mnemonic: str, least: int) -> list[str]:
    """Return the mnemonics of the shortest loop with at least `least` instructions `mnemonic`.

    Raises ValueError if there is none.
    """
    code, loops = sass(built)
    names = [_opcode(statement)[0] for statement in code]
    for loop in loops:
        body = names[loop.start : loop.stop]
        if body.count(mnemonic) >= least:
            return body
    raise ValueError(f"built must have a loop with {least} {mnemonic}, got none")
