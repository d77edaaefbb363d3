"""The second launch of a compiled kernel, without most of Triton's Python.

`kernel[grid](...)` binds the arguments to names, writes a key as a string, reads the environment,
runs Python for every TMA descriptor and encodes it anew. Here the compiled kernel is looked up by
what Triton's own function says of every argument (its type; whether it is 1, None, or divisible by
16), by the constexprs and options with their types, and by the knobs that change what is compiled;
then Triton's C function launches it. Encoded descriptors are kept by address and layout, of which
they are a pure function; no tensor is kept.

This leans on the insides of one version of Triton: with any other, and whenever something wants to
see or change a launch (hooks), the answer is "no" and the caller takes Triton's way.
"""

from __future__ import annotations

import os

import triton
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from gdpa_kernels.descriptors import Descriptor

KNOWN_TRITON = "3.7.4+fb"
KNOWN = triton.__version__ == KNOWN_TRITON
MOST = 1024  # entries of a cache; a full one is emptied
_OPTION_TYPES = frozenset((bool, int, float, str, type(None)))

if KNOWN:
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.driver import CudaLauncher, expand_signature, make_tensordesc_arg
    from triton.compiler.compiler import CompiledKernel


class _Compiled:
    """A compiled kernel, ready for its C launcher."""

    __slots__ = ("before", "descriptors", "kernel", "launch", "used_globals")

    def __init__(self, kernel: JITFunction, compiled: CompiledKernel, count: int):
        launcher, metas = compiled.run, _descriptor_metas(compiled)
        self.kernel = compiled  # unloads its module when collected
        types = tuple(compiled.src.signature.values())[:count]
        expanded = len(expand_signature(types, metas))
        slots = [i for i, type_ in enumerate(types) if type_.startswith("tensordesc")]
        # Each: position, what Triton wants to encode it, those encoded by address. The last first,
        # because an argument grows to several.
        self.descriptors = tuple((i, meta, {}) for i, meta in zip(slots, metas, strict=True))[::-1]
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
        for slot, meta, encoded in self.descriptors:
            descriptor = args[slot]
            if type(descriptor) is Descriptor:  # whose layout is part of the key
                address = descriptor.base.data_ptr()
                arguments = encoded.get(address)
                if arguments is None:
                    if len(encoded) >= MOST:
                        encoded.clear()
                    arguments = make_tensordesc_arg(descriptor, meta, None)
                    encoded[address] = arguments
            else:
                arguments = make_tensordesc_arg(descriptor, meta, None)
            values[slot : slot + 1] = arguments
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        self.launch(x, y, z, stream, *self.before, values)


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
        runtime, backend = knobs.runtime, self.backend
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
        return (
            runtime.debug, runtime.sanitize_overflow, knobs.compilation.instrumentation_mode,
            *arguments, *options, *values, *map(type, values),
        )  # fmt: skip


_kernels: dict[tuple[int, int], _Kernel] = {}


def relaunch(
    kernel: JITFunction, grid: tuple[int, ...], device: int, args: tuple, options: dict
) -> bool:
    """Launch on the current device, which is `device`, if `remember` knows such a call."""
    known = _kernels.get((id(kernel), device))
    if known is None or not _holds(known, kernel, device, args) or _watched(kernel):
        return False
    try:
        compiled = known.compiled.get(known.key(args, options))
    except TypeError:  # not hashable, or nothing Triton takes: Triton says which
        return False
    if compiled is None:
        return False
    for where, name, value in compiled.used_globals:
        if where.get(name) is not value:
            return False
    compiled(grid, known.stream(device), args)
    return True


def remember(kernel, device: int, args: tuple, options: dict, compiled) -> None:
    """Keep what `kernel[grid](*args, **options)` returned on `device` for `relaunch`, if it can."""
    if not KNOWN or not _relaunchable(kernel, args, options, compiled):
        return
    known = _kernels.get((id(kernel), device))
    if known is None or not _holds(known, kernel, device, args):
        if len(_kernels) >= MOST:
            _kernels.clear()
        known = _kernels[id(kernel), device] = _Kernel(kernel, device)
    if len(known.compiled) >= MOST:
        known.compiled.clear()
    try:
        known.compiled[known.key(args, options)] = _Compiled(kernel, compiled, len(args))
    except TypeError:
        return


def _holds(known: _Kernel, kernel: JITFunction, device: int, args: tuple) -> bool:
    """Whether `known` is still about this kernel: same driver, and Triton's cache not replaced."""
    return (
        driver.active is known.driver
        and kernel.device_caches.get(device) is known.caches
        and len(args) == known.count
    )


def _watched(kernel: JITFunction) -> bool:
    """Whether something wants to see a launch, or to change what is compiled."""
    runtime = knobs.runtime
    return bool(
        runtime.launch_enter_hook
        or runtime.launch_exit_hook
        or runtime.add_stages_inspection_hook is not None
        or kernel.pre_run_hooks
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
