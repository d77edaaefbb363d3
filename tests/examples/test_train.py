"""Training learns, resumes exactly, gives the same on one process and on two, and says what is
wrong in one line."""

import json
import re
import shutil
import signal
import time
from pathlib import Path

import checkpoints
import pytest
import ranks
import step
import torch
import train

from tests.examples.ranks import printed, start
from tests.tiers import sweep

SCRIPT = Path(train.__file__)
SMALL = [
    "--size", "tiny", "--layers", "1", "--items", "32", "--topics", "4", "--max-seqlen", "16",
    "--law", "lognormal", "--rows", "events", "--device", "cpu",
]  # fmt: skip
FEW = [*SMALL, "--batch", "16", "--steps", "6", "--log-every", "1", "--eval-batches", "1"]


def run(ranks: int, out: Path, *arguments: object, script: Path = SCRIPT) -> dict:
    printed(ranks, script, *arguments, "--out", out)
    return json.loads(out.read_text())


def losses(found: dict) -> list[float]:
    return list(found["losses"].values())


@pytest.mark.parametrize(
    "model", (["kunlun"], sweep(["hstu", "--layers", "2"])), ids=lambda x: x[0]
)
def test_learns(model):
    """Items alone get to an NE of 0.92 here, and the best of all models to 0.75."""
    options = [*SMALL, "--batch", "256", "--steps", "150", "--lr", "1e-2"]
    found = train.main([*options, "--attention", "eager", "--model", *model])
    assert 0.73 < found["bayes_ne"] < 0.77
    assert found["bayes_ne"] - 0.01 < found["ne"] < 0.86, "of the way, half"
    assert 0.74 < found["auc"] < found["bayes_auc"] + 0.01


QUICK = SCRIPT.with_name("quick.txt")


@pytest.mark.sweep
def test_the_quick_command_learns():
    """An eighth of its steps, with the learning rates of as many."""
    given = ["--steps", "80", "--eval-every", "80", "--eval-batches", "2", "--candidates", "20"]
    curve = train.main([f"@{QUICK}", *given])["curve"]
    assert curve[80]["ne"] < min(0.92, curve[0]["ne"] - 0.1)
    assert curve[80]["ndcg"] > curve[0]["ndcg"] + 0.1


@pytest.mark.nightly
def test_the_quick_command_learns_as_told():
    curve = train.main([f"@{QUICK}"])["curve"]
    expected = re.findall(r"step (\d+): NE ([\d.]+), NDCG@10 ([\d.]+)", QUICK.read_text())
    assert [int(after) for after, _, _ in expected] == list(curve)
    for after, *values in expected:
        found = [curve[int(after)][name] for name in ("ne", "ndcg")]
        assert found == pytest.approx([float(x) for x in values], abs=0.02), after


@pytest.mark.parametrize(
    ("given", "set_", "wanted"),
    (
        (["--size", "tiny"], None, 1),
        (["--size", "tiny"], "5", None),
        (["--size", "base"], None, None),
        (["--size", "tiny", "--threads", "3"], "5", 3),
    ),
)
def test_threads(given, set_, wanted, monkeypatch):
    """As told; of a tiny model one, if OMP_NUM_THREADS is not set; else PyTorch's own."""
    found = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_:
        monkeypatch.setenv("OMP_NUM_THREADS", set_)
    train.options.use_threads(train.arguments(given))
    assert found == [wanted] * (wanted is not None)


def test_resuming_changes_no_bit(tmp_path):
    options = [*FEW, "--checkpoint", str(tmp_path), "--save-every", "2"]
    whole = train.main(options)
    for step_of in (4, 6):
        shutil.rmtree(tmp_path / f"step-{step_of}")
    (tmp_path / "step-5").mkdir()  # as a run leaves it that was stopped while it wrote
    rest = train.main([*options, "--resume"])
    assert list(rest["losses"]) == [3, 4, 5, 6]
    whole["losses"] = {key: whole["losses"][key] for key in rest["losses"]}
    assert rest == whole


