import json
import math
import os
import re
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gdpa_kernels
from gdpa_lab.measuring import record, refusals, sources, system
from gdpa_lab.measuring.record import Error, Record, RecordError, Row, Table
from tests import records
from tests.records import CEILINGS, PROTOCOL, SHORT, STATE, committed

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def version(monkeypatch):
    monkeypatch.setattr(gdpa_kernels, "__version__", "0.1.0", raising=False)


def a_row(**values) -> Row:
    known = {"samples_us": [900.5, 901.0, 899.25], "config": {"BLOCK_M": 128, "num_warps": 8}}
    return records.a_row(SHORT, **known | {"peak_bytes": 1 << 30} | values)


def a_schedule(**values) -> Row:
    """A row whose times no ceiling bounds."""
    return a_row(**{"impl": "longest_first", "scope": "schedule", "error": None, **values})


def a_record(rows=None, **values) -> Record:
    after = STATE | {"sm_clock_mhz": 1980.0, "throttle_reasons": ["sw_power_cap"]}
    made = record.new_record(
        command="make measure NOTEBOOKS=measuring/roofline", notebook=None,
        system=system.describe(), state={"before": STATE, "after": after}, protocol=PROTOCOL,
        workloads=[SHORT], rows=[a_row()] if rows is None else rows, ceilings=CEILINGS,
        tables={"errors": Table(("x", "gelu_tanh"), ((-1.5, 1e-4), (0, None)))},
    )  # fmt: skip
    return replace(made, **values)


@pytest.fixture
def data_dir(tmp_path):
    system.save(system.describe(), tmp_path)
    return tmp_path


def refused(data_dir: Path, change) -> str:
    """Write a good record and one changed by `change`; return why only the second is refused."""
    good = record.write(a_record(), data_dir)
    data = json.loads(good.read_text())
    data["id"] = f"{good.stem}-damaged"
    changed = change(data)
    if changed is None:
        changed = json.dumps(data | {"digest": refusals.digest(data)}).encode()
    damaged = good.with_name(f"{good.stem}-damaged.json")
    damaged.write_bytes(changed)
    loaded, (error,) = record.survey(data_dir)
    assert [r.id for r in loaded] == [good.stem]
    assert str(error).startswith(f"records/{damaged.name}: ")
    with pytest.raises(RecordError, match=f"records: 1 refused\nrefused records/{damaged.name}: "):
        record.load_all(data_dir)
    assert len(error.reason) < 400
    return error.reason


def test_round_trip(data_dir):
    made = a_record()
    path = record.write(made, data_dir)
    assert path == data_dir / "records" / f"{made.id}.json"
    assert record.load(path) == made
    assert record.load_all(data_dir) == [made]
    assert made.workload(SHORT.name) == SHORT
    with pytest.raises(LookupError, match="gdpa-self-full-256"):
        made.workload("other")


def test_numbers_are_kept_exactly_and_on_one_line(data_dir):
    samples = (0.1, 1e-3, 1234.5678901234567, 3.0)
    path = record.write(a_record([a_schedule(samples_us=samples)]), data_dir)
    assert record.load(path).rows[0].samples_us == samples
    assert '"samples_us": [ 0.1, 0.001, 1234.5678901234567, 3.0 ]' in path.read_text()


@settings(deadline=None)
@given(
    samples=st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=5),
    texts=st.lists(st.text(), min_size=1, max_size=3),
    numbers=st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=3),
)
def test_any_value_survives_the_file_format(samples, texts, numbers):
    config = {"notes": texts, "numbers": numbers}
    row = a_schedule(samples_us=samples, variant=texts[0], config=config)
    data = a_record([row]).to_dict()
    assert json.loads(record._dumps(data)) == data
    assert Record.from_dict(json.loads(record._dumps(data))).to_dict() == data


def test_records_are_append_only(data_dir):
    made = a_record()
    path = record.write(made, data_dir)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="append-only"):
        record.write(replace(made, command="other"), data_dir)
    assert path.read_bytes() == before


def test_a_missing_folder_holds_no_records(tmp_path):
    assert record.load_all(tmp_path) == []
    with pytest.raises(RecordError, match="must be a folder with records/ and systems/"):
        record.load_all(tmp_path / "elsewhere")


def test_oldest_first(data_dir):
    late = a_record(id="20261121T000000Z-a", created="2026-11-21T00:00:00Z")
    early = a_record(id="20261120T235959Z-b", created="2026-11-20T23:59:59Z")
    record.write(late, data_dir)
    record.write(early, data_dir)
    assert record.load_all(data_dir) == [early, late]


