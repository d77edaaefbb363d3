"""Per-operator adapters: how to call, check and time an implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate
from types import ModuleType

import torch

from gdpa_kernels.block_attention import api as block_api
from gdpa_kernels.block_attention import reference as block_reference
from gdpa_kernels.block_attention.block_list import work_list_recipe
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.rung import Rung
from gdpa_kernels.gdpa import api as gdpa_api
from gdpa_kernels.gdpa import reference as gdpa_reference
from gdpa_lab.measuring import baselines, studies, testing, timing
from gdpa_lab.measuring.baselines import STEP
from gdpa_lab.measuring.inputs import BlockInputs, Inputs
from gdpa_lab.measuring.require import require
from gdpa_lab.measuring.rows import reason

Call = Callable[[], object]


@dataclass
class Candidate:
    """An implementation ready to run on a workload: the call to time, and its constants.

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
    """Return the operator of `inputs` in `direction`; ValueError if it is not measured."""
    kind = BlockAttention if isinstance(inputs, BlockInputs) else Gdpa
    expected = f"one of {(*kind.results,)} with operator {inputs.workload.operator!r}"
    require(direction in kind.results, "direction", expected, direction)
    return kind(inputs, direction)


def math(operator: str, impl: str) -> str:
    """Return the mathematics of `impl`: "activation" or "softmax"."""
    return (Gdpa if operator == "gdpa" else BlockAttention).math(impl)


