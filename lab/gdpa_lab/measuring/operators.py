"""What measuring needs to know of an operator: how an implementation is called, what is right, what
a user's whole call is, and what is made once before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate
from types import ModuleType

import torch

from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.rung import Rung
from gdpa_kernels.gdpa import reference as gdpa_reference
from gdpa_lab.measuring import baselines, testing
from gdpa_lab.measuring.baselines import STEP
from gdpa_lab.measuring.inputs import BlockInputs, Inputs

Call = Callable[[], object]


@dataclass
class Candidate:
    """One implementation ready to run on one workload: the call to be timed, and its constants.

    The call returns the output, or the gradients of q, k and v; `checked` makes of them, a tuple,
    what is compared with what is right.
    """

    impl: str
    math: str
    call: Callable[[], torch.Tensor | tuple[torch.Tensor, ...]]
    config: Mapping[str, object] = field(default_factory=dict)
    variant: str = ""
    checked: Callable[[baselines.Results], baselines.Results] = lambda results: results


def of(inputs: Inputs | BlockInputs, direction: str) -> Gdpa | BlockAttention:
    """The operator of `inputs` in `direction`; ValueError if it is not measured in it."""
    kind = BlockAttention if isinstance(inputs, BlockInputs) else Gdpa
    if direction not in kind.results:
        raise ValueError(
            f"direction must be one of {tuple(kind.results)} with operator "
            f"{inputs.workload.operator!r}, got {direction!r}"
        )
    return kind(inputs, direction)


def math(operator: str, impl: str) -> str:
    """Whose mathematics `impl` of an operator computes: "activation" or "softmax"."""
    return (Gdpa if operator == "gdpa" else BlockAttention).math(impl)


class _Checked:
    """Results held against fp64, all of them, some whole sequences at a time: sequences of together
    at most `PART` tokens, since an fp64 copy of everything would not fit.
    """

    results: Mapping[str, tuple[str, ...]]
    PART = 2**16

    def __init__(self, inputs: Inputs | BlockInputs, direction: str) -> None:
        self._inputs = inputs
        self._direction = direction
        # By mathematics, of each part, the same for every implementation: the errors of PyTorch and
        # of rounding; what is right, where there is room.
        self._allowed: dict[str, list[list[torch.Tensor]]] = {}
        self._exact: dict[tuple[str, int], tuple[torch.Tensor, ...]] = {}

    def check(self, kind: str, results: tuple[torch.Tensor, ...]) -> list[testing.Comparison]:
        """Compare the output, or each gradient, with the mathematics `kind` ("activation" or
        "softmax") in fp64 and in PyTorch in the same dtype."""
        inputs, names = self._inputs, self.results[self._direction]
        forward = self._direction == "forward"
        like = (inputs.grad_out,) if forward else (inputs.q, inputs.k, inputs.v)
        for name, result, tensor in zip(names, results, like, strict=True):
            if result.shape != tensor.shape or result.dtype != tensor.dtype:
                raise ValueError(
                    f"{name} must be {tensor.dtype} of shape {list(tensor.shape)}, got "
                    f"{result.dtype} of shape {list(result.shape)}"
                )
        errors: list[list[torch.Tensor]] = [[] for _ in names]
        known = self._allowed.setdefault(kind, [])
        for number, (places, part) in enumerate(self._parts()):
            expected = self._exact.get((kind, number))
            if expected is None:
                expected = self._compute(kind, torch.float64, part)
                if self._has_room():
                    self._exact[kind, number] = expected
            if number == len(known):
                baseline = self._compute(kind, inputs.q.dtype, part)
                pairs = zip(baseline, expected, strict=True)
                known.append([_allowed_errors(tensor, right) for tensor, right in pairs])
            for found, result, place, right, allowed in zip(
                errors, results, places, expected, known[number], strict=True
            ):
                found.append(torch.cat((_error(result[place], right)[None], allowed)))
        return [
            _comparison(name, result.numel(), torch.stack(found))
            for name, result, found in zip(names, results, errors, strict=True)
        ]

    def _has_room(self) -> bool:
        """Whether three quarters of the device's memory are free."""
        device = self._inputs.q.device
        free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (1, 1)
        return 4 * free >= 3 * total

    def exact(self, kind: str) -> Iterator[tuple[tuple[slice, ...], tuple[torch.Tensor, ...]]]:
        """What is right, in fp64 and in parts: where in each result, and its values there."""
        for places, part in self._parts():
            yield places, self._compute(kind, torch.float64, part)

    def _parts(self) -> Iterator[tuple[tuple[slice, ...], Inputs | BlockInputs]]:
        """Some whole sequences at a time: where their results lie, and their inputs."""
        workload = self._inputs.workload
        pairs = list(zip(workload.seqlens_q, workload.seqlens_k, strict=True))
        ends_q, ends_k = ([0, *accumulate(lengths)] for lengths in zip(*pairs, strict=True))
        runs = _runs([max(pair) for pair in pairs], self.PART)
        if workload.shared_q:
            runs = [(0, len(pairs))]  # its gradient is the sum over all sequences
        for first, last in runs:
            rows, keys = slice(ends_q[first], ends_q[last]), slice(ends_k[first], ends_k[last])
            places = (rows,) if self._direction == "forward" else (rows, keys, keys)
            yield places, self._part(rows, keys, slice(first, last + 1))

    def _part(self, rows: slice, keys: slice, ends: slice) -> Inputs | BlockInputs:
        """The inputs of the sequences with these rows and keys; `ends` are their offsets."""
        raise NotImplementedError

    def _compute(
        self, kind: str, dtype: torch.dtype, part: Inputs | BlockInputs
    ) -> tuple[torch.Tensor, ...]:
        """The results of `part`, computed in `dtype`."""
        raise NotImplementedError


