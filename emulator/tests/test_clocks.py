"""The clocks that find races: against a search of the graph, and through atomics."""

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.tests.checking import everywhere, found, place
from tritonemu import Race
from tritonemu.clocks import Clock, Shadow
from tritonemu.orders import Order
from tritonemu.scheduler import Role, Scheduler


class Trace:
    """A random execution, kept twice: in clocks, and as a graph whose paths are searched.

    The nodes of the graph are the steps of roles, and the asynchronous operations. `before[n]` are
    the nodes from which a path leads to n, as bits.
    """

    BARRIERS = 2

    def __init__(self):
        self.scheduler = Scheduler(Order(), {"roles": 0, "operations": 0})
        self.cta = SimpleNamespace(number=0, launch=SimpleNamespace(threads=None))
        self.before: list[int] = []
        self.roles, self.last = [], {}
        self.barriers = [(Clock(), []) for _ in range(self.BARRIERS)]
        self.operations, self.queues, self.nodes = [], {}, {}
        self.accesses = []
        self.shadow = Shadow()
        self._add_role(self._node())

    def _node(self, *after: int) -> int:
        self.before.append(0)
        for node in after:
            self.before[-1] |= self.before[node] | 1 << node
        return len(self.before) - 1

    def _add_role(self, node: int) -> Role:
        role = Role(self.scheduler, self.cta, f"role {len(self.last)}", 4, lambda: None)
        self.roles.append(role)
        self.last[role], self.queues[role] = node, []
        return role

    def _step(self, role: Role, *after: int) -> int:
        self.last[role] = self._node(self.last[role], *after)
        return self.last[role]

    def fork(self, parent: Role) -> None:
        child = self._add_role(self._step(parent))
        child.clock.join(parent.release())

    def join(self, role: Role, child: Role) -> None:
        self.roles.remove(child)
        role.clock.join(child.release())
        self._step(role, self.last[child])

    def arrive(self, role: Role, number: int) -> None:
        clock, nodes = self.barriers[number]
        clock.join(role.release())
        nodes.append(self._step(role))

    def wait(self, role: Role, number: int) -> None:
        clock, nodes = self.barriers[number]
        role.clock.join(clock)
        self._step(role, *nodes)

    def access(self, role: Role, write: bool, mask: int) -> bool:
        access = role.access(write, mask, ("trace", len(self.accesses)))
        return self._judge(access, role.clock, self._step(role))

    def issue(self, role: Role, write: bool, mask: int, ordered: bool) -> bool:
        """An asynchronous access; `ordered`: after the role's earlier ordered ones."""
        self.scheduler.role = role
        operation = self.scheduler.issue("copy", role.dots_issued if ordered else 0)
        after = [self.nodes[o.bit] for o in self.operations if o.bit & role.dots_issued & -ordered]
        node = self.nodes[operation.bit] = self._node(self._step(role), *after)
        if ordered:
            role.dots_issued |= operation.bit
        else:
            self.queues[role].append(operation)
        self.operations.append(operation)
        operation.location = ("trace", len(self.accesses))
        return self._judge(operation.access(write, mask), operation.clock, node)

    def complete(self, operation, number: int) -> None:
        clock, nodes = self.barriers[number]
        clock.join(operation.clock)
        nodes.append(self.nodes[operation.bit])

    def drain(self, role: Role) -> None:
        """The role waits for the oldest of its unordered operations."""
        operation = self.queues[role].pop(0)
        role.clock.operations |= operation.bit
        self._step(role, self.nodes[operation.bit])

    def _judge(self, access, clock: Clock, node: int) -> bool:
        """Both verdicts must agree; whether there is a race."""
        racing = {
            number
            for number, (mask, write, other) in enumerate(self.accesses)
            if mask & access.mask and (write or access.write) and not self.before[node] >> other & 1
        }
        result = self.shadow.record(access, clock)
        self.accesses.append((access.mask, access.write, node))
        assert bool(result) == bool(racing)
        assert {each.location[1] for each in result} <= racing
        return bool(racing)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ("fork", "join", "complete", "drain", "issue", "ordered")
            + ("arrive", "wait", "read", "write") * 2
        ),
        st.integers(0, 11),
        st.integers(1, 15),
        st.booleans(),
    ),
    min_size=10,
    max_size=40,
)


