"""A call of a rung done again, without the rung's Python.

What a rung does on a GPU is a straight line: it asks for lists of work, allocates, and launches
kernels. Shapes, kernels and constants follow from what a call is known by (`calls.facts` and its
options), never from values in tensors. So the line is written down in one call and done again in
the calls after it, each with its own tensors.

Written down are `Remembered.of`, operators of PyTorch that make tensors on the same device, change
none and tell the host no value, and launches that `relaunch` knows. A call that does anything else,
or takes a tensor from elsewhere, has no replay.
To write down takes as long as several calls, so that is left until a call of the kind has been seen
`SEEN` times: a batch of new lengths is a new kind, and a model with few layers would never earn it
back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import is_dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gdpa_kernels.calling import calls, launch, relaunch

SEEN = 8
"""Calls of a kind before one of them is written down."""

_NEW_EMPTY = torch.ops.aten.new_empty.default
_TELLS_VALUES = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))

Tensors = tuple[torch.Tensor | None, ...]


class _Slot(int):
    """The place of a tensor among those of a call: its arguments, then what it makes."""


class _Ask:
    """`Remembered.of`."""

    __slots__ = ("fields", "of", "other", "sizes", "tensor")

    def __init__(self, of: Callable, tensor: _Slot, other: _Slot | None, sizes: tuple, fields):
        self.of, self.tensor, self.other, self.sizes = of, tensor, other, sizes
        self.fields = fields  # which hold tensors; None: the result is one

    def __call__(self, live: list) -> None:
        other = None if self.other is None else live[self.other]
        result = self.of(live[self.tensor], other, self.sizes)
        if self.fields is None:
            live.append(result)
        else:
            live += [getattr(result, field) for field in self.fields]


class _Allocate:
    """`Tensor.new_empty`, of the dtype and on the device of another tensor."""

    __slots__ = ("like", "shape")

    def __init__(self, like: _Slot, shape: tuple[int, ...]):
        self.like, self.shape = like, shape

    def __call__(self, live: list) -> None:
        live.append(live[self.like].new_empty(self.shape))


class _Operate:
    """An operator of PyTorch."""

    __slots__ = ("args", "kwargs", "operator")

    def __init__(self, operator, args: tuple, kwargs: dict):
        self.operator, self.args, self.kwargs = operator, args, kwargs

    def __call__(self, live: list) -> None:
        args = [_filled(arg, live) for arg in self.args]
        with torch._C._DisableAutocast():  # as the rung was called
            result = self.operator(*args, **self.kwargs)
        live += result if type(result) is tuple else (result,)


def _filled(arg: object, live: list) -> object:
    """An argument with tensors in the places of slots."""
    if type(arg) is _Slot:
        return live[arg]
    return [_filled(each, live) for each in arg] if type(arg) is list else arg


class _Launch:
    """A launch of a kernel."""

    __slots__ = ("again", "slots")

    def __init__(self, again: relaunch.Again, slots: tuple[_Slot, ...]):
        self.again, self.slots = again, slots

    def __call__(self, live: list) -> None:
        self.again([live[slot] for slot in self.slots])


class Replay:
    """The steps of a call, for other tensors of the same kind."""

    __slots__ = ("device", "launches", "results", "steps")

    def __init__(self, device: int, steps: Sequence[Callable], results: tuple[_Slot | None, ...]):
        self.device, self.steps, self.results = device, tuple(steps), results
        self.launches = tuple(step.again for step in steps if type(step) is _Launch)

    def holds(self) -> bool:
        """Whether the rung would do the same now, and nobody would see it."""
        if launch.current_device() != self.device:
            return False
        for again in self.launches:  # noqa: SIM110, no generator for so few
            if not again.holds():
                return False
        return True

    def __call__(self, inputs: Tensors) -> Tensors:
        live = list(inputs)
        for step in self.steps:
            step(live)
        return tuple([None if slot is None else live[slot] for slot in self.results])


class _Recorder(TorchDispatchMode):
    """Writes down what happens to the tensors of a call. `broken` says what cannot be."""

    def __init__(self, inputs: Tensors):
        super().__init__()
        self.steps: list[Callable] = []
        self.broken: str | None = None
        self.device = inputs[0].device
        # References would make PyTorch copy what its factories return.
        self.slots: dict[int, tuple[weakref.ref, _Slot]] = {}
        self.places = 0
        for tensor in inputs:
            if id(tensor) in self.slots:
                self._cannot("an argument stands for two")
            self._made(tensor)

    def _cannot(self, why: str) -> None:
        self.broken = self.broken or why

    def _made(self, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            self.slots[id(tensor)] = weakref.ref(tensor), _Slot(self.places)
        self.places += 1

    def _slot(self, tensor: torch.Tensor) -> _Slot:
        ref, slot = self.slots.get(id(tensor), (lambda: None, None))
        if ref() is not tensor:
            self._cannot("a tensor from elsewhere")
        return slot

    def _placed(self, arg: object) -> object:
        """An argument with slots in the places of tensors."""
        if isinstance(arg, torch.Tensor):
            return self._slot(arg)
        return [self._placed(each) for each in arg] if isinstance(arg, list | tuple) else arg

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        made = result if type(result) is tuple else (result,)
        if (
            operator._schema.is_mutable
            or not _TELLS_VALUES.isdisjoint(operator.tags)
            or not all(isinstance(x, torch.Tensor) and x.device == self.device for x in made)
        ):
            self._cannot(str(operator))
            return result
        places = [self._placed(arg) for arg in args]
        given = {name: value for name, value in kwargs.items() if value not in (None, False)}
        if operator is _NEW_EMPTY and not given:
            self.steps.append(_Allocate(places[0], tuple(args[1])))
        else:
            self.steps.append(_Operate(operator, tuple(places), kwargs))
        for tensor in made:
            self._made(tensor)
        return result

    def asked(self, remembered, tensor, other, sizes):
        """`remembered.of(tensor, other, sizes)`, as one step."""
        launch.recorder.now = None
        try:
            with _disable_current_modes():
                result = remembered.of(tensor, other, sizes)
        finally:
            launch.recorder.now = self
        fields = None
        if is_dataclass(result):
            fields = [n for n, value in vars(result).items() if isinstance(value, torch.Tensor)]
        elif not isinstance(result, torch.Tensor):
            self._cannot(f"a list of type {type(result).__name__}")
            return result
        other_slot = None if other is None else self._slot(other)
        self.steps.append(_Ask(remembered.of, self._slot(tensor), other_slot, sizes, fields))
        for made in [result] if fields is None else [getattr(result, field) for field in fields]:
            self._made(made)
        return result

    def launched(self, kernel, grid, device: int, args: tuple, options: dict) -> None:
        """A launch has been made."""
        again = relaunch.again(kernel, grid, device, args, options)
        if again is None:
            self._cannot(f"a launch of {kernel.__name__} that Triton has to make")
            return
        self.steps.append(_Launch(again, tuple(map(self._slot, again.tensors))))
        again.tensors.clear()


def record(function: Callable[[], Tensors], inputs: Tensors) -> tuple[Tensors, Replay | str]:
    """What `function` returns, called once, and its replay, or why it has none.

    inputs: the tensors on the current GPU that the function takes, or None where one is missing.
    """
    recorder = _Recorder(inputs)
    before, launch.recorder.now = launch.recorder.now, recorder
    try:
        with recorder:
            results = function()
    finally:
        launch.recorder.now = before
    slots = tuple(None if x is None else recorder._slot(x) for x in results)
    if recorder.broken is not None:
        return results, recorder.broken
    return results, Replay(inputs[0].get_device(), recorder.steps, slots)


_known: dict[Hashable, Replay | str | int] = {}  # a replay, why there is none, calls seen


def run(function: Callable[[], Tensors], key: tuple, inputs: Tensors) -> Tensors:
    """`function()`, or the replay of an earlier one.

    inputs: the tensors on a GPU that the function takes, or None where one is missing.
    key: equal for two calls only if, their addresses being multiples of 16 or not, the rung does
    the same for both. So it holds dtypes, shapes and strides of the inputs.
    """
    # Triton compiles for addresses that are multiples of 16.
    key = key, *[None if x is None else x.data_ptr() % 16 == 0 for x in inputs]
    known = _known.get(key, 0)
    if type(known) is Replay:
        if known.holds():
            return known(inputs)
    elif type(known) is int and relaunch.KNOWN:
        if known < SEEN:
            calls.keep(_known, key, known + 1)
        elif inputs[0].get_device() == launch.current_device() and not relaunch.is_watched():
            results, found = record(function, inputs)
            calls.keep(_known, key, found)
            return results
    return function()