class Gdpa(_Checked):
    """GDPA, forward or backward; work lists are made before."""

    results = {"forward": ("out",), "backward": ("dq", "dk", "dv")}

    @staticmethod
    def math(impl: str) -> str:
        """Whose mathematics: "activation" or "softmax"."""
        return baselines.BASELINES[impl].math if impl in baselines.BASELINES else "activation"

    def candidate(self, impl: str, variant: str, **options: object) -> Candidate:
        """A rung or a baseline; see `measure.candidate`."""
        inputs = self._inputs
        if impl in baselines.BASELINES:
            baseline = baselines.BASELINES[impl]
            call = baseline.call(inputs, self._direction, **options)
            checked = partial(baseline.checked, inputs)
            return Candidate(impl, baseline.math, call, options, variant, checked)
        from gdpa_kernels.gdpa import api

        batch = inputs.batch()
        rung = api.resolve(impl, self._direction, batch)
        given = (batch,) if self._direction == "forward" else (inputs.grad_out, batch)
        module, arguments = _prepared(rung, batch, self._direction, options)
        run = getattr(module, self._direction)
        config = arguments.get("config")
        return Candidate(
            impl,
            "activation",
            lambda: run(*given, **arguments),
            asdict(config) if config is not None else {},
            variant,
        )

    def _part(self, rows: slice, keys: slice, ends: slice) -> Inputs:
        inputs = self._inputs
        shared = inputs.cu_seqlens_q is None
        return replace(
            inputs,
            q=inputs.q if shared else inputs.q[rows],
            k=inputs.k[keys],
            v=inputs.v[keys],
            grad_out=inputs.grad_out[rows],
            cu_seqlens_q=None if shared else inputs.cu_seqlens_q[ends] - rows.start,
            cu_seqlens_k=inputs.cu_seqlens_k[ends] - keys.start,
        )

    def _compute(self, kind: str, dtype: torch.dtype, part: Inputs) -> tuple[torch.Tensor, ...]:
        if kind == "softmax":
            if self._direction == "forward":
                return (baselines.softmax_reference(part, dtype),)
            return baselines.softmax_gradients(part, dtype)
        batch = part.batch()
        batch = replace(batch, **{name: getattr(batch, name).to(dtype) for name in "qkv"})
        if self._direction == "forward":
            return (gdpa_reference.forward_in_dtype(batch),)
        return gdpa_reference.backward_in_dtype(part.grad_out.to(dtype), batch)

    def ops(self, impl: str) -> dict[str, Call]:
        """By variant the public calls of a rung, which trust the offsets: other checks, schedule,
        launch; of a backward rung autograd's backward alone, and `STEP`. Empty for what is no
        rung."""
        from gdpa_kernels import gdpa

        if self._direction == "forward":
            if impl not in ladder.impls()[1:]:
                return {}
            arguments = self._inputs.arguments() | {"validate": False}
            return {"": lambda: gdpa(**arguments, impl=impl)}
        if impl not in ladder.impls(direction="backward")[1:]:
            return {}
        backward = baselines.differentiate(self._function(impl), self._inputs, "backward")
        return {"": backward, STEP: self.step(impl).call}

    def step(self, impl: str) -> Candidate:
        """A step of training, forward and backward: of a backward rung, behind the fastest
        forward, or of a baseline."""
        if impl in baselines.BASELINES:
            baseline = baselines.BASELINES[impl]
            checked = partial(baseline.checked, self._inputs)
            call = baseline.call(self._inputs, STEP)
            return Candidate(impl, baseline.math, call, checked=checked)
        call = baselines.differentiate(self._function(impl), self._inputs, STEP)
        return Candidate(impl, "activation", call)

    def forward_of_step(self) -> str:
        """The rung that computes the output in `step` of a rung."""
        from gdpa_kernels.gdpa import api

        return api.resolve("auto", "forward", self._inputs.batch()).impl

    def _function(self, impl: str) -> Callable[..., torch.Tensor]:
        """`gdpa` of q, k and v whose gradients are the rung's."""
        from gdpa_kernels import gdpa

        arguments = self._inputs.arguments() | {"backward_impl": impl, "validate": False}
        return lambda q, k, v: gdpa(**arguments | {"q": q, "k": k, "v": v})

    def schedule(self, impl: str) -> Call | None:
        """What makes the work list of a backward rung; None without any.

        Forward None: the notebook of the schedules measures them by order and clock.
        """
        if self._direction == "forward" or impl in baselines.BASELINES:
            return None
        rung, batch = ladder.rung(impl), self._inputs.batch()
        config = rung.config(batch, "backward")
        has_list = rung.takes("backward", "schedule")
        return (lambda: rung.schedule(batch, config)) if has_list else None


