"""Options that decide what a launch does and what is judged: of the command and of pytest."""

import argparse
from collections.abc import Callable
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
_ALLOW: dict[str, Any] = {"action": "store_const", "const": "allow", "default": "error"}
JUDGED: dict[str, dict[str, Any]] = {
    "arch": {"choices": ARCHITECTURES, "default": "sm_90", "help": "of the GPU (default sm_90)"},
    "multiprocessors": {
        "type": positive, "metavar": "N", "default": FAKE_MULTIPROCESSORS,
        "help": f"of that GPU, for persistent programs (default {FAKE_MULTIPROCESSORS})",
    },
    "all_configs": _FLAG | {
        "help": "run every configuration of an autotuned kernel, not the first that fits",
    },
    "uninitialized": _ALLOW | {"help": "reads of unwritten memory yield NaN"},
    "unguarded": _ALLOW | {"help": "warps of a program need no barrier of their own"},
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
"""Keywords of `enabled`, as argparse and pytest define them as options."""


def _flag(name: str, begin: str) -> str:
    allow = "allow-" if JUDGED[name].get("const") == "allow" else ""
    return f"{begin}{allow}{name.replace('_', '-')}"


def add_options(add: Callable[..., Any], begin: str = "--") -> None:
    """Define all as flags with this prefix."""
    for name, how in JUDGED.items():
        add(_flag(name, begin), **how)


def keywords(options: argparse.Namespace, begin: str = "--") -> dict[str, Any]:
    """Collect the keywords of `enabled` from parsed options."""
    attributes = {name: _flag(name, begin)[2:].replace("-", "_") for name in JUDGED}
    return {name: getattr(options, attribute) for name, attribute in attributes.items()}


def repeated(options: argparse.Namespace, begin: str = "--", *always: str) -> list[str]:
    """List the flags of what is not as by default, and of `always`."""
    words = []
    for name, value in keywords(options, begin).items():
        if name in always or value != JUDGED[name]["default"]:
            words.append(_flag(name, begin))
            words += [] if "action" in JUDGED[name] else [str(value)]
    return words
