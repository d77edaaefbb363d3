"""MMAs: wgmma on sm_90, tcgen05 on sm_100."""

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl

from ..barriers import MBarrier
from ..buffers import LANES, Buffer
from ..engines import MMA_FLOPS, SHARED_BYTES
from ..errors import InvalidKernel, Unsupported, current_location
from ..instructions import round_fraction
from ..language import scaled
from ..launch import current
from ..rewrite import static_int
from ..scheduler import Operation, Role
from ..tile import Tile, to_tile
from .copies import drain
from .sync import in_cta, remote, single
from .table import blackwell_only, holds, op, point


class Pending(Tile):
    """The accumulator of a wgmma in flight: its elements must not be read."""

    __slots__ = ("operation", "result")

    def __init__(self, result: torch.Tensor, dtype: tl.dtype, operation: Operation):
        self.result, self.dtype, self.base, self.operation = result, dtype, None, operation

    @property
    def data(self) -> torch.Tensor:
        if not self.operation.role.clock.operations & self.operation.bit:
            file, line = self.operation.location
            raise InvalidKernel(
                f"the result of the async_dot at {file}:{line} is used before async_dot_wait"
            )
        return self.result

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.result.shape)


def _product(a: torch.Tensor, b: torch.Tensor, dtype: tl.dtype) -> torch.Tensor:
    """Multiply as the tensor core does: exact products, sums in fp32."""
    if dtype.name == "fp32":
        a, b = round_fraction(a, 10), round_fraction(b, 10)
    return a.to(torch.float32) @ b.to(torch.float32)


def _check_dot(a: Any, b: Buffer, columns: int) -> None:
    if a.dtype.name != b.dtype.name and not (a.dtype.is_fp8() and b.dtype.is_fp8()):
        raise InvalidKernel(f"operands of async_dot need one dtype, got {a.dtype} and {b.dtype}")
    if a.dtype.name not in ("bf16", "fp16", "fp32") and not a.dtype.is_fp8():
        raise Unsupported(f"async_dot of {a.dtype}")
    m, k = a.shape
    if b.shape[0] != k or m < 64 or k < 16 or columns < 32:
        shapes = f"{list(a.shape)} @ {list(b.shape)}"
        raise InvalidKernel(f"async_dot needs [M>=64, K>=16] @ [K, N>=32], got {shapes}")


def _issue_dot(role: Role) -> Operation:
    """Issue an MMA, which follows all earlier ones of the role."""
    operation = role.scheduler.issue("async_dot", role.dots_issued)
    role.dots_issued |= operation.bit
    return operation


def _mma(
    role: Role, operation: Operation, flops: int, num_bytes: int, name: str, ctas: list[Any]
) -> None:
    """Occupy the tensor cores of these CTAs, as long as each takes to multiply and to read."""
    cycles = flops / MMA_FLOPS[current().arch]
    start = max(role.time, *(cta.engines["tensor core"].free for cta in ctas))
    end = start + cycles
    for cta in ctas:
        end = max(end, cta.engines["shared memory"].spread(start, cycles, num_bytes / SHARED_BYTES))
    operation.end = end
    for cta in ctas:
        cta.engines["tensor core"].queue(start, cycles)
        cta.engines["tensor core"].free = end
    role.scheduler.trace("mma", name, "tensor core", start, end, cta=role.cta.number, target=name)
    current().report.dots += 1


@op
def async_dot(
    A: Any, B: Buffer, acc: Any = None, use_acc: Any = None, pred: Any = None,
    mBarriers: Any = (), two_ctas: bool = False, force_async: bool = False,
    input_precision: Any = None, out_dtype: tl.dtype = tl.float32,
) -> Any:  # fmt: skip
    """Issue wgmma on sm_90, tcgen05.mma on sm_100."""
    role, B = point(), B.single()
    A = A.single() if isinstance(A, Buffer) else A
    if B.storage.tensor:
        raise InvalidKernel("B of async_dot must be in shared memory")
    if current().arch == "sm_100":
        _tensor_memory_dot(role, A, B, acc, use_acc, pred, mBarriers, two_ctas, force_async)
        return None
    return _register_dot(role, A, B, acc)