def _prepared(
    rung: Rung, batch: object, direction: str, options: Mapping[str, object]
) -> tuple[ModuleType, dict[str, object]]:
    """The module of a rung, or the option `module` in its place, and its other options with a
    config and a schedule, which are made here and not in what is timed."""
    found = dict(options)
    module = found.pop("module", None) or rung.module()
    if found.get("config") is None and rung.takes(direction, "config"):
        found["config"] = rung.config(batch, direction, module)
    if found.get("schedule") is None and rung.takes(direction, "schedule"):
        found["schedule"] = rung.schedule(batch, found["config"], module)
    return module, found


class BlockAttention(_Checked):
    """Block attention, forward or backward; the block list and what forward saves are made
    before."""

    results = {"forward": ("out",), "backward": ("dq", "dk", "dv")}

    @staticmethod
    def math(impl: str) -> str:
        """Softmax, whoever computes it."""
        return "softmax"

    def candidate(self, impl: str, variant: str, **options: object) -> Candidate:
        """A rung, a study or a baseline; see `measure.candidate`."""
        inputs, direction = self._inputs, self._direction
        if impl in baselines.BLOCK_BASELINES:
            call = baselines.BLOCK_BASELINES[impl].call(inputs, direction, **options)
            return Candidate(impl, "softmax", call, dict(options), variant)
        from gdpa_kernels.block_attention import api

        batch = inputs.batch()
        rung = ladder.STUDIES.get(impl)
        if rung is None:
            rung = api.resolve(impl, direction, batch)
        elif (problem := rung.problem(batch)) is not None:
            raise baselines.Unsupported(f"{impl} {problem}")
        module, arguments = _prepared(rung, batch, direction, options)
        forward, backward = module.forward, module.backward
        config = arguments.get("config")
        if direction == "forward":
            call = lambda: forward(batch, **arguments)[0]  # noqa: E731
        else:
            # What is saved does not depend on the constants of a rung; of a study it does.
            kept = arguments if impl in ladder.STUDIES else {}
            saved = forward(batch, **kept)[1]
            call = lambda: backward(inputs.grad_out, batch, saved, **arguments)  # noqa: E731
        return Candidate(
            impl, "softmax", call, asdict(config) if config is not None else {}, variant
        )

    def _part(self, rows: slice, keys: slice, ends: slice) -> BlockInputs:
        inputs = self._inputs
        turns = inputs.rotary
        return replace(
            inputs,
            q=inputs.q[rows],
            k=inputs.k[keys],
            v=inputs.v[keys],
            grad_out=inputs.grad_out[rows],
            cu_seqlens=inputs.cu_seqlens[ends] - rows.start,
            rotary=None if turns is None else tuple(turn[rows] for turn in turns),
        )

    def _compute(
        self, kind: str, dtype: torch.dtype, part: BlockInputs
    ) -> tuple[torch.Tensor, ...]:
        from gdpa_kernels.block_attention import reference

        batch = part.batch()
        tensors = {name: getattr(batch, name).to(dtype) for name in "qkv"}
        if part.rotary is not None:
            tensors["rotary"] = tuple(turn.to(dtype) for turn in part.rotary)
        batch = replace(batch, **tensors)
        if self._direction == "forward":
            return (reference.forward_in_dtype(batch)[0],)
        return reference.backward_in_dtype(part.grad_out.to(dtype), batch)

    def ops(self, impl: str) -> dict[str, Call]:
        """By variant, of which there is one, the whole public call of a rung, which trusts the
        offsets, or autograd's backward of it; empty for what is no rung."""
        from gdpa_kernels.block_attention.api import block_attention

        if impl not in ladder.impls("block_attention")[1:]:
            return {}
        arguments = self._inputs.arguments() | {"validate": False}
        if self._direction == "forward":
            return {"": lambda: block_attention(**arguments, impl=impl)}

        def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return block_attention(**arguments | {"q": q, "k": k, "v": v}, impl=impl)

        return {"": baselines.differentiate(function, self._inputs, "backward")}

    def schedule(self, impl: str) -> Call | None:
        """What makes the block list of a rung, or the metadata of a baseline; None without any."""
        if impl in baselines.BLOCK_BASELINES:
            make = baselines.BLOCK_BASELINES[impl].metadata
            return None if make is None else lambda: make(self._inputs)
        if impl == "reference":
            return None
        from gdpa_kernels.block_attention.block_list import make_schedule

        batch = self._inputs.batch()
        return lambda: make_schedule(batch, None)


