"""Replaces `triton.language.extra.tlx` in a lowered kernel.

Asynchronous operations move their data when they are issued and complete later: what a kernel may
rely on is decided by the clocks, not by the moment of the copy, so a kernel that looks too early is
found although it would have got the right bytes.

- A TMA copy completes on its mbarrier. A TMA store, and a wgmma, complete when the issuing role
  waits for the group; `async_descriptor_store_wait` waits for the reads of shared memory only
  (`cp.async.bulk.wait_group.read`); that global memory has been written is not known before the
  kernel ends. A multicast is one operation per target.
- The result of a wgmma is a `Pending` tile; using it before `async_dot_wait` is an error. Each
  `async_dot` is a group of its own, and groups complete in order.
- tcgen05 operations of a CTA execute in order. A commit, or a barrier in `mBarriers`, arrives when
  all earlier ones are complete. Without a barrier, and without `force_async`, `async_dot` waits.
- In a pair of CTAs the even one issues: `acc[cta] += A[cta] @ [B[even] | B[odd]]`, and commits
  arrive in both CTAs.
- A fence lies between a store to shared memory and a copy that reads it, `async_store` or
  `async_remote_shmem_copy`. Before TMA stores and MMAs fbtriton 3.7.4 inserts it.
- The memory and the barriers of a CTA are gone at its end. Only CTAs with MMAs of pairs wait for
  each other there, as the compiler adds no other synchronisation.
"""

from triton.language.extra import tlx
from triton.language.extra.tlx import warp_spec

from ..language import Namespace
from ..machine import mma  # it and what it imports fill the table
from ..machine.table import OPERATIONS
from . import allocations, control

__all__ = ["MODULES", "TLX", "allocations", "control", "mma"]

TLX = Namespace("tlx", OPERATIONS, tlx, tlx.warp_ops, warp_spec)

# Triton's modules -> what a kernel sees in their place. utlx_plugin: TLX as a plugin of Triton 3.8.
MODULES = {
    f"{package}{part}": TLX
    for package in ("triton.language.extra.tlx", "utlx_plugin")
    for part in (
        *("", ".async_task_utils", ".barrier", ".dynamic_launch", ".mem_ops", ".mma_ops"),
        *(".types", ".utility", ".warp_ops", ".warp_spec"),
    )
}
