"""A GPU that is not there: host code written for one runs unedited, its tensors are on the CPU.

`fake_gpu` answers what programs ask of `torch.cuda` and of Triton's driver. "cuda" becomes the CPU
wherever PyTorch takes a device, and `x.device`, `x.is_cuda` say what they would say: a tensor is on
the GPU if it was made or moved there, or computed from one that is; moving it copies it. Operators
for CUDA are the CPU's. Kernels run only inside `tritonemu.enabled`.
"""

import contextlib
import functools
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import triton
import triton.testing
from torch.overrides import TorchFunctionMode
from torch.utils import _device
from triton._C import libtriton
from triton.tools.tensor_descriptor import TensorDescriptor

from . import unwritten
from .compiler import target_of
from .errors import Unsupported
from .launch import REGISTERS, SHARED_BYTES

try:
    from triton.experimental.gluon import language as _gluon
    from triton.experimental.gluon.nvidia import hopper as _hopper
except ImportError:  # Triton without Gluon
    _gluon = _hopper = None

_OF_GLUON = ("TensorDescriptor", "TensorDescriptorIm2Col")
HOST_DESCRIPTORS = (
    TensorDescriptor,
    *(getattr(_hopper, name) for name in _OF_GLUON if hasattr(_hopper, name)),
)


def has_gluon() -> bool:
    """Return whether this Triton's Gluon is the one of 3.9, whose names the emulator has."""
    return hasattr(_gluon, "inline_asm")


FAKE_MULTIPROCESSORS = 4  # few, so that persistent programs share work; clusters of 2 and 4 fit

_NAMES = {"sm_90": "NVIDIA H200", "sm_100": "NVIDIA B200"}
ARCHITECTURES = tuple(_NAMES)
_MEMORY = {"sm_90": 141 << 30, "sm_100": 180 << 30}
_GPU = torch.device("cuda", 0)
_HOST = "_tritonemu_host"  # a tensor's attribute: it is on the CPU of the program, too, and how


def check_arch(arch: str) -> None:
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch must be one of {ARCHITECTURES}, got {arch!r}")


def _properties(arch: str, multiprocessors: int) -> dict[str, Any]:
    major, minor = divmod(int(arch.removeprefix("sm_")), 10)
    return {
        "name": _NAMES[arch],
        "major": major,
        "minor": minor,
        "total_memory": _MEMORY[arch],
        "multi_processor_count": multiprocessors,
        "warp_size": 32,
        "max_threads_per_block": 1024,
        "max_threads_per_multi_processor": 2048,
        "regs_per_multiprocessor": REGISTERS,
        "shared_memory_per_block": 49152,
        "shared_memory_per_block_optin": SHARED_BYTES,
        "shared_memory_per_multiprocessor": 233472,
        "L2_cache_size": 50 << 20,
    }


_CLOCKS = {"sm_clock_rate": 1_980_000, "mem_clock_rate": 3_201_000}  # kHz


