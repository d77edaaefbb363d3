"""README.md: its results are the records', its commands are the ones CI runs."""

from __future__ import annotations

import re

from gdpa_kernels.__main__ import main
from gdpa_kernels.measuring import record, system
from gdpa_kernels.measuring.workload import workload
from gdpa_kernels.report import readme
from tests.report.test_results import CEILINGS, GOOD, STATE, a_system, sources

README = (record.ROOT / "README.md").read_text(encoding="utf-8")


def test_results_are_the_records():
    block = README.split(readme.BEGIN)[1].split(readme.END)[0].strip()
    assert block == readme.ladder_block(), "run `python -m gdpa_kernels readme`"


def test_commands_exist_and_ci_runs_them():
    commands = re.findall(r"^make (\w+)", README, flags=re.MULTILINE)
    makefile = (record.ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"book", "test", "measure"} <= set(commands)
    for command in commands:
        assert re.search(f"^{command}:", makefile, flags=re.MULTILINE)
    ci = (record.ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make test" in ci and "make book" in ci


def test_python_example_runs():
    example = README.split("```python\n")[1].split("```")[0]
    scope: dict = {}
    exec(compile(example, "README.md", "exec"), scope)
    assert scope["out"].shape == (8, 4, 64)


def test_results_command_prints_the_ladder(capsys):
    assert (
        main(["results", "--format", "csv", "--system", "h200", "--workload", readme.WORKLOAD]) == 0
    )
    printed = capsys.readouterr().out
    assert printed.startswith("figure,workload,direction,impl,")
    assert "v1_tiled" in printed and "fa2_varlen" in printed


PLAIN, ROTARY = (name for name, *_ in readme.BLOCK_TABLES)


def block_record(
    data_dir, *impls: str, samples=(4000.0,), day: int = 1, name: str = PLAIN
) -> record.Record:
    """A record of the tables of block attention, forward and backward of `impls`."""
    blocks, machine = workload(name), a_system()
    system.save(machine, data_dir)
    rows = tuple(
        record.Row.of(
            blocks, direction, impl=impl, math="softmax", scope="kernel",
            samples_us=samples if impl != "fa3" else (), error=GOOD if impl != "fa3" else None,
            failure="not installed" if impl == "fa3" else None,
        )
        for impl in impls
        for direction in ("forward", "backward")
    )  # fmt: skip
    made = record.Record(
        id=f"2026110{day}T120000Z-run",
        created=f"2026-11-0{day}T12:00:00Z",
        command="make measure",
        notebook=readme.BLOCK_NOTEBOOK,
        package=record.Package("0.1.0", "a" * 40, False, sources()),
        system=machine.id,
        state={"before": STATE, "after": STATE},
        protocol=record.Protocol("cuda events", 5, 30, 0, True, "one call"),
        ceilings=CEILINGS,
        workloads={blocks.name: blocks.to_dict()},
        rows=rows,
    )
    record.write(made, data_dir)
    return made


def test_nothing_is_written_beside_a_refused_record(tmp_path, monkeypatch, capsys):
    (tmp_path / "data" / "records").mkdir(parents=True)
    (tmp_path / "data" / "records" / "cut.json").write_text("{")
    (tmp_path / "README.md").write_text(README)
    monkeypatch.setattr(readme.update, "__defaults__", (tmp_path,))
    assert main(["readme"]) == 1
    assert "refused records/cut.json: not JSON" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == README
    assert not (tmp_path / readme.FIGURE).exists()


def test_no_table_of_block_attention_without_a_record(tmp_path):
    assert readme._block_lines(tmp_path) == []


def test_the_table_of_block_attention_is_its_newest_record(tmp_path):
    block_record(tmp_path, "v0_flash", "v1_one_tile", "fa2_varlen", samples=(9000.0,))
    made = block_record(tmp_path, "v0_flash", "v1_one_tile", "fa3", "fa2_varlen", day=2)
    lines = readme._block_lines(tmp_path)
    rows = [line for line in lines if line.startswith("| `")]
    assert [re.match(r"\| `(\w+)`", row)[1] for row in rows[1:]] == [
        "v0_flash", "v1_one_tile", "fa2_varlen",
    ]  # fmt: skip
    # 4 tensors of 1,609,664 rows of 1024 bytes at 4301 GB/s in 4000 us
    percent = 100 * 4 * 1_609_664 * 1024 / (4e9 / 930e-6) / 4000e-6
    assert f"| 4.00 ms | {percent:.0f} | 4.00 ms |" in rows[2]
    assert "9.00 ms" not in "".join(lines) and made.id in lines[-1]


def test_what_turns_has_a_table_of_its_own(tmp_path):
    block_record(tmp_path, "v4_rotary", "v4a_turning_role", "rotary_kernel", name=ROTARY)
    text = "\n".join(readme._block_lines(tmp_path))
    assert f"`{ROTARY}`" in text and PLAIN not in text and text.count("| `impl` |") == 1
    assert text.index("| `v4_rotary`") < text.index("| `v4a_turning_role`")
    assert text.index("| `v4a_turning_role`") < text.index("| `rotary_kernel`")
