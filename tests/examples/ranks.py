"""Processes of a run, started as torchrun starts them."""

import os
import socket
import subprocess
import sys
from pathlib import Path


def start(ranks: int, script: Path, *arguments: object) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"LOCAL_WORLD_SIZE": ranks, "OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "lo"}
    return [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {k: str(v) for k, v in {**common, "RANK": r, "LOCAL_RANK": r}.items()},
        )
        for r in range(ranks)
    ]  # fmt: skip


def printed(ranks: int, script: Path, *arguments: object) -> str:
    """What rank 0 prints."""
    said = []
    for process in start(ranks, script, *arguments):
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-2000:]
        said.append(out)
    return said[0]
