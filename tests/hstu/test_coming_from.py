"""book/coming_from.md: every argument of theirs is there, and every name of ours exists."""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest

import gdpa_kernels
from gdpa_kernels import Mask, gdpa
from gdpa_kernels.hstu import HSTULayer, adapters
from gdpa_kernels.serving import Pages

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "book" / "coming_from.md").read_text(encoding="utf-8")
FIELDS = {field.name for kind in (Mask, Pages) for field in dataclasses.fields(kind)}
ARGUMENTS = {name for f in (gdpa, HSTULayer) for name in inspect.signature(f).parameters}
OTHERS = {"None", "values()", "offsets()", "examples/torchrec_embeddings.py"}
ROWS = re.findall(r"^\| (.+) \| (.+) \|$", PAGE, flags=re.MULTILINE)


def names_in(cells) -> set[str]:
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def exists(name: str) -> bool:
    if name in FIELDS | ARGUMENTS | OTHERS:
        return True
    owner, parts = gdpa_kernels, name.split(".")
    for i, part in enumerate(parts):
        if inspect.ismodule(owner) and not hasattr(owner, part):
            importlib.import_module(f"{owner.__name__}.{part}")
        if not hasattr(owner, part) and i < len(parts):
            return False
        owner = getattr(owner, part)
    return True


def test_every_name_of_ours_exists():
    ours = names_in(row[1] for row in ROWS if row[0] != "theirs")
    assert len(ours) > 30 and all(map(exists, ours))
    assert (ROOT / "examples/torchrec_embeddings.py").exists()
    with pytest.raises(ModuleNotFoundError):
        exists("hstu.no_such_name")


@pytest.mark.parametrize(
    "function",
    (
        adapters.hstu_mha, adapters.delta_hstu_mha, adapters.hstu_attn_varlen_func,
        adapters.hstu_attention_forward,
    ),
    ids=lambda function: function.__name__,
)  # fmt: skip
def test_every_argument_of_theirs_is_there(function):
    theirs = names_in(row[0] for row in ROWS)
    wanted = {name.removesuffix("_tensor") for name in inspect.signature(function).parameters}
    assert not wanted - theirs - {"options"}


def test_the_page_is_short():
    assert len(re.sub(r"[|`-]+", " ", PAGE).split()) < 500