def _register_dot(role: Role, A: Any, B: Buffer, acc: Any) -> Pending:
    _check_dot(A, B, B.shape[1])
    operation = _issue_dot(role)
    a = A.read(operation) if isinstance(A, Buffer) else A.data
    result = _product(a, B.read(operation), B.dtype)
    if acc is not None:
        previous = acc.result if isinstance(acc, Pending) else to_tile(acc).data
        if previous.shape != result.shape:
            raise InvalidKernel(f"acc of async_dot must be {list(result.shape)}, got {acc!r}")
        result = result + previous
    (m, k), n = A.shape, B.shape[1]
    left = A.name if isinstance(A, Buffer) else "registers"
    # Each warp group reads all of B for its 64 rows.
    num_bytes = (A.num_bytes if isinstance(A, Buffer) else 0) + m // 64 * B.num_bytes
    _mma(role, operation, 2 * m * n * k, num_bytes, f"{left} @ {B.name}", [role.cta])
    role.dots.append(operation)
    return Pending(result, tl.float32, operation)


@op
def async_dot_wait(pendings: int, inp: Any) -> Any:
    """Wait until at most `pendings` wgmmas of the role are in flight."""
    role = point()
    drain(role, role.dots, static_int(pendings), "wait wgmma")
    if isinstance(inp, Pending) and role.clock.operations & inp.operation.bit:
        return Tile(inp.result, inp.dtype)
    return inp


def _tensor_memory_dot(
    role: Role, A: Any, B: Buffer, acc: Buffer, use_acc: Any, pred: Any, barriers: Any,
    two_ctas: bool, force_async: bool,
) -> None:  # fmt: skip
    if not isinstance(A, Buffer) or not isinstance(acc, Buffer) or not acc.storage.tensor:
        raise InvalidKernel("async_dot on sm_100 takes A in memory and acc in tensor memory")
    rank, cluster = role.cta.rank, role.cta.cluster
    if two_ctas and cluster.waits is None:
        cluster.waits = True
    if (two_ctas and rank % 2) or not holds(pred):
        return
    acc = acc.single()
    ranks = (rank, rank + 1) if two_ctas else (rank,)
    _check_dot(A, B, B.shape[1] * len(ranks))
    (m, k), n = A.shape, B.shape[1] * len(ranks)
    if acc.shape != (m, n):
        raise InvalidKernel(f"acc of async_dot must be {[m, n]}, got {list(acc.shape)}")
    accumulate = use_acc is None or bool(use_acc)
    operation = _issue_dot(role)
    b = torch.cat([remote(B, r).read(operation) for r in ranks], 1)
    for r in ranks:
        left, target = remote(A, r), remote(acc, r)
        target.settle(two_ctas)
        if left.storage.tensor and target.storage.beside is None:
            target.storage.beside = left.storage
            target.storage.cta.reserve_columns(target.storage)
        result = _product(left.read(operation), b, B.dtype)
        if accumulate:
            result = result + target.read(operation)
        target.write(result, operation)
    # 64 rows of one CTA take the time of 128.
    flops = 2 * (m if two_ctas else max(m, LANES)) * n * k
    num_bytes = B.num_bytes + (0 if A.storage.tensor else A.num_bytes)
    ctas = [role.cta.peer(r) for r in ranks]
    _mma(role, operation, flops, num_bytes, f"{A.name} @ {B.name}", ctas)
    role.mma.append(operation)
    for barrier in barriers:
        commit(role, [in_cta(single(barrier), r) for r in ranks])
    if not force_async and not barriers:
        role.clock.join(operation.clock)
        role.time = max(role.time, operation.end)