def _nvidia_smi(attributes: list[str]) -> list[int]:
    """Answer `nvidia-smi` queries of Triton's performance models: clocks, in MHz."""
    kinds = {"sm": "sm", "graphics": "sm", "memory": "mem", "mem": "mem"}
    names = [kinds.get(each.rpartition(".")[2], "") for each in attributes]
    return [_CLOCKS.get(f"{name}_clock_rate", 0) // 1000 for name in names]


def _driver(arch: str, multiprocessors: int) -> types.SimpleNamespace:
    """Build the answers of Triton's driver on such a device."""
    target = target_of(arch)
    known = {
        "multiprocessor_count": multiprocessors,
        "max_shared_mem": SHARED_BYTES,
        "max_num_regs": REGISTERS,
        "warpSize": 32,
        **_CLOCKS,
        "mem_bus_width": 6144,
    }
    return types.SimpleNamespace(
        target=target,
        utils=types.SimpleNamespace(get_device_properties=lambda device=0: dict(known)),
        get_current_target=lambda: target,
        get_active_torch_device=lambda: _GPU,
        get_device_interface=lambda: torch.cuda,
        get_current_device=lambda: 0,
        set_current_device=lambda device: None,
        get_current_stream=lambda device=None: 0,
        get_benchmarker=lambda: _do_bench,
        get_empty_cache_for_benchmark=lambda: torch.empty(1, dtype=torch.int32),
        clear_cache=lambda cache: None,
    )


class _Stream(contextlib.AbstractContextManager):
    """Stream or event that never waits: work is done when it is asked for."""

    cuda_stream, device, device_index = 0, _GPU, 0

    def __init__(self, *args: Any, **kwargs: Any):
        self.time = 0.0

    def nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    synchronize = wait = wait_stream = wait_event = __exit__ = nothing

    def query(self) -> bool:
        return True

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def record_event(self, event: Any = None) -> "_Stream":
        return event or _Stream()

    def elapsed_time(self, end: "_Stream") -> float:
        return 1e3 * (end.time - self.time)


class _Generator(torch.Generator):
    """CPU generator with the offset, and the state of two words, that those of a GPU have."""

    offset = 0

    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        generator = super().__new__(cls, "cpu")
        generator.states = {}
        return generator

    def get_state(self) -> torch.Tensor:
        now = super().get_state()
        while not self.states.setdefault((self.initial_seed(), self.offset), now).equal(now):
            self.offset += 4  # PyTorch has drawn
        words = torch.tensor([self.initial_seed(), self.offset], dtype=torch.uint64)
        return words.view(torch.uint8)

    def set_state(self, state: torch.Tensor) -> torch.Generator:
        seed, offset = state.view(torch.uint64).tolist()
        self.manual_seed(seed)
        self.offset = offset
        if (seed, offset) in self.states:
            super().set_state(self.states[seed, offset])
        return self

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset

    def manual_seed(self, seed: int) -> torch.Generator:
        self.offset = 0
        return super().manual_seed(seed)


def _do_bench(fn: Callable, *args: Any, quantiles: Any = None, **kwargs: Any) -> Any:
    """Run one call; its milliseconds on the CPU say nothing of a GPU."""
    start = time.perf_counter()
    fn()
    milliseconds = 1e3 * (time.perf_counter() - start)
    return [milliseconds] * len(quantiles) if quantiles else milliseconds


class _CublasLt:
    """Part of Triton's bindings of cuBLAS that PyTorch can compute on a CPU; b is [N, K]."""

    def __init__(self, workspace: torch.Tensor):
        pass

    def matmul(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        self.gemm(a, b, c, c, 1.0, 0.0)

    def gemm(
        self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, alpha: float,
        beta: float,
    ) -> None:  # fmt: skip
        product = alpha * (a.to(torch.float32) @ b.to(torch.float32).T)
        d.copy_(product + beta * c.to(torch.float32) if beta else product)

    def __getattr__(self, name: str) -> Callable:
        raise Unsupported(f"cuBLAS: {name}", ("", 0))


def _compile(model: Any = None, **options: Any) -> Any:
    """Replace `torch.compile`, which leaves functions and modules as they are."""
    return model if model is not None else lambda function: function


_SKIPPED = "tritonemu: a triton.testing benchmark is skipped"


def _reading(function: Callable) -> Callable:
    """Wrap an assertion of PyTorch, which hides errors of its calls: tensors are read here."""

    @functools.wraps(function)
    def read(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            for tensor in tensors_of((args, kwargs)):
                unwritten.read(function, tensor)
        return function(*args, **kwargs)

    return read


def _is_gpu(device: Any) -> bool:
    return isinstance(device, int) or str(device).partition(":")[0] == "cuda"


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, HOST_DESCRIPTORS):
        return [value.base]
    if not isinstance(value, (dict, tuple, list)):
        return []
    values = value.values() if isinstance(value, dict) else value
    return [tensor for each in values for tensor in tensors_of(each)]


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return whether a program with a pretended GPU has this tensor where no kernel reaches it."""
    return not _on_gpu(tensor) and getattr(tensor, _HOST) != "pinned"


def _on_gpu(tensor: torch.Tensor) -> bool:
    return not getattr(tensor, _HOST, "")


_ATTRIBUTES: dict[Any, Callable[[torch.Tensor], Any]] = {
    torch.Tensor.device.__get__: lambda x: _GPU if _on_gpu(x) else torch.device("cpu"),
    torch.Tensor.is_cuda.__get__: _on_gpu,
    torch.Tensor.is_cpu.__get__: lambda x: not _on_gpu(x),
    torch.Tensor.get_device: lambda x: 0 if _on_gpu(x) else -1,
}
_EMPTY = (
    *(torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted),
    *(torch.Tensor.new_empty, torch.Tensor.new_empty_strided),
)
# After which somebody may write to a tensor unseen.
_SHARE = (
    *(torch.Tensor.data.__get__, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.set_),
    *(torch.Tensor.untyped_storage, torch.Tensor.storage, torch.Tensor.__dlpack__),
    torch.Tensor.resize_,
)
# In half precision PyTorch sums their gradients in it on a CPU, and in fp32 on a GPU.
_IN_FP32 = (torch.nn.functional.layer_norm, torch.layer_norm)
_STAY = (torch.Tensor.pin_memory, torch.Tensor.record_stream)


def _in_fp32(func: Callable, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    """Compute `func` in fp32 and return the result in the dtype of the first tensor."""

    def wide(value: Any) -> Any:
        half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
        return value.float() if half else value

    first, *_ = tensors_of((args, kwargs))
    result = func(*map(wide, args), **{name: wide(value) for name, value in kwargs.items()})
    return result.to(first.dtype)


class _CudaIsCpu(TorchFunctionMode):
    """Maps devices in calls to PyTorch, and tracks which tensors would be on the GPU."""

    inside = False  # a call, where PyTorch takes the mode off

    def on_again(self, function: Callable) -> Callable:
        """Wrap a function by which PyTorch calls the program's code, so that the mode is on."""

        @functools.wraps(function)
        def under_the_mode(*args: Any, **kwargs: Any) -> Any:
            inside, self.inside = self.inside, False
            try:
                with self if inside else contextlib.nullcontext():
                    return function(*args, **kwargs)
            finally:
                self.inside = inside

        return under_the_mode

    def registering(self, impl: Callable) -> Callable:
        """Wrap `Library.impl`: what is for CUDA is for the CPU, unless something else is."""
        known: set[tuple[Any, ...]] = set()

        @functools.wraps(impl)
        def register(
            library: Any, op_name: Any, fn: Any, dispatch_key: Any = "", **how: Any
        ) -> None:
            if fn is not torch.library.fallthrough_kernel:
                fn = self.on_again(fn)
            key = dispatch_key
            if isinstance(key, str):
                key = key.replace("CUDA", "CPU")
            registration = library.ns, str(op_name), key
            if key != dispatch_key and registration in known:
                return
            with warnings.catch_warnings():
                if registration in known:
                    how["allow_override"] = True
                    warnings.simplefilter("ignore", UserWarning)
                impl(library, op_name, fn, key, **how)
            known.add(registration)

        return register

    def by_default(self) -> Callable:
        """Wrap `DeviceContext.__torch_function__`: such a context is below this mode or above
        it."""

        def answer(context: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if func in _device._device_constructors() and kwargs.get("device") is None:
                below = self.inside and _is_gpu(context.device)
                kwargs["device"] = "cpu" if below else context.device
            return func(*args, **kwargs)

        return answer

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in _ATTRIBUTES:
            # A result of C++, such as a gradient, has passed nowhere: taken for one on the GPU.
            return _ATTRIBUTES[func](args[0])
        if func in _STAY:
            if func is torch.Tensor.pin_memory:
                setattr(args[0], _HOST, "pinned")
            return args[0]
        where = "pinned" if kwargs.pop("pin_memory", False) else "host"
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = "cpu"
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            device = "cuda" if func is torch.Tensor.cuda else "cpu"
            func, args, kwargs = torch.Tensor.to, (args[0], "cpu"), {}
        elif func is torch.Tensor.to and len(args) > 1:
            if isinstance(args[1], torch.Tensor):
                device = _GPU if _on_gpu(args[1]) else "cpu"
            elif not isinstance(args[1], torch.dtype):
                device, args = args[1], (args[0], "cpu", *args[2:])
        inputs = tensors_of((args, kwargs))
        on_gpu = any(map(_on_gpu, inputs))
        if device is None and not inputs:
            device = _device.CURRENT_DEVICE
        if device is not None:
            on_gpu = _is_gpu(device)
        with torch._C.DisableTorchFunction():
            for tensor in inputs:
                unwritten.read(func, tensor)
        inside, self.inside = self.inside, True
        try:
            if func in _IN_FP32 and on_gpu:
                result = _in_fp32(func, args, kwargs)
            else:
                result = func(*args, **kwargs)
        finally:
            self.inside = inside
        with torch._C.DisableTorchFunction():  # that of a `fake_gpu` around this one
            return self._noted(func, args, kwargs, inputs, "" if on_gpu else where, result)

    @staticmethod
    def _noted(
        func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], where: str, result: Any
    ) -> Any:
        """Record which results are on the GPU and what is unwritten, and return the results."""
        unwritten.written(func, args, kwargs.get("out"), inputs)
        if func is torch.Tensor.to and result is args[0] and _on_gpu(result) == bool(where):
            result = result.clone()
        for tensor in tensors_of(result):
            if not any(tensor is each for each in inputs):
                setattr(tensor, _HOST, where)
        if func in _EMPTY and not where and kwargs.get("out") is None:
            unwritten.note(result)
        elif func in _SHARE:
            unwritten.forget(args[0])
        elif func in unwritten.COPIES and result is not args[0]:
            unwritten.copied(args[0], result)
        return result


_DO_NOTHING = (
    *("init", "synchronize", "set_device", "set_stream", "empty_cache", "ipc_collect"),
    *("seed", "seed_all", "reset_peak_memory_stats"),
)
_ARE_ZERO = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")


def _answers(arch: str, multiprocessors: int) -> dict[str, Any]:
    """Build replacements of `torch.cuda`'s functions and classes: each its own, for dynamo."""

    def constant(value: Any) -> Callable:
        return lambda *args, **kwargs: value

    properties = types.SimpleNamespace(**_properties(arch, multiprocessors))
    generator = _Generator()
    return {
        "is_available": constant(True),
        "is_initialized": constant(True),
        "is_bf16_supported": constant(True),
        "device_count": constant(1),
        "current_device": constant(0),
        "get_device_name": constant(properties.name),
        "get_device_properties": constant(properties),
        "get_device_capability": constant((properties.major, properties.minor)),
        "get_arch_list": constant([arch]),
        "mem_get_info": constant((properties.total_memory, properties.total_memory)),
        "current_stream": lambda *args: _Stream(),
        "default_stream": lambda *args: _Stream(),
        "stream": lambda stream=None: contextlib.nullcontext(stream),
        "device": lambda device=None: contextlib.nullcontext(),
        "device_of": lambda tensor=None: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": _Stream,
        "default_generators": (generator,),
        "manual_seed": lambda seed: generator.manual_seed(seed) and None,
        "manual_seed_all": lambda seed: generator.manual_seed(seed) and None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        **{name: constant(None) for name in _DO_NOTHING},
        **{name: constant(0) for name in _ARE_ZERO},
    }


def _of_accelerator(answers: dict[str, Any]) -> dict[str, Any]:
    """Build replacements of `torch.accelerator`'s functions, most named as in `torch.cuda`."""
    return {
        **{name: value for name, value in answers.items() if name != "get_device_capability"},
        "current_accelerator": lambda *args, **kwargs: torch.device("cuda"),
        **dict.fromkeys(("current_device_index", "current_device_idx"), answers["current_device"]),
        **dict.fromkeys(("set_device_index", "set_device_idx"), answers["set_device"]),
        "device_index": answers["device"],
        "get_memory_info": answers["mem_get_info"],
    }


@contextlib.contextmanager
def fake_gpu(arch: str = "sm_90", *, multiprocessors: int = FAKE_MULTIPROCESSORS) -> Iterator[None]:
    """Within this context there seems to be one GPU, `cuda:0`, with compute capability `arch`.

    arch: "sm_90", an H200, or "sm_100", a B200; with fewer `multiprocessors` than they have, so
    that persistent programs share work. For the thread that opens it.
    """
    check_arch(arch)
    accelerator = getattr(torch, "accelerator", None)
    with contextlib.ExitStack() as stack:

        def replace(target: Any, name: str, value: Any) -> None:
            if hasattr(target, name):
                stack.enter_context(mock.patch.object(target, name, value))

        replace(triton.runtime.driver, "_active", _driver(arch, multiprocessors))
        answers = _answers(arch, multiprocessors)
        for name, value in answers.items():
            replace(torch.cuda, name, value)
        for name in ("range_push", "range_pop", "mark"):
            replace(torch.cuda.nvtx, name, lambda *args, **kwargs: None)
        for name, value in _of_accelerator(answers).items():
            replace(accelerator, name, value)
        replace(getattr(libtriton.nvidia, "cublas", None), "CublasLt", _CublasLt)
        replace(torch.version, "cuda", torch.version.cuda or "12.8")
        replace(torch, "Generator", _Generator)
        replace(torch, "compile", _compile)
        replace(triton.testing, "do_bench", _do_bench)
        replace(triton.testing, "do_bench_cudagraph", _do_bench)
        replace(triton.testing.Mark, "run", lambda *args, **kwargs: print(_SKIPPED))
        replace(triton.testing, "nvsmi", _nvidia_smi)
        replace(torch.testing, "assert_close", _reading(torch.testing.assert_close))
        mode, backward = _CudaIsCpu(), torch.autograd.function.BackwardCFunction
        replace(backward, "apply", mode.on_again(backward.apply))
        replace(torch.library.Library, "impl", mode.registering(torch.library.Library.impl))
        replace(_device.DeviceContext, "__torch_function__", mode.by_default())
        stack.enter_context(mode)
        yield
