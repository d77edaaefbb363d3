"""Options that decide what a launch does and what is judged: of the command and of pytest."""

import argparse
from collections.abc import Iterable
from typing import Any

from .execution import BOUNDS
from .gpu import ARCHITECTURES, FAKE_MULTIPROCESSORS
from .undefined import MODES


def positive(text: str) -> int:
    """Parse an integer of at least 1; ArgumentTypeError for others."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


_FLAG: dict[str, Any] = {"action": "store_true", "default": False}
JUDGED: dict[str, dict[str, Any]] = {
    "arch": {"choices": ARCHITECTURES, "default": "sm_90", "help": "of the GPU (default sm_90)"},
    "multiprocessors": {
        "type": positive, "metavar": "N", "default": FAKE_MULTIPROCESSORS,
        "help": f"of that GPU, for persistent programs (default {FAKE_MULTIPROCESSORS})",
    },
    "all-configs": _FLAG | {
        "help": "run every configuration of an autotuned kernel, not the first that fits",
    },
    "allow-uninitialized": _FLAG | {"help": "reads of unwritten memory yield NaN"},
    "allow-unguarded": _FLAG | {"help": "warps of a program need no barrier of their own"},
    "compile": _FLAG | {"help": "compile each launch, too, and say what is refused"},
    "masked": {
        "choices": MODES, "default": "nan", "help": "lanes off without `other` (default nan)",
    },
    "strict": _FLAG | {"help": "stores race that change no bit, too"},
    "bounds": {
        "choices": BOUNDS, "default": "tensor",
        "help": "or the memory around it, too, where a tensor is a part (default tensor)",
    },
    "resident": {
        "type": positive, "metavar": "N", "default": 1, "help": "clusters that run together",
    },
}  # fmt: skip
"""Options of `enabled` by their names, as `argparse` and pytest define them."""


def _values(options: argparse.Namespace, begin: str) -> dict[str, Any]:
    names = {name: f"{begin}{name}".removeprefix("--").replace("-", "_") for name in JUDGED}
    return {name: getattr(options, attribute) for name, attribute in names.items()}


def keywords(options: argparse.Namespace, begin: str = "--") -> dict[str, Any]:
    """Collect the keywords of `enabled` from parsed options, whose flags have this prefix."""
    keywords = {}
    for name, value in _values(options, begin).items():
        if name.startswith("allow-"):
            keywords[name.removeprefix("allow-")] = "allow" if value else "error"
        else:
            keywords[name.replace("-", "_")] = value
    return keywords


def repeated(
    options: argparse.Namespace, begin: str = "--", always: Iterable[str] = ()
) -> list[str]:
    """List the flags with this prefix that are not what they are by default, and those of
    `always`."""
    words = []
    for name, value in _values(options, begin).items():
        if name in always or value != JUDGED[name]["default"]:
            words += [f"{begin}{name}"] if value is True else [f"{begin}{name}", str(value)]
    return words
