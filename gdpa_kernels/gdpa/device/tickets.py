"""Tickets, a dynamic tile scheduler: whichever program is free takes the next entry of a list.

Program p of P begins with entry p; the t-th ticket, counted over all programs, is for entry P + t.
A producer takes it from a counter in global memory once all loads of its entry are issued, and
hands it to its consumers through shared memory. Each launch has a counter of its own, which starts
at zero: launches that share a list (`ticket_list`), on two streams or in two graphs, do not meet.
"""

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.device.groups import Ring
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.device.work_list import count_items

SLOTS = tl.constexpr(2)  # tickets on their way to the consumers


@triton.aggregate
class Tickets:
    """The counter of a launch, and the ring that brings an entry's number to the consumers."""

    counter_ptr: tl.tensor
    ring: Ring


@triton.jit
def tickets_of(counter_ptr, CONSUMERS: tl.constexpr):
    """The tickets of a program whose consumers are CONSUMERS warp groups."""
    full = tlx.alloc_warp_barrier(SLOTS, 4)
    empty = tlx.alloc_warp_barrier(SLOTS, 4, CONSUMERS)
    return Tickets(counter_ptr, Ring(tlx.local_alloc((1,), tl.int32, SLOTS), full, empty, SLOTS))


@triton.jit
def take(tickets, tile):
    """Draw the program's next entry, and hand it to its consumers. tile: how many entries the
    program has done before."""
    following = tl.num_programs(0) + tl.atomic_add(tickets.counter_ptr, 1, sem="relaxed")
    stage = tickets.ring.acquire(tile)
    tlx.local_store(tickets.ring.buffer[stage], tl.full([1], 0, tl.int32) + following)
    tlx.barrier_arrive(tickets.ring.full[stage])
    return following


@triton.jit
def follow(tickets, tile):
    """The entry that the producer drew after this program's tile-th."""
    stage = tickets.ring.wait(tile)
    following = tl.sum(tlx.local_load(tickets.ring.buffer[stage]))
    tlx.barrier_arrive(tickets.ring.empty[stage])
    return following


@triton.jit
def each_tile(role: tl.constexpr, tickets, list_ptr, TAKES: tl.constexpr, operands):
    """Call role(item, tile, count, *operands) for each entry `item` of a program, its tile-th. It
    returns `count`, the steps so far, with those of the entry. TAKES: it is the producer. tickets
    None: a program takes every num_programs-th entry."""
    num_items = count_items(list_ptr)
    count = 0
    if tickets is None:
        for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=0):
            count = role(item, item // tl.num_programs(0), count, *operands)
    else:
        tile, item = 0, tl.program_id(0)
        while item < num_items:
            count = role(item, tile, count, *operands)
            item = take(tickets, tile) if TAKES else follow(tickets, tile)
            tile += 1


def new_counter(batch: Batch) -> torch.Tensor:
    """The counter of one launch."""
    return torch.zeros(1, dtype=torch.int32, device=batch.device)