def test_a_longer_run_goes_on_as_if_it_had_been_planned_so(tmp_path, capsys):
    """From the step on where it resumes: the learning rates are those of the longer plan."""
    options = [*FEW, "--checkpoint", str(tmp_path), "--save-every", "3"]
    train.main(options)
    capsys.readouterr()
    assert list(train.main([*options, "--resume", "--steps", "9"])["losses"]) == [7, 8, 9]
    said = capsys.readouterr().out
    assert f"resumes from {tmp_path}/step-6\n" in said
    assert "the learning rate, planned for 6 steps, goes on as planned for 9\n" in said

    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, 9)
    for _ in range(9):
        optimizer.step()
        plan.step()
    saved = torch.distributed.checkpoint.FileSystemReader(tmp_path / "step-9").read_metadata()
    found = [key for key in saved.state_dict_metadata if key.endswith(".lr")]
    state = dict.fromkeys(found, 0.0)
    torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path / "step-9")
    assert set(state.values()) == {plan.get_last_lr()[0]}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize("damage", (cut, flip_a_bit, Path.unlink))
@pytest.mark.parametrize("files", ("*.distcp", ".metadata", "options.json", checkpoints.SUMS))
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(
    files, damage, run_of_six, tmp_path, capsys
):
    whole, saved = run_of_six
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    options = [*FEW, "--checkpoint", str(tmp_path), "--save-every", "2"]
    newest = tmp_path / "step-6"
    for path in newest.glob(files):
        damage(path)
    capsys.readouterr()
    rest = train.main([*options, "--resume"])
    assert rest["losses"] == {step: whole["losses"][step] for step in (5, 6)}
    said = capsys.readouterr().out
    assert re.search(f"{newest} cannot be read, so an older one is looked for: .+\n", said)
    assert f"resumes from {tmp_path}/step-4\n" in said
    for path in tmp_path.glob("step-*/*.distcp"):
        path.write_bytes(b"")
    with pytest.raises(SystemExit, match=f"can be read, and {tmp_path} has none"):
        train.main([*options, "--resume"])


