"""A driver in Python that stands for a GPU: kernels are compiled for sm_90 for real, and what
Triton's C function would be given is written down."""

from __future__ import annotations

import collections
import contextlib
import gc
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime.jit import JITFunction

from gdpa_kernels.calling import launch as launching
from gdpa_kernels.calling import relaunch

CUDA = torch.device("cuda", 0)
Argument = collections.namedtuple("Argument", "nested_tuple type")
Launched = collections.namedtuple(
    "Launched", "grid stream function options metadata hooks scratch signature arguments"
)


class Driver:
    """What Triton and PyTorch ask of a GPU, answered for two H100s that do not exist."""

    def __init__(self):
        self.device = 0
        self.launched: list[Launched] = []
        self.encoded = 0
        self.functions = 0
        self.launcher_cls = nvidia.CudaLauncher
        self.utils = SimpleNamespace(
            launch=self.launch,
            load_binary=self.load_binary,
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
            build_signature_metadata=lambda types: tuple(types),
            fill_tma_descriptor_tiled=self.encode,
        )

    def get_current_device(self) -> int:
        return self.device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_stream(self, device: int) -> int:
        return 70 + device

    def load_binary(self, name, binary, shared, device) -> tuple:
        self.functions += 1
        return 1, self.functions, 0, 0, 1024

    def encode(self, *arguments) -> tuple:
        self.encoded += 1
        return ("map", *(tuple(a) if isinstance(a, list) else a for a in arguments))

    def launch(
        self, x, y, z, stream, function, cooperative, pdl, packed, metadata, enter, leave,
        global_scratch, profile_scratch, annotations, signature, arguments,
    ):  # fmt: skip
        if enter:
            enter(metadata)
        kept = [
            argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
            for argument, annotation in zip(arguments, annotations, strict=False)
            if annotation.type == 1
        ]
        assert len(kept) == len(signature)
        self.launched.append(
            Launched(
                (x, y, z),
                stream,
                function,
                (cooperative, pdl, packed),
                metadata,
                (enter or None, leave or None),
                (global_scratch, profile_scratch),
                signature,
                kept,
            )  # fmt: skip
        )
        if leave:
            leave(metadata)


@contextlib.contextmanager
def installed(monkeypatch: pytest.MonkeyPatch, kernels: Iterable[JITFunction]) -> Iterator[Driver]:
    """A driver in the place of Triton's; `slow` counts the launches that Triton makes.

    What was compiled of `kernels` is forgotten before and after: it calls the driver when it is
    collected.
    """
    fake = Driver()
    for name, value in {"ARG_CONSTEXPR": 0, "ARG_KERNEL": 1, "ARG_TUPLE": 2}.items():
        monkeypatch.setattr(nvidia, name, value)
    monkeypatch.setattr(nvidia, "PyKernelArg", Argument)
    monkeypatch.setattr(triton.runtime.driver, "_active", fake)
    monkeypatch.setattr(relaunch, "_kernels", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: fake.device)
    monkeypatch.setattr(launching, "_device", None)

    class Switched:
        def __init__(self, device):
            self.device = device.index

        def __enter__(self):
            self.before, fake.device = fake.device, self.device

        def __exit__(self, *error):
            fake.device = self.before

    monkeypatch.setattr(torch.cuda, "device", Switched)
    run = JITFunction.run
    fake.slow = 0

    def counted(self, *args, **kwargs):
        fake.slow += 1
        return run(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "run", counted)
    for kernel in kernels:
        kernel.device_caches.clear()
    yield fake
    for kernel in kernels:
        kernel.device_caches.clear()
    relaunch._kernels.clear()
    gc.collect()