def put(value, *path):
    """A change of the value at a path in a record."""

    def change(data):
        *outer, last = path
        reduce(getitem, outer, data)[last] = value

    return change


def drop(*path):
    def change(data):
        *outer, last = path
        del reduce(getitem, outer, data)[last]

    return change


COUNTS = {"flops": 154618822656, "bytes_read": 3 * 301989888, "bytes_written": 301989888}
LAW = {"kind": "log_normal", "sigma": 1e308, "loc": 0.0, "scale": 1.0, "minimum": 1}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: json.dumps(d)[:-200].encode(), "cut short"),
        (lambda d: b"", "cut short"),
        (lambda d: b"\x89PNG\xff", "utf-8"),
        (lambda d: b"\xef\xbb\xbf{}", "BOM"),
        (lambda d: b"null", "no schema_version"),
        (lambda d: b"[" * 100_000, "nested too deeply"),
        (lambda d: b'{"schema_version": 1' + b"0" * 5000 + b"}", "."),
        (lambda d: b'{"id": 1, "id": 2}', r"unique, got \['id'\] twice"),
        (put(2, "schema_version"), "at most 1, got the newer 2"),
        (put("1", "schema_version"), "no schema_version"),
        (put(0, "schema_version"), "schema_version must be same as const definition: 1, got 0"),
        (drop("protocol"), r"^must contain \['protocol'\]"),
        (drop("rows", 0, "impl"), r"rows\[0\] must contain \['impl'\]"),
        (drop("state", "after", "power_w"), r"state.after must contain \['power_w'\]"),
        (put(1, "rows", 0, "surprise"), r"rows\[0\] must not contain {'surprise'}"),
        (put(math.nan, "rows", 0, "samples_us", 1), r"rows\[0\].samples_us\[1\] must be a finite"),
        (put(math.inf, "state", "before", "power_w"), "state.before.power_w must be a finite"),
        (put(math.nan, "rows", 0, "config", "x"), r"rows\[0\].config.x must be a finite"),
        (put(-1.0, "rows", 0, "samples_us", 0), r"samples_us\[0\] must .*, got -1.0"),
        (put("fast", "rows", 0, "samples_us", 0), r"samples_us\[0\] must be number, got 'fast'"),
        (put("sideways", "rows", 0, "direction"), "direction must be one of .*, got 'sideways'"),
        (put([*range(10_000)], "rows", 0, "direction"), r"direction must .*, got \[0, 1, "),
        (put("2026-13-01T00:00:00Z", "created"), "created must be a date and time"),
        (put("yesterday", "created"), "created must match pattern .*, got 'yesterday'"),
        (put("gdpa-other", "rows", 0, "workload"), r"rows\[0\].workload must be one of"),
        (put({}, "workloads", SHORT.name), f"workloads.{SHORT.name}: "),
        (put("x", "workloads", SHORT.name, "name"), "name must be its key, got 'x'"),
        (put(0, "ceilings", 1, "bytes_written"), r"ceilings\[1\].bytes_written must .* 1, got 0"),
        (put([1.0], "tables", "errors", "rows", 0), r"tables.errors.rows\[0\] must have 2 values"),
        (put(0.5, "rows", 0, "error", "max_abs"), "at most the budget 0.002 to pass, got 0.5"),
        (put(None, "rows", 0, "error", "max_abs"), "to pass, got None"),
        (put(None, "rows", 0, "error"), "a check of the output before a kernel or op is timed"),
        (put(False, "rows", 0, "error", "passed"), "must be empty behind a failed check"),
        (put("out of memory", "rows", 0, "failure"), "null when there are samples"),
        (put([], "rows", 0, "samples_us"), "must say why there are no samples"),
        (lambda d: d["rows"].append(d["rows"][0]), r"rows\[1\] must differ from rows\[0\]"),
        (put(10**400, "rows", 0, "flops"), "flops must be .* an integer of at most 63 bits"),
        (put(10**30, "workloads", SHORT.name, "batch"), "batch must be .* got int 1000"),
        (put("\ud800", "rows", 0, "variant"), "variant must be .* text, or null, got str"),
        (put("../../x", "rows", 0, "impl"), r"rows\[0\].impl must match pattern .*, got '../../x'"),
        (put("v1_tiled\n", "rows", 0, "impl"), "impl must match"),
        (put(SHORT.to_dict(), "workloads", "../../x"), "workloads must be named by propertyName"),
        (put("magic", "rows", 0, "math"), "math must be one of .*, got 'magic'"),
        (put(None, "rows", 0, "samples_us"), "samples_us must be array, got None"),
        (put(1e308, "rows", 0, "samples_us", 0), "must be smaller than .*, got 1e.308"),
        (put("2026-11-20T00:00:00Z", "created"), "id must begin with the time of created"),
        (put("nvidia-b200-0123abcd", "system"), "'nvidia-b200-0123abcd', which is not"),
        (put("../../etc", "system"), "system must match pattern .*, got '../../etc'"),
        (put("block_attention", "rows", 0, "operator"),
         r"rows\[0\].operator must be 'gdpa', its workload's, got 'block_attention'$"),
        *((put(right * factor, "rows", 0, name),
           rf"rows\[0\].{name} must be {right}, its workload's, got {right * factor}$")
          for name, right in COUNTS.items() for factor in (0, 10)),
        (put(SHORT.batch // 2, "workloads", SHORT.name, "batch"),
         r"rows\[0\].flops must be 77309411328, its workload's, got 154618822656$"),
        (put("rotary", "rows", 0, "math"), "must have rotary"),
        (put(10**12, "workloads", SHORT.name, "batch"),
         f"workloads.{SHORT.name}.batch must be at most 1048576$"),
        (put(LAW, "workloads", SHORT.name, "lengths_q"),
         rf"rows\[0\]: the work of '{SHORT.name}' cannot be counted: "),
    ],
)  # fmt: skip
def test_damage_is_refused_by_name_and_the_others_load(data_dir, change, reason):
    found = refused(data_dir, change)
    assert re.search(reason, found), found


