"""Stand-in for Triton's `CompiledKernel`, returned by a launch or a warm-up."""

from collections.abc import Callable
from typing import Any, NamedTuple

from .compiler import target_of
from .launch import Report


class Metadata(NamedTuple):
    """The most used fields of Triton's metadata. shared: bytes of shared memory."""

    name: str
    shared: int
    num_warps: int
    num_stages: int
    num_ctas: int
    target: Any


class _NoCode(dict):
    def __missing__(self, kind: str) -> str:
        raise KeyError(f"{kind}: the emulator makes no code")


class Compiled:
    """A kernel as launched, or as warmed up: then `k[grid](*args)` launches it.

    The number of registers is not known: None after a launch; after a warm-up, whose host code
    computes occupancy from them, `n_regs` and `metadata.shared` are invented. asm: no code.
    """

    n_spills, n_max_threads, hash, module, function = 0, 1024, "", None, None

    def __init__(
        self, kernel: Any, keywords: dict[str, Any], arch: str, report: Report | None = None
    ) -> None:
        self._kernel, self._keywords, self.report = kernel, keywords, report
        function = kernel
        while not hasattr(function, "params"):
            function = function.fn
        self.name, self.asm = function.fn.__name__, _NoCode()
        self.n_regs = 32 if report is None else None
        self.metadata = Metadata(
            self.name,
            1024 if report is None else report.shared_bytes,
            keywords.get("num_warps") or 4,
            keywords.get("num_stages") or 3,
            keywords.get("num_ctas") or 1,
            target_of(arch),
        )

    def _init_handles(self) -> None:
        """Do nothing: Triton loads the code here, after which it knows `n_regs`."""

    def __getitem__(self, grid: Any) -> Callable:
        """Return a launcher with all arguments in order; constants may come from the warm-up."""

        def launch(*args: Any) -> "Compiled":
            positional = set(self._kernel.arg_names[: len(args)])
            rest = {name: value for name, value in self._keywords.items() if name not in positional}
            return self._kernel.run(*args, grid=grid, warmup=False, **rest)

        return launch
