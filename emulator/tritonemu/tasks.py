"""`with tlx.async_tasks()`: the tasks of a region become roles that run concurrently."""

import warnings
from collections.abc import Callable
from typing import Any

from .aggregates import Aggregate
from .errors import InvalidKernel, ResourceLimit, current_location
from .launch import REGISTERS, current
from .scheduler import Role
from .tile import Tile

MAX_WARPS = 32
# Registers that the compiler leaves at least to a thread of the default task.
MIN_REGISTERS = 24
# Python's own record of the warnings that were shown: each is, once.
_WARNED: dict[Any, Any] = {}


class Region:
    """The tasks of one `async_tasks`: added one by one, then run together to the end.

    The task "default" runs on the kernel's own warps and registers; replicas beyond its first, and
    the other tasks, have their own.
    """

    def __init__(self, exclusive: bool = False, no_ending_cluster_sync: bool = False) -> None:
        if no_ending_cluster_sync:
            current().role.cta.cluster.waits = False
        self.tasks: list[tuple[Callable, dict[str, Any], dict[str, Any]]] = []

    def add(self, function: Callable, names: dict[str, Any], *args: Any, **options: Any) -> None:
        """Add a task: `function` will be called with those of `names` that it takes."""
        parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
        values = {name: names[name] for name in parameters if name in names}
        default = bool(args) and args[0] == "default"
        if args and not default:
            raise InvalidKernel(f'async_task takes "default" or num_warps=, got {args[0]!r}')
        if not default and not options.get("num_warps"):
            raise InvalidKernel("async_task needs num_warps, or to be the default")
        registers = options.get("registers", options.get("num_regs"))
        if default and registers is not None:
            raise InvalidKernel(
                "the default task takes no registers; it gets what the others leave"
            )
        if registers is not None and registers % 8:
            raise InvalidKernel(f"registers of a task must be a multiple of 8, got {registers}")
        self.tasks.append((function, values, {**options, "default": default, "regs": registers}))

    def run(self) -> None:
        """Fork the roles, wait for all of them, and learn what they did."""
        launch = current()
        main, scheduler = launch.role, launch.scheduler
        if sum(options["default"] for _, _, options in self.tasks) != 1:
            raise InvalidKernel("async_tasks needs exactly one default task")
        main.charge()
        running: list[Role] = []
        starts = [lane.release() for lane in main.lanes]

        def role_of(name: str, warps: int, replica: int, function: Callable, values: dict) -> Role:
            def body() -> None:
                function(**values)
                role.charge()
                running.remove(role)
                scheduler.order.note(("tasks", main.cta.number), "arrive", (0, False))
                for parent, lane in zip(main.lanes, role.lanes, strict=True):
                    lane.retire()
                    parent.clock.join(lane.release())
                    if launch.partition_fences:
                        parent.fence()
                    parent.time = max(parent.time, lane.time)
                if not running:
                    scheduler.order.note(("tasks", main.cta.number), "wake", 1, main)
                    scheduler.wake(main, main.time)

            role = Role(scheduler, main.cta, name, warps, body)
            for parent in main.lanes[1:]:
                Role(scheduler, parent.cta, name, warps, body, leader=role)
            for start, lane in zip(starts, role.lanes, strict=True):
                lane.clock.join(start)
                if launch.partition_fences:
                    lane.fence()
                lane.time, lane.replica, lane.task = main.time, replica, True
            running.append(role)
            scheduler.start(role)
            return role

        requested: list[tuple[int, int]] = []
        unnamed = 0
        for function, values, options in self.tasks:
            name = function.__name__.strip("_")
            if name == "task":
                name = "default" if options["default"] else f"task{unnamed}"
                unnamed += not options["default"]
            warps = launch.num_warps if options["default"] else options["num_warps"]
            replicas = options.get("replicate", 1)
            tiles = {key: tile for key in values if (tile := _tile_in(key, values[key]))}
            for replica in range(replicas):
                label = f"{name}[{replica}]" if replicas > 1 else name
                launch.report.warps[label] = warps
                role = role_of(label, warps, replica, function, values)
                if options["default"] and replica == 0:
                    continue
                role.tiles = tiles
                if warps > 1:
                    main.cta.compilers_barriers[2 + len(requested)] = f"the warps of {label}"
                requested.append((warps, options["regs"] or 0))
        _check_budget(launch.num_warps, requested)
        scheduler.block(None)


def _tile_in(name: str, value: Any) -> str:
    """Return the first tile in a value, for messages; "" if there is none."""
    parts = {}
    if isinstance(value, Aggregate):
        parts = {f"{name}.{field}": getattr(value, field) for field in value.fields}
    elif isinstance(value, tuple):
        parts = {f"{name}[{i}]": item for i, item in enumerate(value)}
    elif isinstance(value, Tile) and value.shape:
        return f"{name}, {value!r}"
    return next(filter(None, (_tile_in(*part) for part in parts.items())), "")


def _check_budget(default: int, requested: list[tuple[int, int]]) -> None:
    """Refuse more warps than a CTA has, and warn of registers that the compiler does not give.

    `default` is the number of warps of the default task; `asked` are (warps, registers per thread)
    of the others, 0 registers for a task that names none.

    As fbtriton 3.7.4 counts: tasks of more warps come first, four consecutive warps are a warp
    group, the last one padded, and all of it gets the most that one of its tasks asks for. If they
    exceed an even share of a multiple of 8 for each thread, every thread has that share.
    """
    warps_needed = default + sum(warps for warps, _ in requested)
    if warps_needed > MAX_WARPS:
        raise ResourceLimit(f"a CTA has at most {MAX_WARPS} warps, got {warps_needed}")
    named = [registers > 0 for _, registers in requested]
    if any(named) and not all(named):
        raise InvalidKernel("all tasks but the default one must name registers, or none of them")
    large_first = sorted(requested, key=lambda task: -task[0])
    each = [registers for warps, registers in large_first for _ in range(warps)]
    groups = [max(each[i : i + 4]) for i in range(0, len(each), 4)]
    threads = 32 * (default + 4 * len(groups))
    share = REGISTERS // threads // 8 * 8
    registers = 32 * (MIN_REGISTERS * default + 4 * sum(groups))
    if any(named) and registers > share * threads:
        warnings.warn_explicit(
            f"the compiler drops registers= of all tasks: {threads} threads have "
            f"{share * threads}, and the tasks ask for {registers}, with {MIN_REGISTERS} a thread "
            f"for the default task, and for each group of four warps the most that one of its "
            f"tasks asks for",
            UserWarning,
            *current_location(),
            registry=_WARNED,
        )
