"""Whole training steps: which scripts run, and on which GPU."""

import threading

import pytest

from _lib import steps


def test_the_scripts_of_the_checkout_are_found_and_no_others():
    assert all((steps.EXAMPLES / f"{script}.py").is_file() for script in ("step", "ranks"))
    with pytest.raises(FileNotFoundError, match="one of a checkout's examples/, got .*nothing.py"):
        steps.run("nothing")


def test_each_item_has_a_gpu_of_its_own_while_it_runs():
    both, held, seen = threading.Barrier(2), set(), []

    def work(item, gpu):
        assert gpu not in held, "two at once on one GPU"
        held.add(gpu)
        if item < 2:
            both.wait(10)  # only passes if two run at once
        seen.append(gpu)
        held.remove(gpu)
        return item

    assert steps.one_a_gpu(work, range(5), ["2", "3"]) == [*range(5)]
    assert {*seen} == {"2", "3"}


def test_the_gpus_are_the_visible_ones(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-ab")
    assert steps.gpus() == ["5", "GPU-ab"]


def test_a_script_sees_the_gpu_that_it_is_given(monkeypatch, tmp_path):
    (tmp_path / "named.py").write_text(
        "import json, os, sys\n"
        "rows = [os.environ['CUDA_VISIBLE_DEVICES']]\n"
        "open(sys.argv[-1], 'w').write(json.dumps({'rows': rows}))\n"
    )
    monkeypatch.setattr(steps, "EXAMPLES", tmp_path)
    assert steps.run("named", gpu="3") == ["3"]