def _runs(lengths: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """(first, last), last excluded, of runs whose lengths sum to at most `most`; a longer one is a
    run of its own."""
    first, total = 0, 0
    for i, length in enumerate(lengths):
        if i > first and total + length > most:
            yield first, i
            first, total = i, 0
        total += length
    if lengths:
        yield first, len(lengths)


def _error(actual: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """(largest, sum of squares) of the errors of `actual`; a NaN is both."""
    errors = actual.to(torch.float64, copy=True).sub_(exact).flatten()
    return torch.stack(
        (torch.linalg.vector_norm(errors, torch.inf), torch.linalg.vector_norm(errors).square())
    )


def _allowed_errors(baseline: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """`_error` of PyTorch in the kernel's dtype and of rounding alone, [2, 2]."""
    return torch.stack((_error(baseline, exact), _error(exact.to(baseline.dtype), exact)))


def _comparison(name: str, elements: int, errors: torch.Tensor) -> testing.Comparison:
    """The rule of `testing.compare`; errors [parts, 3, 2]: of the result, PyTorch and rounding."""
    largest = errors[..., 0].amax(0).tolist()  # hands a NaN on, as the sum does
    rms = (errors[..., 1].sum(0) / elements).sqrt().tolist()
    budgets = [testing.FACTOR * error[1] + error[2] for error in (largest, rms)]
    return testing.Comparison(
        name, elements, largest[0], budgets[0], rms[0], budgets[1], largest[1], largest[2]
    )