def test_a_copy_under_another_name_is_a_duplicate(data_dir):
    good = record.write(a_record(), data_dir)
    copy = good.with_name("copy.json")
    copy.write_bytes(good.read_bytes())
    loaded, (error,) = record.survey(data_dir)
    assert [r.id for r in loaded] == [good.stem]
    assert error.file == copy
    reason = f"must be named {good.name}, after its id"
    assert error.reason == f"{reason} (a duplicate of that file)"
    good.rename(good.with_suffix(".JSON"))
    copy.unlink()
    _, (error,) = record.survey(data_dir)
    assert error.reason == reason


def test_what_is_no_file_is_refused(data_dir):
    folder = data_dir / "records"
    (folder / "folder.json").mkdir(parents=True)
    os.mkfifo(folder / "pipe.json")
    (folder / "dangling.json").symlink_to(folder / "nowhere")
    (folder / "device.json").symlink_to("/dev/zero")
    (folder / "notes.txt").write_text("not a record")
    (folder / ".hidden").write_text("an editor's, and no record")
    loaded, errors = record.survey(data_dir)
    assert loaded == []
    assert [(error.file.stem, error.reason[:18]) for error in errors] == [
        ("dangling", "cannot be read: No"),
        ("device", "must be a file"),
        ("folder", "must be a file"),
        ("notes", "not JSON, or cut s"),
        ("pipe", "must be a file"),
    ]


def test_a_missing_or_damaged_system_is_refused(data_dir):
    made = a_record()
    record.write(made, data_dir)
    path = data_dir / "systems" / f"{made.system}.json"
    for damaged, reason in (
        (path.read_bytes().replace(b'"torch": "', b'"torch": "9'), "id must be"),
        (b"[" * 100_000, "recursion"),
        (path.read_text().encode("utf-16"), "utf-8"),
    ):
        path.write_bytes(damaged)
        _, (error,) = record.survey(data_dir)
        assert f"systems/{path.name}: " in error.reason and reason in error.reason
    path.unlink()
    _, (error,) = record.survey(data_dir)
    assert "which is not" in error.reason
    with pytest.raises(RecordError, match="which is not"):
        record.write(replace(made, id=f"{made.id}-other"), data_dir)
    path.mkdir()
    _, (error,) = record.survey(data_dir)
    assert error.reason == f"systems/{path.name}: must be a file"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"samples_us": [math.nan]}, "finite"),
        ({"error": Error.judge(1.0, 0.5, elements=1)}, "behind a failed check"),
        ({"config": {"device": Path("x")}}, "config.device must be .*, got PosixPath"),
        ({"config": {1: "x"}}, "config must have text as keys, got 1"),
        ({"flops": np.int64(1)}, "flops must be .* got int64"),
    ],
)
def test_a_bad_record_is_not_written(data_dir, row, reason):
    with pytest.raises(RecordError, match=reason):
        record.write(a_record([a_row(**row)]), data_dir)
    assert list(data_dir.glob("records/*")) == []


