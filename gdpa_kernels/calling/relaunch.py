"""The second launch of a compiled kernel, without most of Triton's Python.

`kernel[grid](...)` binds the arguments to names, writes a key as a string, reads the environment,
runs Python for every TMA descriptor and encodes it anew. Here the compiled kernel is looked up by
what Triton's own function says of every argument (its type; whether it is 1, None, or divisible by
16), by the constexprs and options with their types, and by the knobs that change what is compiled;
then Triton's C function launches it. Encoded descriptors are kept by address and layout, of which
they are a pure function; no tensor is kept. `again` is such a launch that is to be made with other
tensors of the same kind, without looking it up.

This leans on the insides of one version of Triton: with any other, and whenever something wants to
see or change a launch (hooks), the answer is "no" and the caller takes Triton's way.
"""

from __future__ import annotations

import os

import torch
import triton
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from gdpa_kernels.calling.descriptors import Descriptor, Layout

KNOWN_TRITON = "3.7.4+fb"
KNOWN = triton.__version__ == KNOWN_TRITON
MOST = 1024  # entries of a cache; a full one is emptied
_OPTION_TYPES = frozenset((bool, int, float, str, type(None), tuple))

if KNOWN:
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.driver import CudaLauncher, expand_signature, make_tensordesc_arg
    from triton.compiler.compiler import CompiledKernel


class _Encoder:
    """Encodes the descriptors that a compiled kernel takes at one place, all of one layout."""

    __slots__ = ("known", "meta")

    def __init__(self, meta: dict):
        self.meta = meta  # what Triton wants to know
        self.known: dict[int, list] = {}  # by address

    def of(self, base: torch.Tensor, layout: Layout) -> list:
        """The arguments that the kernel gets for a descriptor."""
        address = base.data_ptr()
        encoded = self.known.get(address)
        if encoded is None:
            if len(self.known) >= MOST:
                self.known.clear()
            encoded = make_tensordesc_arg(Descriptor(base, layout), self.meta, None)
            self.known[address] = encoded
        return encoded


class _Compiled:
    """A compiled kernel, ready for its C launcher."""

    __slots__ = ("before", "descriptors", "kernel", "launch", "used_globals")

    def __init__(self, kernel: JITFunction, compiled: CompiledKernel, count: int):
        launcher, metas = compiled.run, _descriptor_metas(compiled)
        self.kernel = compiled  # unloads its module when collected
        types = tuple(compiled.src.signature.values())[:count]
        expanded = len(expand_signature(types, metas))
        slots = [i for i, type_ in enumerate(types) if type_.startswith("tensordesc")]
        # Each: position and encoder. The last first, because an argument grows to several.
        encoders = [(i, _Encoder(meta)) for i, meta in zip(slots, metas, strict=True)]
        self.descriptors = tuple(reversed(encoders))
        self.launch = driver.active.utils.launch
        self.before = (
            compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl,
            compiled.packed_metadata, None, None, None, None, None,
            tuple(launcher.arg_annotations[:expanded]), launcher.kernel_signature,
        )  # fmt: skip
        self.used_globals = tuple(
            (where, name, where.get(name)) for name, where in _used_globals(kernel)
        )

    def __call__(self, grid: tuple[int, ...], stream: int, args: tuple) -> None:
        values = list(args)
        for slot, encoder in self.descriptors:
            descriptor = args[slot]
            if type(descriptor) is Descriptor:  # whose layout is part of the key
                encoded = encoder.of(descriptor.base, descriptor.layout)
            else:
                encoded = make_tensordesc_arg(descriptor, encoder.meta, None)
            values[slot : slot + 1] = encoded
        self.launch(*(*grid, 1, 1)[:3], stream, *self.before, values)

    def are_globals_unchanged(self) -> bool:
        """Whether the globals that the kernel uses are what they were when it was compiled."""
        # Not `all`, which would make a generator for each launch of kernels that use few.
        for where, name, value in self.used_globals:  # noqa: SIM110
            if where.get(name) is not value:
                return False
        return True


