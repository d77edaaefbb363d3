"""`python -m gdpa_lab`: asking what there is imports nothing that takes seconds."""

import subprocess
import sys

import pytest

from gdpa_lab import __main__

HEAVY = ("torch", "triton", "pandas", "numpy", "matplotlib", "gdpa_kernels")
PROGRAM = """
import runpy, sys
try:
    runpy.run_module("gdpa_lab", run_name="__main__", alter_sys=True)
except SystemExit as end:
    sys.exit(end.code or " ".join({*sys.modules} & {*"%s".split()}))
"""
COMMANDS = ("", "doctor", "results", "keep", "maintain", "predictions", "steps")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_no_large_package(command):
    program = PROGRAM % " ".join(HEAVY)
    arguments = [*command.split(), "--help"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True
    )
    assert done.stdout.startswith(f"usage: python -m gdpa_lab {command}".rstrip())
    assert done.stderr == "\n"


def test_every_command_is_asked():
    assert {*COMMANDS[1:]} == __main__.COMMANDS.keys()