def test_failed_rows_stay(data_dir):
    error, infinite = Error.judge(math.nan, 2e-3, elements=9), "output is not finite"
    rows = [
        a_row(impl="v0_eager", samples_us=[], error=None, failure="out of memory"),
        a_row(samples_us=[], error=error, failure=infinite),
        a_schedule(),
    ]
    path = record.write(a_record(rows), data_dir)
    assert record.load(path).rows == tuple(rows)
    assert rows[1].error == Error(None, 2e-3, False, 9)


def test_judge():
    assert Error.judge(2e-3, 2e-3, elements=1).passed
    assert not Error.judge(3e-3, 2e-3, elements=1).passed
    assert Error.judge(math.inf, 2e-3, elements=1).max_abs is None


PACKAGE = ["gdpa_kernels/a.py", "gdpa_kernels/gdpa/kernels/v1_tiled.py"]


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.delenv(record.COMMIT_VARIABLE, raising=False)
    for name in (*PACKAGE, "notebooks/04_v1.py"):
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    return tmp_path / "checkout"


def test_sources_are_the_package_and_the_notebook(root):
    package = record.package_state(notebook="notebooks/04_v1.py", root=root)
    assert sorted(package.sources) == [*PACKAGE, "notebooks/04_v1.py"]
    assert package.sources["gdpa_kernels/a.py"] == record.source_hash(root / "gdpa_kernels/a.py")
    with pytest.raises(FileNotFoundError, match=r"05_v2\.py"):
        record.package_state(notebook="notebooks/05_v2.py", root=root)