@settings(max_examples=8 * settings.default.max_examples, deadline=None)
@given(STEPS)
def test_clocks_find_exactly_the_accesses_without_a_path(steps):
    trace = Trace()
    for _ in range(2):
        trace.fork(trace.roles[0])
    for kind, number, mask, write in steps:
        role = trace.roles[number % len(trace.roles)]
        barrier = mask % trace.BARRIERS
        if kind == "fork" and len(trace.last) < 5:
            trace.fork(role)
        elif kind == "join" and role is not trace.roles[0]:
            trace.join(trace.roles[0], role)
        elif kind == "arrive":
            trace.arrive(role, barrier)
        elif kind == "wait":
            trace.wait(role, barrier)
        elif kind in ("read", "write"):
            trace.access(role, kind == "write", mask)
        elif kind in ("issue", "ordered"):
            trace.issue(role, write, mask, kind == "ordered")
        elif kind == "complete" and trace.operations:
            trace.complete(trace.operations[number % len(trace.operations)], barrier)
        elif kind == "drain" and trace.queues[role]:
            trace.drain(role)


def test_a_write_stands_for_what_came_before_it_byte_by_byte():
    trace = Trace()
    (main,) = trace.roles
    trace.fork(main)
    other = trace.roles[1]
    assert not trace.access(main, True, 0b1111)
    assert not trace.access(main, True, 0b0110)
    masks = {access.location[1]: access.mask for access in trace.shadow.accesses}
    assert masks == {0: 0b1001, 1: 0b0110}
    assert trace.shadow.written == 0b1111
    assert not trace.access(other, False, 0b10000)
    assert trace.access(other, False, 0b0001)


# Atomics.


@triton.jit
def last_kernel(part_ptr, count_ptr, n, out_ptr, FAULT: tl.constexpr, SEM: tl.constexpr):
    """Every program leaves a part; the one that counts last adds them up."""
    pid = tl.program_id(0)
    if FAULT == "early":
        old = tl.atomic_add(count_ptr, 1)
        tl.store(part_ptr + pid, pid + 1)
    else:
        tl.store(part_ptr + pid, pid + 1)
        old = tl.atomic_add(count_ptr + (pid if FAULT == "apart" else 0), 1, sem=SEM)
    if old == n - 1 or (FAULT == "apart" and pid == n - 1):
        total = 0
        for i in range(n):
            total += tl.load(part_ptr + i)  # load
        tl.store(out_ptr, total)


def counters():
    part, count, out = (torch.zeros(n, dtype=torch.int32) for n in (4, 4, 1))
    return part, count, 4, out


@pytest.mark.parametrize("cluster", (1, 4))
def test_atomics_order_what_surrounds_them(cluster):
    options = {"ctas_per_cga": (cluster, 1, 1)}
    everywhere(last_kernel, (4,), counters, 10, FAULT="none", SEM="acq_rel", **options)
    for fault in ("early", "apart"):
        for error in found(Race, last_kernel, (4,), counters, FAULT=fault, SEM=None, **options):
            assert error.buffer == "part_ptr" and error.programs[0] != error.programs[1]
            lines = {error.line, error.other[1]}
            assert place(last_kernel, "# load")[1] in lines


@pytest.mark.parametrize("semantics", ("relaxed", "acquire", "release"))
def test_only_acquire_and_release_order(semantics):
    keywords = {"FAULT": "none", "SEM": semantics, "line": "# load"}
    for error in found(Race, last_kernel, (4,), counters, **keywords):
        assert error.buffer == "part_ptr"