class _Operator:
    """Makes candidates of an operator in one direction, and checks every result against fp64 in
    parts of whole sequences: at most `PART` tokens at once, since an fp64 copy of everything would
    not fit."""

    results = {"forward": ("out",), "backward": ("dq", "dk", "dv")}
    peers: Mapping[str, baselines.Baseline]
    reference: ModuleType
    kind: str  # whose mathematics the rungs compute
    public: Callable[..., torch.Tensor]
    gradient_argument: str  # of `public`, which names who computes gradients
    resolve: Callable[..., Rung]
    _call: Callable[..., Call]  # of a rung, its module, a batch and arguments
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
        parts = []
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
                known.append([testing.allowed_errors(tensor, right) for tensor, right in pairs])
            triples = zip(results, places, expected, strict=True)
            result_errors = [
                testing.error_of(result[rows], right)[None] for result, rows, right in triples
            ]
            parts.append([*map(torch.cat, zip(result_errors, known[number], strict=True))])
        return [
            testing.comparison(name, result.numel(), torch.stack(errors))
            for name, result, errors in zip(names, results, zip(*parts, strict=True), strict=True)
        ]

    def _has_room(self) -> bool:
        """Return whether a third of the device's memory is free."""
        device = self._inputs.q.device
        free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (1, 1)
        return 3 * free >= total

    def forget(self) -> bool:
        """Drop the fp64 results that checks have left; return whether there were any."""
        had = bool(self._exact)
        self._exact.clear()
        return had

    def exact(self, kind: str) -> Iterator[tuple[tuple[slice, ...], tuple[torch.Tensor, ...]]]:
        """Yield the fp64 results in parts: the slices of each result, and the values there."""
        for places, part in self._parts():
            yield places, self._compute(kind, torch.float64, part)

    def _parts(self) -> Iterator[tuple[tuple[slice, ...], Inputs | BlockInputs]]:
        """Yield parts of whole sequences: the slices of their results, and their inputs."""
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
        """Slice the inputs of the sequences with these rows and keys; `ends` selects offsets."""
        inputs = self._inputs
        parts = {"q": rows, "k": keys, "v": keys, "grad_out": rows}
        tensors: dict[str, object] = {
            name: getattr(inputs, name)[part] for name, part in parts.items()
        }
        for name, first in (("cu_seqlens", rows), ("cu_seqlens_q", rows), ("cu_seqlens_k", keys)):
            if getattr(inputs, name, None) is not None:
                tensors[name] = getattr(inputs, name)[ends] - first.start
        if inputs.workload.shared_q:
            del tensors["q"]
        if inputs.workload.target_share:
            tensors["num_targets"] = inputs.num_targets[ends.start : ends.stop - 1]
        if inputs.workload.rotary:
            tensors["rotary"] = tuple(turn[rows] for turn in inputs.rotary)
        return replace(inputs, **tensors)

    def _compute(
        self, kind: str, dtype: torch.dtype, part: Inputs | BlockInputs
    ) -> tuple[torch.Tensor, ...]:
        """Compute the results of `part` in `dtype`."""
        batch = part.batch()
        tensors = {name: getattr(batch, name).to(dtype) for name in "qkv"}
        if part.workload.rotary:
            tensors["rotary"] = tuple(turn.to(dtype) for turn in part.rotary)
        batch = replace(batch, **tensors)
        if self._direction == "forward":
            result = self.reference.forward_in_dtype(batch)
            return (result,) if isinstance(result, torch.Tensor) else result[:1]
        return self.reference.backward_in_dtype(part.grad_out.to(dtype), batch)

    @classmethod
    def math(cls, impl: str) -> str:
        """Mathematics of an implementation: "activation" or "softmax"."""
        return cls.peers[impl].math if impl in cls.peers else cls.kind

    def candidate(self, impl: str, variant: str, **options: object) -> Candidate:
        """Prepare a rung, a study or a baseline; see `measure.candidate`."""
        if impl in self.peers:
            return self._peer(impl, self._direction, variant, **options)
        batch = self._inputs.batch()
        rung = self._resolve(impl, batch)
        module, arguments = _prepared(rung, batch, self._direction, options)
        call, config = self._call(rung, module, batch, arguments), arguments.get("config")
        return Candidate(impl, self.kind, call, asdict(config) if config else {}, variant)

    def _peer(self, impl: str, direction: str, variant: str = "", **options: object) -> Candidate:
        """Prepare a baseline, in its fastest configuration unless options choose one."""
        peer = self.peers[impl]
        checked = partial(peer.checked, self._inputs)
        configurations = peer.configurations(direction)
        if options or len(configurations) == 1:
            call, config = peer.call(self._inputs, direction, **options), options
        else:
            call, config = self._fastest(peer, direction, configurations, checked)
        return Candidate(impl, peer.math, call, config, variant, checked)

    def _fastest(
        self,
        peer: baselines.Baseline,
        direction: str,
        configurations: baselines.Configurations,
        checked: Callable[[baselines.Results], baselines.Results],
    ) -> tuple[Call, dict[str, object]]:
        """Prepare the fastest of `configurations`, in bursts, whose results pass the check; return
        its call, its name, and the microseconds of each, or why it failed."""
        best, least, name_of_best, tried = None, float("inf"), "", {}
        for name, options in configurations.items():
            try:
                call = peer.call(self._inputs, direction, **options)
                us = timing.burst_us(call, self._inputs.q.device)
                if us < least:
                    results = call()
                    results = results if isinstance(results, tuple) else (results,)
                    for comparison in self.check(peer.math, checked(results)):
                        if not comparison.passed:
                            raise ValueError(f"check failed: {comparison}")
                    best, least, name_of_best = call, us, name
                tried[name] = round(us, 1)
            except baselines.Unsupported:
                raise
            except Exception as error:
                if isinstance(error, torch.OutOfMemoryError) and self._exact:
                    raise  # `measure.attempt` makes room
                tried[name] = reason(error)
        if best is None:
            raise ValueError(f"every configuration fails: {tried}")
        return best, {"configuration": name_of_best, "tried": tried}

    def _resolve(self, impl: str, batch: object) -> Rung:
        """Resolve the rung, if it takes the batch."""
        return self.resolve(impl, self._direction, batch)

    def ops(self, impl: str) -> dict[str, Call]:
        """Public calls of a rung by variant, which trust the offsets: the other checks, work list,
        launch; for a backward rung autograd's backward alone. Empty unless `impl` is a rung."""
        if impl not in ladder.impls(self._inputs.workload.operator, self._direction)[1:]:
            return {}
        if self._direction == "forward":
            arguments = self._inputs.arguments() | {"validate": False, "impl": impl}
            return {"": partial(self.public, **arguments)}
        return {"": baselines.differentiate(self._function(impl), self._inputs, "backward")}

    def _function(self, impl: str) -> Callable[..., torch.Tensor]:
        """Build the operator of q, k and v whose gradients are the rung's."""
        arguments = self._inputs.arguments() | {"validate": False, self.gradient_argument: impl}
        return lambda q, k, v: self.public(**arguments | {"q": q, "k": k, "v": v})


def _prepared(
    rung: Rung, batch: object, direction: str, options: Mapping[str, object]
) -> tuple[ModuleType, dict[str, object]]:
    """Return the module of a rung, or the option `module` in its place, and its other options;
    config and work list are made here, outside what is timed."""
    arguments = dict(options)
    module = arguments.pop("module", None) or rung.module()
    if arguments.get("config") is None and rung.takes(direction, "config"):
        arguments["config"] = rung.config(batch, direction, module)
    if arguments.get("work_list") is None and rung.takes(direction, "work_list"):
        arguments["work_list"] = rung.work_list(batch, arguments["config"], module)
    return module, arguments