class _Kernel:
    """A kernel on one device: how Triton specializes its arguments, and what was compiled."""

    __slots__ = (
        "backend", "caches", "compiled", "count", "driver", "kernel", "specialize", "stream",
    )  # fmt: skip

    def __init__(self, kernel: JITFunction, device: int):
        self.kernel = kernel  # so that no other kernel gets its id
        self.driver = driver.active
        self.caches = kernel.device_caches[device]
        self.stream = self.driver.get_current_stream
        self.compiled: dict[tuple, _Compiled] = {}
        backend = self.caches[3]
        arguments = [param for param in kernel.params if not param.is_constexpr]
        self.count = len(arguments)
        self.backend = backend
        # What Triton asks of each parameter; None where it is the same for all: neither const
        # nor left unspecialized.
        self.specialize = tuple(
            (param.is_const, not param.do_not_specialize, not param.do_not_specialize_on_alignment)
            for param in arguments
        )
        if set(self.specialize) <= {(False, True, True)}:
            self.specialize = None

    def key(self, args: tuple, options: dict) -> tuple:
        """Equal for two calls only if Triton would run the same compiled kernel for both.

        Raises TypeError for an argument that Triton cannot take.
        """
        backend = self.backend
        if self.specialize is None:
            arguments = [
                arg.layout if type(arg) is Descriptor
                else native_specialize_impl(backend, arg, False, True, True)
                for arg in args
            ]  # fmt: skip
        else:
            arguments = [
                arg.layout if type(arg) is Descriptor
                else native_specialize_impl(backend, arg, *flags)
                for arg, flags in zip(args, self.specialize, strict=True)
            ]  # fmt: skip
        values = options.values()
        types = [type(value) for value in values]
        if tuple in types:  # of integers: strides
            types += [tuple(map(type, value)) for value in values if type(value) is tuple]
        return (*_compiled_by(), *arguments, *options, *values, *types)


_kernels: dict[tuple[int, int], _Kernel] = {}


def relaunch(
    kernel: JITFunction, grid: tuple[int, ...], device: int, args: tuple, options: dict
) -> bool:
    """Launch on the current device, which is `device`, if `remember` knows such a call."""
    found = _find(kernel, device, args, options)
    if found is None:
        return False
    known, compiled = found
    compiled(grid, known.stream(device), args)
    return True


def _find(
    kernel: JITFunction, device: int, args: tuple, options: dict
) -> tuple[_Kernel, _Compiled] | None:
    """What Triton would launch, if `remember` knows such a call and nobody would see it."""
    known = _kernels.get((id(kernel), device))
    if known is None or not _holds(known, kernel, device) or len(args) != known.count:
        return None
    if is_watched() or kernel.pre_run_hooks:
        return None
    try:
        compiled = known.compiled.get(known.key(args, options))
    except TypeError:  # not hashable, or nothing Triton takes: Triton says which
        return None
    if compiled is None or not compiled.are_globals_unchanged():
        return None
    return known, compiled


class Again:
    """A launch on a device, to be made again with other tensors of the same kind: of the same
    dtype, at addresses that are multiples of 16 where the first were.

    tensors: those of the first launch, in the order in which a call takes the others: arguments,
    and the bases of descriptors. The caller is to drop them.
    """

    __slots__ = (
        "compiled", "device", "grid", "kernel", "knobs", "known", "places", "tensors",
        "values",
    )  # fmt: skip

    def __init__(self, kernel, grid, device, args, known: _Kernel, compiled: _Compiled):
        self.kernel, self.device, self.known, self.compiled = kernel, device, known, compiled
        self.grid = (*grid, 1, 1)[:3]
        self.knobs = _compiled_by()
        encoders = dict(compiled.descriptors)
        self.values, self.tensors = [], []
        places = []  # position; encoder and layout of a descriptor
        for i, arg in enumerate(args):
            at = len(self.values)
            if i in encoders:
                places.append((at, encoders[i], arg.layout))
                self.tensors.append(arg.base)
                self.values += [None, *encoders[i].of(arg.base, arg.layout)[1:]]
            elif isinstance(arg, torch.Tensor):
                places.append((at, None, None))
                self.tensors.append(arg)
                self.values.append(None)
            else:
                self.values.append(arg)
        self.places = tuple(places)

    def holds(self) -> bool:
        """Whether Triton would still launch the same compiled kernel, and nobody would see it."""
        return (
            _holds(self.known, self.kernel, self.device)
            and self.knobs == _compiled_by()
            and not is_watched()
            and not self.kernel.pre_run_hooks
            and self.compiled.are_globals_unchanged()
        )

    def __call__(self, tensors: list[torch.Tensor]) -> None:
        values = self.values.copy()
        for (at, encoder, layout), tensor in zip(self.places, tensors, strict=True):
            values[at] = tensor if encoder is None else encoder.of(tensor, layout)[0]
        compiled = self.compiled
        compiled.launch(*self.grid, self.known.stream(self.device), *compiled.before, values)


