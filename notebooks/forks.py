"""Kernels of Jupyter that are forked from one process, which has imported what chapters import.

Of the seconds that a short chapter takes, imports are half. `METADATA` in a kernel's specification
asks for such a kernel. The process that forks is started with the first, in the environment that
`os.environ` then says.
"""

import multiprocessing
import os
from importlib.metadata import EntryPoint

from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

METADATA = {"kernel_provisioner": {"provisioner_name": "forked"}}
IMPORTED = [
    "__main__",  # of who asks: else every kernel imports it
    *("torch", "triton", "pandas", "matplotlib.pyplot", "seaborn", "ipykernel.kernelapp"),
    *("gdpa_kernels", "gdpa_lab.report.chapter", "tritonemu"),
]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(IMPORTED)


def run(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """Be a kernel: what `python -m ipykernel_launcher` is with these arguments."""
    from ipykernel import kernelapp

    os.setsid()
    os.chdir(folder)
    os.environ.update(environment)
    kernelapp.launch_new_instance(arguments)


class Process(CONTEXT.Process):
    """With what a provisioner asks of a `subprocess.Popen`."""

    stdin = stdout = stderr = None

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self) -> int | None:
        self.join()
        return self.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class Forked(LocalProvisioner):
    """Starts `python -m ipykernel_launcher ARGUMENTS` as a fork."""

    async def launch_kernel(self, cmd: list[str], **kwargs):
        _, _, _, *arguments = cmd
        self.cwd = kwargs.get("cwd", os.getcwd())
        self.process = Process(target=run, args=(arguments, kwargs["env"], self.cwd))
        self.process.start()
        self.pid = self.process.pid
        return self.connection_info


KernelProvisionerFactory.instance().provisioners["forked"] = EntryPoint(
    "forked", f"{__name__}:Forked", KernelProvisionerFactory.GROUP_NAME
)