def test_sources_hold_the_modules_beside_a_notebook(root):
    for name in ("notebooks/part/a.py", "notebooks/part/_of_part.py", "notebooks/other/_x.py"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("")
    package = record.package_state(notebook="notebooks/part/a.py", root=root)
    beside = ["notebooks/part/_of_part.py", "notebooks/part/a.py"]
    assert sorted(package.sources) == [*PACKAGE, *beside]


CODE = '''"""Of the module."""

X = "# no comment"  # a comment


class A:
    """Of the class: µs."""; Y = 1

    def f(self): "short"

    def g(self):
        """Of the
        function."""
        # before
        text = """
# no comment
"""
        return text
'''
SAME = {
    "Of the module": "Of\n\nthis module",
    "Of the class: µs": "µs\n    of",
    "Of the\n        function.": "Of the function.",
    '"short"': "'other'",
    "# a comment": "# another",
    "        # before\n": "",
    "class A": "\n\nclass A",
    "return text": "return text  ",
}
OTHER_CODE = {
    "# no comment": "# one",
    '\n# no comment\n"': '\n"',
    "Y = 1": "Y = 2",
    " return text": " return  text",
    '''        """Of the\n        function."""\n''': "",
}


@pytest.mark.parametrize("old", SAME | OTHER_CODE)
def test_code_is_what_runs(tmp_path, old):
    path, other = tmp_path / "a.py", tmp_path / "b.py"
    assert old in CODE
    path.write_text(CODE)
    other.write_text(CODE.replace(old, (SAME | OTHER_CODE)[old]))
    assert record.source_hash(path) != record.source_hash(other)
    assert (record.code_hash(path) == record.code_hash(other)) is (old in SAME)


def test_the_code_that_ran_is_known_by_what_runs(root):
    name = "gdpa_kernels/a.py"
    package = record.package_state(root=root)
    older = replace(package, code=None)
    assert package.ran([name], root) and older.ran([name], root)
    (root / name).write_text("# another comment\n")
    assert package.ran([name], root) and not older.ran([name], root)
    (root / name).write_text("x = 1\n")
    assert not package.ran([name], root) and not older.ran([name], root)
    (root / "gdpa_kernels/b.py").write_text("")
    assert not package.ran(["gdpa_kernels/b.py"], root)


LAUNCH = {
    "kernel": "gdpa_kernels.gdpa.kernels.v1_tiled:tiled_kernel", "code": "0123456789abcdef",
    "compiler": "fbtriton 3.7.4", "arch": 90, "signature": {"q_ptr": "*bf16", "GROUP": "constexpr"},
    "attributes": {"q_ptr": [["tt.divisibility", 16]]}, "constants": {"GROUP": 1},
    "options": {"num_warps": 8},
}  # fmt: skip


def test_what_rows_launch_alike_stands_in_a_record_once(data_dir):
    other = {**LAUNCH, "code": "fedcba9876543210"}
    launches = [(LAUNCH,), (other, LAUNCH), (), None]
    rows = [a_row(variant=str(i), launches=seen) for i, seen in enumerate(launches)]
    path = record.write(a_record(rows), data_dir)
    kept = json.loads(path.read_text())
    assert kept["launches"] == [LAUNCH, other]
    assert [row["launches"] for row in kept["rows"]] == [[0], [1, 0], [], None]
    assert [row.launches for row in record.load(path).rows] == launches


def test_a_launch_that_is_not_there_is_refused():
    data = a_record([a_row(launches=[LAUNCH])]).to_dict()
    data["rows"][0]["launches"] = [0, 1]
    assert refusals.refusal(data) == "rows[0].launches must be below 1, of launches, got [0, 1]"
    data["launches"][0]["code"] = "SASS"
    assert "launches[0].code" in refusals.refusal(data)


def test_commit_of_a_checkout(root, monkeypatch):
    head = committed(root)
    monkeypatch.setenv(record.COMMIT_VARIABLE, "b" * 40)
    package = record.package_state(notebook="notebooks/04_v1.py", root=root)
    assert (package.commit, package.dirty) == (head, False)
    (root / "data").mkdir()
    (root / "data" / "new.json").write_text("{}")
    assert record.package_state(root=root).dirty is False
    (root / "notebooks/04_v1.py").write_text("changed")
    assert record.package_state(root=root).dirty is False
    assert record.package_state(notebook="notebooks/04_v1.py", root=root).dirty is True
    (root / "gdpa_kernels" / "new.py").write_text("")
    assert record.package_state(root=root).dirty is True
    assert record.package_state(root=root, commit=head).commit == head
    with pytest.raises(ValueError, match=f"commit must be the checkout's {head}, got aaaa"):
        record.package_state(root=root, commit="a" * 40)


def test_the_commit_of_what_ran_is_found_by_its_sources(root):
    """What ran before it was committed; and no commit, where it was not."""
    head = committed(root)
    file = root / "gdpa_kernels" / "new.py"
    assert record.package_state(root=root).committed(root) == head
    file.write_text("ran = 1")
    ran = record.package_state(root=root)
    assert (ran.commit, ran.dirty, ran.committed(root)) == (head, True, "")
    sources._later.cache_clear()
    (root / "gdpa_kernels" / "other.py").write_text("")
    later = committed(root)
    file.write_text("ran = 2")
    committed(root)
    assert ran.committed(root) == later != head
    never = replace(ran, sources=ran.sources | {"gdpa_kernels/new.py": "0" * 64})
    assert never.committed(root) == ""
    for unknown in (None, "a" * 40):
        assert replace(ran, commit=unknown).committed(root) is None
    assert ran.committed(root / "gdpa_kernels" / "nowhere") is None


def test_commit_without_a_checkout(root, monkeypatch):
    assert record.package_state(root=root).commit is None
    monkeypatch.setenv(record.COMMIT_VARIABLE, "b" * 40)
    package = record.package_state(root=root)
    assert (package.commit, package.dirty) == ("b" * 40, None)
    assert record.package_state(root=root, commit="a" * 40).commit == "a" * 40
    monkeypatch.setenv(record.COMMIT_VARIABLE, "main")
    with pytest.raises(ValueError, match="GDPA_KERNELS_COMMIT must be 40 hex digits, got 'main'"):
        record.package_state(root=root)


def test_a_folder_inside_another_checkout_has_no_commit(root):
    committed(root.parent)
    assert record.package_state(root=root).commit is None


def keys_of(schema):
    for name, value in schema.get("properties", {}).items():
        yield name
        yield from keys_of(value)
    for value in schema.get("$defs", {}).values():
        yield from keys_of(value)


def test_the_dictionary_explains_every_key():
    text = (ROOT / "data" / "README.md").read_text()
    schema = json.loads((ROOT / "lab/gdpa_lab/measuring/record.schema.json").read_text())
    keys = {*keys_of(schema), *system.describe().to_dict()}
    assert [key for key in keys if f"`{key}`" not in text] == []
