"""Times of whole training steps: the scripts of `examples/`, each in processes of its own."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Inductor compiles in this process, for its workers import Triton alone and find no TLX. NVLink's
# multicast is off: a host may not lend it.
ENVIRONMENT = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1", "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
}  # fmt: skip


def gpus() -> list[str]:
    """Names of this process's GPUs in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


def one_a_gpu(
    work: Callable[[Any, str], Any], items: Iterable[Any], names: Sequence[str]
) -> list[Any]:
    """`work(item, name)` of each item, in their order, as many at once as there are `names`."""
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        free.put(name)

    def begin(item: Any) -> Any:
        name = free.get()
        try:
            return work(item, name)
        finally:
            free.put(name)

    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(begin, items))


def run(
    script: str, *options: object, ranks: int = 1, gpu: str | None = None, timeout: float = 300
) -> list[dict]:
    """The rows that a script of `examples/` writes; what it prints goes to our output.

    `ranks`: processes under torchrun, one a GPU; one: a process without it. `gpu`: the one that it
    sees, as `gpus` names it; default: all. FileNotFoundError outside a checkout, RuntimeError with
    the end of its output, rank 0's of several, if it fails or takes longer than `timeout` seconds.
    """
    path = EXAMPLES / f"{script}.py"
    if not path.exists():
        raise FileNotFoundError(f"script must be one of a checkout's examples/, got {path}")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    seen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, *launcher * (ranks > 1), str(path), *map(str, options)]
        command += ["--out", str(out)]
        try:
            done = subprocess.run(
                command, env=os.environ | ENVIRONMENT | seen, timeout=timeout, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{script} {options} must end in {timeout} s") from error
        if done.returncode:
            lines = done.stdout.splitlines()  # torchrun's own report follows the ranks'
            said = "\n".join([line for line in lines if line.startswith("[rank0]")] or lines)
            raise RuntimeError(f"{script} {options} failed: {said[-2000:]}")
        print(done.stdout, flush=True)
        return json.loads(out.read_text())["rows"]


def link() -> str:
    """Name the link between the first two GPUs of this machine, as `nvidia-smi topo` does."""
    if torch.cuda.device_count() < 2:
        return "none"
    table = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True)
    row = next(line for line in table.stdout.splitlines() if line.startswith("GPU0"))
    return row.split()[2]