@op
def scaled_mma(
    A: Buffer, B: Buffer, acc: Buffer, A_scale: Buffer, B_scale: Buffer, A_format: str,
    B_format: str, use_acc: Any = None, two_ctas: bool = False,
) -> None:  # fmt: skip
    """Issue tcgen05.mma of microscaling formats, asynchronously: scales [M, groups] and [N,
    groups].

    two_ctas: of the pair, of which each has rows of A, columns of B, and all factors of B.
    """
    blackwell_only("tcgen05_mma_scaled")
    role, A, B, acc = point(), A.single(), B.single(), acc.single()
    ranks = (role.cta.rank, role.cta.rank + 1) if two_ctas else (role.cta.rank,)
    M, N = A.shape[0], B.shape[1] * len(ranks)
    if acc.shape != (M, N) or not acc.storage.tensor:
        raise InvalidKernel(f"acc must be {[M, N]} in tensor memory, got {list(acc.shape)}")
    operation = _issue_dot(role)
    columns = torch.cat([remote(B, rank).read(operation) for rank in ranks], 1).mT

    def factors(scale: Buffer, rank: int) -> Tile:
        one = scale.single()
        return Tile(remote(one, rank).read(operation), one.dtype)

    for rank in ranks:
        rows, target = remote(A, rank).read(operation), remote(acc, rank)
        a = scaled(Tile(rows, A.dtype), factors(A_scale, rank), A_format)
        b = scaled(Tile(columns, B.dtype), factors(B_scale, rank), B_format)
        if a.shape[1] != b.shape[1]:
            raise InvalidKernel(f"operands of {a.shape[1]} and {b.shape[1]} elements along K")
        result = a @ b.mT
        if use_acc is None or bool(use_acc):
            result = result + target.read(operation)
        target.write(result, operation)
    flops, num_bytes = 2 * M * N * a.shape[1], A.num_bytes + B.num_bytes
    ctas = [role.cta.peer(rank) for rank in ranks]
    _mma(role, operation, flops, num_bytes, f"{A.name} @ {B.name}", ctas)
    role.mma.append(operation)


def commit(role: Role, targets: Sequence[MBarrier]) -> None:
    """Arrive on these barriers when all earlier tcgen05 operations of the role are done."""
    location, end = current_location(), role.time
    clock = role.release_by_one("commit", location)
    for operation in role.mma:
        clock.join(operation.clock)
        end = max(end, operation.end)
    # Later commits wait for the last one, which follows all others.
    role.mma = role.mma[-1:]
    for target in targets:
        role.scheduler.synchronises("arrival", role, target, location)
        role.scheduler.at(
            end,
            lambda target=target: target.arrive(1, clock, end, "tensor core", location),
            ("tensor core", role.cta),
        )


@op
def tmem_copy(src: Buffer, dst: Buffer, scales: bool = False, two_ctas: bool = False) -> None:
    """Copy from shared to tensor memory by tcgen05.cp, in order with the MMAs of the role.

    two_ctas: in both CTAs of the pair.
    """
    blackwell_only("tmem_copy")
    role, src, dst = point(), src.single(), dst.single()
    if src.storage.tensor or not dst.storage.tensor:
        raise InvalidKernel("tmem_copy goes from shared to tensor memory")
    if dst.dtype.primitive_bitwidth == 8 and not scales:
        raise Unsupported("tmem_copy of scales")
    if src.dtype.name != dst.dtype.name or src.shape != dst.shape:
        raise InvalidKernel(
            f"tmem_copy into {dst.name} takes {dst.dtype}{list(dst.shape)}, "
            f"got {src.dtype}{list(src.shape)}"
        )
    operation = _issue_dot(role)
    port = role.cta.engines["shared memory"]
    operation.end = port.fit(role.time, src.num_bytes / SHARED_BYTES)
    fields = {"cta": role.cta.number, "target": dst.name, "bytes": src.num_bytes}
    role.scheduler.trace("copy", dst.name, "tensor core", role.time, operation.end, **fields)
    rank = role.cta.rank
    for each in (rank, rank + 1) if two_ctas else (rank,):
        remote(dst, each).write(remote(src, each).read(operation), operation)
    role.mma.append(operation)


@op
def tcgen05_commit(mBarrier: Any, two_ctas: bool = False) -> None:
    blackwell_only("tcgen05_commit")
    role, rank = point(), current().role.cta.rank
    if two_ctas and rank % 2:
        return
    ranks = (rank, rank + 1) if two_ctas else (rank,)
    commit(role, [in_cta(single(mBarrier), each) for each in ranks])