class Gdpa(_Operator):
    """GDPA, forward or backward; work lists are made beforehand."""

    peers, reference, kind = baselines.BASELINES, gdpa_reference, "activation"
    public, gradient_argument = staticmethod(gdpa_api.gdpa), "backward_impl"
    resolve = staticmethod(gdpa_api.resolve)
    SCORES = 2**30  # of all heads of the longest sequence, that the definition has in fp64 at once

    def _call(self, rung: Rung, module: ModuleType, batch: object, arguments: dict) -> Call:
        if self._direction == "forward":
            return partial(module.forward, batch, **arguments)
        return partial(module.backward, self._inputs.grad_out, batch, **arguments)

    def _compute(self, kind: str, dtype: torch.dtype, part: Inputs) -> tuple[torch.Tensor, ...]:
        heads = part.workload.num_heads_q
        if heads > 1 and heads * part.max_seqlen_q * part.max_seqlen_k > self.SCORES:
            return self._by_heads(kind, dtype, part)
        if kind != "softmax":
            return super()._compute(kind, dtype, part)
        if self._direction == "forward":
            return (baselines.softmax_reference(part, dtype),)
        return baselines.softmax_gradients(part, dtype)

    def _by_heads(self, kind: str, dtype: torch.dtype, part: Inputs) -> tuple[torch.Tensor, ...]:
        """Compute the results one query head after another; what those of a group give dk and dv is
        added up as in one call, after it is rounded."""
        workload, heads = part.workload, []
        for head in range(workload.num_heads_q):
            of_keys = head * workload.num_heads_k // workload.num_heads_q
            names = workload.activation
            names = names if isinstance(names, str) else (names[head],)
            one = replace(workload, num_heads_q=1, num_heads_k=1, activation=names)
            tensors = {name: getattr(part, name)[:, head, None] for name in ("q", "grad_out")}
            tensors |= {name: getattr(part, name)[:, of_keys, None] for name in "kv"}
            heads.append(self._compute(kind, dtype, replace(part, workload=one, **tensors)))
        of_q, *of_keys = (torch.cat(parts, 1) for parts in zip(*heads, strict=True))
        groups = workload.num_heads_k, -1
        return of_q, *(parts.unflatten(1, groups).sum(2) for parts in of_keys)

    def ops(self, impl: str) -> dict[str, Call]:
        """Public calls by variant; a backward rung also has `STEP`."""
        calls = super().ops(impl)
        if calls and self._direction == "backward":
            calls[STEP] = self.step(impl).call
        return calls

    def step(self, impl: str) -> Candidate:
        """Prepare a training step, forward and backward: of a backward rung behind the fastest
        forward, or of a baseline."""
        if impl in self.peers:
            return self._peer(impl, STEP)
        call = baselines.differentiate(self._function(impl), self._inputs, STEP)
        return Candidate(impl, self.kind, call)

    def forward_of_step(self) -> str:
        """Name of the rung that computes the output in `step`."""
        return gdpa_api.resolve("auto", "forward", self._inputs.batch()).impl

    def work_list(self, impl: str) -> Call | None:
        """Return the call that makes the work list of a backward rung; None without one.

        Forward None: the notebook of the lists measures them by order and clock.
        """
        if self._direction == "forward" or impl in self.peers:
            return None
        rung, batch = ladder.rung(impl), self._inputs.batch()
        config = rung.config(batch, "backward")
        has_list = rung.takes("backward", "work_list")
        return partial(rung.work_list, batch, config) if has_list else None


class BlockAttention(_Operator):
    """Block attention, forward or backward; block list and saved tensors are made beforehand."""

    peers, reference, kind = baselines.BLOCK_BASELINES, block_reference, "softmax"
    public, gradient_argument = staticmethod(block_api.block_attention), "impl"
    resolve = staticmethod(block_api.resolve)

    def _resolve(self, impl: str, batch: object) -> Rung:
        study = studies.STUDIES.get(impl)
        if study is None:
            return super()._resolve(impl, batch)
        if (problem := study.call_problem(batch)) is not None:
            raise baselines.Unsupported(f"{impl} {problem}")
        return study

    def _call(self, rung: Rung, module: ModuleType, batch: object, arguments: dict) -> Call:
        if self._direction == "forward":
            return lambda: module.forward(batch, **arguments)[0]
        # Saved tensors do not depend on the constants of a rung, but on those of a study.
        saved = module.forward(batch, **arguments if rung.impl in studies.STUDIES else {})[1]
        return partial(module.backward, self._inputs.grad_out, batch, saved, **arguments)

    def work_list(self, impl: str) -> Call | None:
        """Return the call that makes a rung's block list or a baseline's metadata, or None."""
        if impl in self.peers:
            make = self.peers[impl].metadata
            return None if make is None else partial(make, self._inputs)
        if impl == "reference":
            return None
        batch = self._inputs.batch()
        return lambda: work_list_recipe(batch, None).make(*batch.offsets)


def _runs(lengths: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last), last excluded, of runs whose lengths sum to at most `most`; a longer one
    is a run of its own."""
    first, total = 0, 0
    for i, length in enumerate(lengths):
        if i > first and total + length > most:
            yield first, i
            first, total = i, 0
        total += length
    if lengths:
        yield first, len(lengths)