def again(kernel, grid: tuple[int, ...], device: int, args: tuple, options: dict) -> Again | None:
    """The launch as one that can be made again; None if `relaunch` would not make it."""
    found = _find(kernel, device, args, options)
    if found is None:
        return None
    for slot, _ in found[1].descriptors:
        if type(args[slot]) is not Descriptor:
            return None
    return Again(kernel, grid, device, args, *found)


def remember(kernel, device: int, args: tuple, options: dict, compiled) -> None:
    """Keep what `kernel[grid](*args, **options)` returned on `device` for `relaunch`, if it can."""
    if not KNOWN or not _relaunchable(kernel, args, options, compiled):
        return
    known = _kernels.get((id(kernel), device))
    if known is None or not _holds(known, kernel, device) or len(args) != known.count:
        if len(_kernels) >= MOST:
            _kernels.clear()
        known = _kernels[id(kernel), device] = _Kernel(kernel, device)
    if len(known.compiled) >= MOST:
        known.compiled.clear()
    try:
        known.compiled[known.key(args, options)] = _Compiled(kernel, compiled, len(args))
    except TypeError:
        return


def _holds(known: _Kernel, kernel: JITFunction, device: int) -> bool:
    """Whether `known` is still about this kernel: same driver, and Triton's cache not replaced."""
    return driver.active is known.driver and kernel.device_caches.get(device) is known.caches


def _compiled_by() -> tuple:
    """The knobs that change what is compiled."""
    runtime = knobs.runtime
    return runtime.debug, runtime.sanitize_overflow, knobs.compilation.instrumentation_mode


def is_watched() -> bool:
    """Whether something wants to see all launches, or to change what is compiled."""
    runtime = knobs.runtime
    return bool(
        runtime.launch_enter_hook
        or runtime.launch_exit_hook
        or runtime.add_stages_inspection_hook is not None
    )


def _descriptor_metas(compiled: CompiledKernel) -> list[dict | None]:
    """What Triton wants to encode each descriptor; None for one that the kernel takes apart."""
    return getattr(compiled.metadata, "tensordesc_meta", None) or []


def _used_globals(kernel: JITFunction) -> list[tuple[str, dict]]:
    """Names, and where they are, of the globals whose values are compiled into the kernel."""
    return [(name, where) for (name, _), (_, where) in kernel.used_global_vals.items()]


def _relaunchable(kernel, args: tuple, options: dict, compiled) -> bool:
    """Whether the call is of the plain kind that `_Compiled` and `_Kernel.key` are written for."""
    if type(kernel) is not JITFunction or type(compiled) is not CompiledKernel or kernel.c_cache:
        return False
    given, left = kernel.params[: len(args)], kernel.params[len(args) :]
    if any(param.is_constexpr or param.annotation_type for param in given):
        return False
    if not all(param.is_constexpr for param in left) or any(isinstance(a, tuple) for a in args):
        return False
    if not {type(value) for value in options.values()} <= _OPTION_TYPES:
        return False
    if any(type(value) is tuple and set(map(type, value)) - {int} for value in options.values()):
        return False
    launcher = compiled.run
    return (
        type(launcher) is CudaLauncher
        and not launcher.global_scratch_size
        and not launcher.profile_scratch_size
        and compiled._dispatcher is None
        and getattr(compiled, "_compile_iq_acf_cubin", None) is None
        and all(_descriptor_metas(compiled))
        and "TRITON_DUMP_TLX_BENCHMARK" not in os.environ
    )
