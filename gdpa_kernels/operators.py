"""What measuring needs to know of an operator: how an implementation is called, what is right, what
a user's whole call is, and what is made once before it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

import torch

from gdpa_kernels import baselines, ladder, testing
from gdpa_kernels.gdpa import reference as gdpa_reference
from gdpa_kernels.inputs import BlockInputs, Inputs

Call = Callable[[], object]


@dataclass
class Candidate:
    """One implementation ready to run on one workload: the call to be timed, and its constants.

    The call returns the output, or the gradients of q, k and v.
    """

    impl: str
    math: str
    call: Callable[[], torch.Tensor | tuple[torch.Tensor, ...]]
    config: Mapping[str, object] = field(default_factory=dict)
    variant: str = ""


def of(inputs: Inputs | BlockInputs, direction: str) -> Gdpa | BlockAttention:
    """The operator of `inputs` in `direction`; ValueError if it is not measured in it."""
    kind = BlockAttention if isinstance(inputs, BlockInputs) else Gdpa
    if direction not in kind.results:
        raise ValueError(
            f"direction must be one of {tuple(kind.results)} with operator "
            f"{inputs.workload.operator!r}, got {direction!r}"
        )
    return kind(inputs, direction)


def _peer(baseline: baselines.Baseline | baselines.BlockBaseline) -> None:
    available = baseline.availability()
    if not available.ok:
        raise baselines.Unsupported(available.reason)


class Gdpa:
    """GDPA, forward."""

    results = {"forward": ("out",)}

    def __init__(self, inputs: Inputs, direction: str) -> None:
        self._inputs = inputs
        self._expected: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    @staticmethod
    def math(impl: str) -> str:
        """Whose mathematics: "activation" or "softmax"."""
        return baselines.BASELINES[impl].math if impl in baselines.BASELINES else "activation"

    def candidate(self, impl: str, variant: str, **options: object) -> Candidate:
        """A rung or a baseline; see `measure.candidate`."""
        inputs = self._inputs
        if impl in baselines.BASELINES:
            baseline = baselines.BASELINES[impl]
            _peer(baseline)
            return Candidate(impl, baseline.math, baseline.prepare(inputs), {}, variant)
        module = ladder.rung(impl).module()
        arguments = inputs.rung_arguments()
        config = options.get("config")
        if hasattr(module, "default_config") and config is None:
            workload = inputs.workload
            config = options["config"] = ladder.rung(impl).config(
                workload.head_dim,
                inputs.q.dtype,
                inputs.max_seqlen_k,
                inputs.k.shape[0] / max(inputs.cu_seqlens_k.numel() - 1, 1),
                workload.causal or workload.window is not None,
            )
        if hasattr(module, "make_schedule") and "schedule" not in options:
            options["schedule"] = module.make_schedule(
                inputs.q, inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.max_seqlen_q, config
            )
        return Candidate(
            impl,
            "activation",
            lambda: module.forward(**arguments, **options),
            asdict(config) if config is not None else {},
            variant,
        )

    def check(self, kind: str, results: tuple[torch.Tensor, ...]) -> list[testing.Comparison]:
        """Compare the output with the mathematics `kind`, "activation" or "softmax"."""
        if kind not in self._expected:
            self._expected[kind] = tuple(
                self._compute(kind, dtype) for dtype in (torch.float64, self._inputs.q.dtype)
            )
        (out,), (expected, baseline) = results, self._expected[kind]
        return [testing.compare(name="out", actual=out, expected=expected, baseline=baseline)]

    def _compute(self, kind: str, dtype: torch.dtype) -> torch.Tensor:
        if kind == "softmax":
            return baselines.softmax_reference(self._inputs, dtype)
        arguments = self._inputs.rung_arguments()
        arguments |= {name: arguments[name].to(dtype) for name in ("q", "k", "v")}
        return gdpa_reference.forward(**arguments)

    def op(self, impl: str) -> Call | None:
        """The whole public call of a rung: checks, schedule, launch; None for what is no rung."""
        from gdpa_kernels import gdpa

        if impl not in {rung.impl for rung in ladder.RUNGS}:
            return None
        arguments = self._inputs.arguments()
        return lambda: gdpa(**arguments, impl=impl)

    def schedule(self, impl: str) -> Call | None:
        """None: the notebook of the schedules measures them by order and clock."""
        return None


class BlockAttention:
    """Block attention, forward or backward; the block list and what forward saves are made before.

    Checked in parts, whole sequences of at most `PART` tokens: an fp64 copy of everything would not
    fit.
    """

    results = {"forward": ("out",), "backward": ("dq", "dk", "dv")}
    PART = 2**16
    # A module beside the ladder, which can be measured like a rung.
    STUDIES = ("eliminations",)

    def __init__(self, inputs: BlockInputs, direction: str) -> None:
        self._inputs = inputs
        self._direction = direction

    @staticmethod
    def math(impl: str) -> str:
        """Softmax, whoever computes it."""
        return "softmax"

    def candidate(self, impl: str, variant: str, **options: object) -> Candidate:
        """A rung, a study or a baseline; see `measure.candidate`."""
        inputs, direction = self._inputs, self._direction
        if impl in baselines.BLOCK_BASELINES:
            baseline = baselines.BLOCK_BASELINES[impl]
            _peer(baseline)
            call = baseline.prepare(inputs, direction, **options)
            return Candidate(impl, "softmax", call, dict(options), variant)
        module = self._module(impl)
        arguments = inputs.rung_arguments()
        if impl in self.STUDIES:
            arguments = _without_rotary(impl, arguments)
        if impl == "reference":
            call = self._pass(module, arguments | options, None)
            return Candidate(impl, "softmax", call, {}, variant)
        config = options.setdefault("config", None) or self._config(module)
        schedule = options.get("schedule") or self._block_list()
        arguments |= options | {"config": config, "schedule": schedule}
        saved = ()
        if direction == "backward":
            own = "direction" in inspect.signature(_default_config(module)).parameters
            before = arguments | ({"config": None} if own else {})
            saved = module.forward(**before)[1]
        call = self._pass(module, arguments, saved)
        return Candidate(impl, "softmax", call, asdict(config), variant)

    def _module(self, impl: str):
        if impl in self.STUDIES:
            return importlib.import_module(f"gdpa_kernels.block_attention.{impl}")
        from gdpa_kernels.block_attention import api

        rung, inputs = ladder.rung(impl, "block_attention"), self._inputs
        api.resolve(impl, inputs.q, inputs.k, inputs.v, inputs.workload.block_size)
        return rung.module()

    def _config(self, module) -> object:
        """The launch constants that the module chooses for this call."""
        inputs, workload = self._inputs, self._inputs.workload
        told = {
            "direction": self._direction,
            "head_dim": workload.head_dim,
            "block_size": workload.block_size,
            "dtype": inputs.q.dtype,
            "group": workload.num_heads_q // workload.num_heads_k,
            "rotary": workload.rotary,
        }
        choose = _default_config(module)
        known = inspect.signature(choose).parameters
        return choose(**{name: value for name, value in told.items() if name in known})

    def _pass(self, module, arguments: dict, saved: tuple | None) -> Call:
        """The timed call; `saved` None: the module saves nothing and returns the output alone."""
        if self._direction == "backward":
            kept = {} if saved is None else {"saved": saved}
            return lambda: module.backward(self._inputs.grad_out, **arguments, **kept)
        if saved is None:
            return lambda: module.forward(**arguments)
        return lambda: module.forward(**arguments)[0]

    def _block_list(self):
        from gdpa_kernels.block_attention.block_list import make_block_list

        inputs = self._inputs
        return make_block_list(inputs.cu_seqlens, len(inputs.q), inputs.workload.block_size)

    def check(self, kind: str, results: tuple[torch.Tensor, ...]) -> list[testing.Comparison]:
        """Compare the output, or each gradient, with fp64 and with PyTorch in the same dtype."""
        inputs, names = self._inputs, self.results[self._direction]
        like = (inputs.q,) if self._direction == "forward" else (inputs.q, inputs.k, inputs.v)
        for name, result, tensor in zip(names, results, like, strict=True):
            if result.shape != tensor.shape or result.dtype != tensor.dtype:
                raise ValueError(
                    f"{name} must be {tensor.dtype} of shape {list(tensor.shape)}, got "
                    f"{result.dtype} of shape {list(result.shape)}"
                )
        errors = [_Errors() for _ in names]
        for rows, offsets in self._parts():
            expected = self._compute(torch.float64, rows, offsets)
            baseline = self._compute(inputs.q.dtype, rows, offsets)
            for total, *tensors in zip(errors, results, expected, baseline, strict=True):
                total.add(tensors[0][rows], *tensors[1:])
        return [total.comparison(name) for total, name in zip(errors, names, strict=True)]

    def _parts(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Rows of some whole sequences, and their offsets from the first of these rows."""
        ends = [0]
        for length in self._inputs.workload.seqlens_q:
            ends.append(ends[-1] + length)
        first = 0
        while first < len(ends) - 1:
            last = first + 1
            while last < len(ends) - 1 and ends[last + 1] - ends[first] <= self.PART:
                last += 1
            offsets = self._inputs.cu_seqlens[first : last + 1] - ends[first]
            yield slice(ends[first], ends[last]), offsets
            first = last

    def _compute(
        self, dtype: torch.dtype, rows: slice, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        from gdpa_kernels.block_attention import reference

        inputs, arguments = self._inputs, self._inputs.rung_arguments()
        arguments |= {name: arguments[name][rows].to(dtype) for name in ("q", "k", "v")}
        if inputs.rotary is not None:
            arguments["rotary"] = tuple(turn[rows].to(dtype) for turn in inputs.rotary)
        arguments["cu_seqlens"] = offsets
        if self._direction == "forward":
            return (reference.forward(**arguments),)
        return reference.backward(inputs.grad_out[rows].to(dtype), **arguments)

    def op(self, impl: str) -> Call | None:
        """The whole public call of a rung, or autograd's backward of it; None for what is no
        rung."""
        from gdpa_kernels.block_attention.api import block_attention

        if impl not in {rung.impl for rung in ladder.BLOCK_RUNGS}:
            return None
        arguments = self._inputs.arguments()
        if self._direction == "forward":
            return lambda: block_attention(**arguments, impl=impl)

        def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return block_attention(**arguments | {"q": q, "k": k, "v": v}, impl=impl)

        return baselines.differentiate(function, self._inputs, "backward")

    def schedule(self, impl: str) -> Call | None:
        """What makes the block list of a rung, or the metadata of a baseline; None without any."""
        if impl in baselines.BLOCK_BASELINES:
            make = baselines.BLOCK_BASELINES[impl].metadata
            return None if make is None else lambda: make(self._inputs)
        return None if impl == "reference" else self._block_list


def _default_config(module) -> Callable[..., object]:
    return getattr(module, "default_config", None) or module.Config


def _without_rotary(impl: str, arguments: dict) -> dict:
    if arguments["rotary"] is not None:
        raise baselines.Unsupported(f"{impl} needs a workload without rotary")
    return {n: value for n, value in arguments.items() if n not in ("rotary", "rotate_v")}


class _Errors:
    """Errors of one tensor, gathered over its parts; the rule is that of `testing.compare`."""

    def __init__(self) -> None:
        self._elements = 0
        self._largest: list[torch.Tensor] = []
        self._squares: list[torch.Tensor] = []

    def add(self, actual: torch.Tensor, expected: torch.Tensor, baseline: torch.Tensor) -> None:
        rounded = expected.to(actual.dtype)
        errors = [(tensor.double() - expected).abs() for tensor in (actual, baseline, rounded)]
        self._elements += expected.numel()
        self._largest.append(torch.stack([error.max() for error in errors]))
        self._squares.append(torch.stack([error.square().sum() for error in errors]))

    def comparison(self, name: str) -> testing.Comparison:
        # amax hands a NaN on, as the sum does
        largest = torch.stack(self._largest).amax(0).tolist()
        rms = (torch.stack(self._squares).sum(0) / self._elements).sqrt().tolist()
        budgets = [testing.FACTOR * error[1] + error[2] for error in (largest, rms)]
        return testing.Comparison(name, self._elements, largest[0], budgets[0], rms[0], budgets[1])