@pytest.fixture(scope="module")
def run_of_six(tmp_path_factory) -> tuple[dict, Path]:
    """What six steps found, and their checkpoints after 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("six")
    return train.main([*FEW, "--checkpoint", str(folder), "--save-every", "2"]), folder


def test_a_folder_that_is_no_checkpoint_is_named(run_of_six, tmp_path, capsys):
    whole, saved = run_of_six
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    shutil.copytree(saved / "step-6", tmp_path / "step-best")
    options = [*FEW, "--checkpoint", str(tmp_path), "--resume"]
    assert train.main(options)["ne"] == whole["ne"]
    said = capsys.readouterr().out
    assert f"{tmp_path}/step-best cannot be read, so an older one is looked for: its name" in said
    assert f"resumes from {tmp_path}/step-6\n" in said


def test_other_ratings_in_the_same_file_are_refused(tmp_path, capsys):
    """Also those that came while it ran: the file is that of the start."""
    path = tmp_path / "ratings.csv"

    def write(last: int) -> None:
        rows = [f"{i % 3},{i % 5},{1 + 4 * (i % 2)},{100 + i}\n" for i in range(40)]
        rows.append(f"9,{last},5,100\n")
        path.write_text("userId,movieId,rating,timestamp\n" + "".join(rows))

    write(1)
    options = ["--size", "tiny", "--layers", "1", "--max-seqlen", "4", "--batch", "64", "--device",
               "cpu", "--attention", "eager", "--eval-batches", "1", "--ratings", str(path),
               "--checkpoint", str(tmp_path / "saved"), "--steps", "2"]  # fmt: skip
    save = train.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "save", lambda *arguments: (write(2), save(*arguments)))
        train.main(options)
    with pytest.raises(SystemExit):
        train.main([*options, "--resume"])
    of = rf"--ratings {path} \(\d+ bytes, SHA-256 (\w+)\)"
    refused = re.search(
        f"--resume needs the options of {tmp_path}/saved/step-2, {of}, got {of}\n",
        capsys.readouterr().err,
    )
    assert refused[1] != refused[2]
    write(1)
    assert train.main([*options, "--resume"])["losses"] == {}


OTHERS = {
    "one": (["--seed", "8"], "--seed 7", "--seed 8"),
    "several": (
        ["--layers", "2", "--mixer", "window", "--law", "full", "--lr", "0.5"],
        "--mixer gdpa, --layers 1, --law lognormal, --lr 0.002",
        "--mixer window, --layers 2, --law full, --lr 0.5",
    ),
    "softmax": (["--attention", "padded_sdpa"], "--attention gdpa", "--attention padded_sdpa"),
}


def test_another_run_is_refused_in_one_sentence(tmp_path, capsys):
    options = [*FEW, "--checkpoint", str(tmp_path)]
    train.main(options)

    def refused(*more: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit):
            train.main([*options, *more])
        return capsys.readouterr().err.split(": ", 1)[1]

    assert refused() == f"--checkpoint must be empty without --resume, got {tmp_path}\n"
    newest = tmp_path / "step-6"
    for more, was, got in OTHERS.values():
        wanted = f"--resume needs the options of {newest}, {was}, got {got}\n"
        assert refused("--resume", *more) == wanted
    found = refused("--resume", "--steps", "5")
    assert found == f"--steps must be at least the 6 of {newest}, got 5\n"
    free = ["--log-every", "2", "--deal", "sorted", "--recompute", "--eval-batches", "2"]
    assert train.main([*options, "--resume", *free])["losses"] == {}


def test_every_option_is_saved_or_free():
    assert set(vars(train.arguments(FEW))) >= train.FREE
    found = train.trained(train.arguments(FEW))
    assert {"model", "mixer", "seed", "law", "lr", "layers", "steps", "attention"} <= set(found)


@pytest.mark.parametrize(
    ("engine", "more"),
    (
        ("ddp", ["--deal", "sorted", "--cold", "0.6"]),  # rank 1 has no token
        sweep("fsdp2", ["--model", "hstu", "--deal", "balanced", "--recompute"]),
    ),
)
def test_two_ranks_are_one(engine, more, tmp_path):
    """Sums over a batch are added in another order, in fp32: 1e-5 of a loss in six steps."""
    if "sorted" in more:
        loader = train.Loader(train.arguments([*FEW, *more]), 1, 2, torch.device("cpu"))
        assert all(loader.batch(step)[0].lengths.total == 0 for step in range(6))
    more = [*more, "--candidates", "3", "--k", "2"]
    options = [*FEW, *more, "--checkpoint", tmp_path / "of two", "--save-every", "3"]
    two = run(2, tmp_path / "out", *options, "--engine", engine)
    one = train.main([*FEW, *more])
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    for name in ("ne", "bayes_ne", "auc", "bayes_auc", "hr", "ndcg"):
        assert two[name] == pytest.approx(one[name], rel=1e-4)
    shutil.rmtree(tmp_path / "of two" / "step-6")
    alone = train.main([*map(str, options), "--resume"])  # two ranks' checkpoint, one process
    assert losses(alone) == pytest.approx(losses(one)[3:], rel=1e-5)


def test_a_lost_rank_ends_the_other():
    options = [*SMALL, "--batch", "8", "--steps", "100000", "--log-every", "1"]
    left, lost = start(
        2, SCRIPT, *options, "--engine", "ddp", "--timeout", "20", "--attention", "eager"
    )
    assert "step 1" in left.stdout.readline()
    lost.send_signal(signal.SIGKILL)
    began = time.monotonic()
    _, errors = left.communicate(timeout=60)
    lost.communicate()
    assert time.monotonic() - began < 30
    assert left.returncode == 1
    assert re.search(r"rank 0 of 2 stops: \S+", errors), errors


@pytest.mark.sweep
def test_compiled():
    options = [*FEW, "--batch", "4"]
    compiled, plain = train.main([*options, "--compile", "aot_eager"]), train.main(options)
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (["--engine", "ddp"], "--engine ddp needs torchrun .*, got 1 processes of torchrun"),
        (["--attention", "fa2_varlen"], "--attention fa2_varlen needs a CUDA device, got cpu"),
        (["--attention", "fa5"], "argument --attention: invalid choice: 'fa5' .*"),
        (["--batch", "0"], "argument --batch: must be an integer of at least 1, got '0'"),
        (["--cold", "2"], r"argument --cold: must be a number in \[0, 1\], got '2'"),
        (["--topics", "3"], r"--topics must be 4 .. 32 \(--items\), got 3"),
        (["--law", "ml25m"], "--max-seqlen must be at least 20 with --law ml25m, got 16"),
        (["--resume"], "--resume needs a complete checkpoint in --checkpoint, got None"),
    ),
)
def test_errors_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main([*SMALL, *arguments])
    said = capsys.readouterr().err or str(stopped.value)
    assert re.fullmatch(rf"(.*: )?{message}\n?", said) and said.count("\n") <= 1
    assert stopped.value.code not in (0, None)


@pytest.mark.sweep
def test_step_by_parts(tmp_path):
    out = tmp_path / "step.json"
    options = ["--batch", "4", "--repeats", "2", "--warmup", "1", "--out", str(out)]
    for mixer in ("gdpa", "block"):
        names = ["gdpa", "padded_sdpa", "eager"]
        step.main([*SMALL, "--mixer", mixer, *options, "--attentions", *names])
        rows = json.loads(out.read_text())["rows"]
        assert [row["attention"] for row in rows] == names
        for row in rows:
            assert all(len(each) == 2 for each in row["samples_s"].values())
            assert row["attention_alone_s"] == sum(row["samples_s"]["attention_alone"]) / 2 > 0
            assert row["kinds_s"]["matmul"] > 0 and row["forward_s"] < row["step_s"]
        assert rows[0]["pairs"] == rows[1]["pairs"] and rows[0]["kinds_s"]["attention"] > 0


@pytest.mark.sweep
def test_ranks_are_timed(tmp_path):
    """The same rows in any deal; "sorted" gives rank 0 the most tokens."""
    given = [*SMALL, "--batch", "16", "--repeats", "2", "--warmup", "1", "--attention", "eager"]
    given += ["--engine", "ddp", "--deals", "sorted", "balanced"]
    found = run(2, tmp_path / "ranks.json", *given, script=SCRIPT.with_name("ranks.py"))["rows"]
    tokens = {row["deal"]: row["tokens"] for row in found}
    assert sum(tokens["sorted"]) == sum(tokens["balanced"])
    assert tokens["sorted"][0] > tokens["sorted"][1]
    assert all(len(row["own_s"]) == row["ranks"] == 2 and row["skew"] >= 1 for row in found)


@pytest.mark.sweep
@pytest.mark.parametrize("processes", (2, pytest.param(4, marks=pytest.mark.nightly)))
def test_histories_are_cut_between_ranks(processes, tmp_path):
    """As one process computes them, by the bytes of the formula; zigzag shards have equal work."""
    given = ["--context", "--size", "tiny", "--batch", "3", "--max-seqlen", "512"]
    given += ["--device", "cpu", "--warmup", "1", "--repeats", "2"]
    found = run(processes, tmp_path / "cut.json", *given, script=SCRIPT.with_name("ranks.py"))
    ways = {(row["layout"], row["stationary"]): row for row in found["rows"]}
    assert len(ways) == (6 if processes == 2 else 4), "four ranks cannot share two heads"
    for row in ways.values():
        assert max(row["errors"]) < 1e-14
        assert row["received"] == row["predicted"] and min(row["received"]) > 0
        times = [row["forward_s"], row["backward_s"], *row["alone_s"]]
        assert {len(x) for x in times} == {2} and min(map(min, times)) > 0
    for stationary in ("queries", "keys"):
        assert ways["zigzag", stationary]["busiest"] < 1.02
        assert ways["contiguous", stationary]["busiest"] > 1.1


def test_a_context_needs_ranks(capsys):
    with pytest.raises(SystemExit):
        ranks.main(["--context"])
    wanted = "--context needs torchrun --nproc-per-node N, got a process without it\n"
    assert capsys.readouterr().err.endswith(wanted)
