"""A replay launches what the rung would, with its own tensors; or there is none."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import triton
from torch.utils._python_dispatch import _disable_current_modes
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from gdpa_kernels import block_attention, gdpa
from gdpa_kernels.block_attention import api as block_api
from gdpa_kernels.block_attention import block_list, v1_one_tile
from gdpa_kernels.block_attention import rotary as rotation
from gdpa_kernels.calling import calls, ladder, relaunch, remembered, replay
from gdpa_kernels.calling import launch as launching
from gdpa_kernels.device import ragged
from gdpa_kernels.gdpa import api, v1_tiled_backward, v2_tma, work_list
from gdpa_kernels.measuring.inputs import cu_seqlens
from tests.calling.driver import CUDA, installed

KERNELS = (
    v2_tma.tma_kernel, v1_tiled_backward.queries_kernel, v1_tiled_backward.keys_kernel,
    v1_one_tile.forward_kernel, v1_one_tile.backward_kernel, block_list.block_list_kernel,
)  # fmt: skip
MODULES = v2_tma, v1_tiled_backward, v1_one_tile, block_list


@pytest.fixture
def driver(monkeypatch):
    """CPU tensors are taken for tensors on the GPU of tests/driver.py."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(ladder.Requires, "of_device", lambda self, device: None)
    monkeypatch.setattr(remembered, "current_device", lambda: None)  # that of CPU tensors
    monkeypatch.setattr(remembered, "current_stream", lambda device: 70)
    monkeypatch.setattr(replay, "_known", {})
    for module in (api, block_api):
        monkeypatch.setattr(module, "_resolved", {})
    for module in MODULES:
        monkeypatch.setattr(
            module, "launch", lambda kernel, grid, device, *args, **options:
            launching.launch(kernel, grid, CUDA, *args, **options)
        )  # fmt: skip
    with installed(monkeypatch, KERNELS) as fake:
        yield fake
        replay._known.clear()  # with the kernels that it holds


LENGTHS = [40, 0, 7]


def rows(lengths=LENGTHS, heads=2, dim=16, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(sum(lengths), heads, dim).to(dtype)


def forward_of_gdpa(tensors, ends, **options):
    return (gdpa(*tensors[:3], ends, ends, 40, 40, impl="v2_tma", **options),)


def backward_of_gdpa(tensors, ends, **options):
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    own = {"impl": "v2_tma", "backward_impl": "v1_tiled_backward"}
    out = gdpa(*leaves, ends, ends, 40, 40, **own, **options)
    return torch.autograd.grad(out, leaves, tensors[3])


def forward_of_blocks(tensors, ends, **options):
    return (block_attention(*tensors[:3], ends, impl="v1_one_tile", **options),)


def backward_of_blocks(tensors, ends, **options):
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = block_attention(*leaves, ends, impl="v1_one_tile", **options)
    return torch.autograd.grad(out, leaves, tensors[3])


WAYS = [forward_of_gdpa, backward_of_gdpa, forward_of_blocks, backward_of_blocks]


def launched(driver, call):
    """What `call` returns, and its launches with addresses by what is at them."""
    begin = len(driver.launched)
    made = call()
    return made, driver.launched[begin:]


def named(launches, tensors: dict) -> list:
    """Launches with names for addresses: those of `tensors`, and others in their order."""
    names = {x.data_ptr(): name for name, x in tensors.items()}

    def name(address: int) -> str:
        return names.setdefault(address, f"another {len(names)}")

    def rename(kind: str, value):
        if kind == "nvTmaDesc":
            return ("map", name(value[1]), *value[2:])
        return name(value) if kind.startswith("*") else value

    return [
        each._replace(arguments=list(map(rename, each.signature, each.arguments)))
        for each in launches
    ]


def replays() -> list[replay.Replay]:
    return [known for known in replay._known.values() if type(known) is replay.Replay]


def warm(call) -> None:
    """Calls until there is a replay."""
    for _ in range(replay.SEEN + 1):
        call()
    assert replays(), replay._known.values()


@pytest.mark.parametrize("way", WAYS)
def test_a_replay_launches_what_the_rung_does_with_its_own_tensors(driver, way, monkeypatch):
    first, other = ([rows() for _ in range(4)] for _ in range(2))
    ends = cu_seqlens(LENGTHS, "cpu")
    warm(lambda: way(first, ends))
    count = len(replays())
    found, asked = {}, replay.Replay.__call__
    used = []
    monkeypatch.setattr(
        replay.Replay, "__call__", lambda self, inputs: used.append(self) or asked(self, inputs)
    )
    for how, tensors in (("replay", first), ("replay of others", other), ("rung", other)):
        if how == "rung":
            replay._known.clear()
        used.clear()
        made, launches = launched(driver, lambda tensors=tensors: way(tensors, ends))
        assert len(used) == (0 if how == "rung" else count), how
        given = dict(zip("qkvg", tensors, strict=True)) | {"ends": ends}
        found[how] = named(launches, given | {f"made {i}": x for i, x in enumerate(made)})
        shapes = [(x.shape, x.dtype, x.stride()) for x in made]
        assert shapes == [(x.shape, x.dtype, x.stride()) for x in other[: len(made)]]
    assert found["replay of others"] == found["rung"]
    assert [each.function for each in found["replay"]] == [e.function for e in found["rung"]]
    text = str(found["rung"])
    assert "'q'" in text and "'made 0'" in text


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.5}, {"output_scale": 2.0}, {"causal": True}, {"window": 3},
        {"activation": "relu"}, {"backward_impl": "reference"},
    ],
)  # fmt: skip
def test_another_option_is_another_call(driver, change):
    tensors, ends = [rows() for _ in range(3)], cu_seqlens(LENGTHS, "cpu")
    warm(lambda: forward_of_gdpa(tensors, ends))
    before = dict(replay._known)
    _, ours = launched(driver, lambda: forward_of_gdpa(tensors, ends, **change))
    assert set(replay._known) > set(before) and list(replay._known.values())[-1] == 1
    again = launched(driver, lambda: v2_tma.forward(
        *tensors, ends, ends, 40, 40,
        **{"activation": (change.get("activation", "gelu_tanh"),), "scale": 0.25,
           "output_scale": 1.0, "causal": False, "window": None}
        | {name: value for name, value in change.items() if name not in (
            "activation", "backward_impl")},
    ))[1]  # fmt: skip
    assert [each.function for each in ours] == [each.function for each in again]


@pytest.mark.parametrize(
    "way, change",
    [
        (backward_of_gdpa, {"scale": 0.5}), (backward_of_gdpa, {"causal": True}),
        (forward_of_blocks, {"scale": 0.5}), (backward_of_blocks, {"scale": 0.5}),
        (forward_of_blocks, {"block_size": 32}), (backward_of_blocks, {"block_size": 32}),
    ],
)  # fmt: skip
def test_another_option_reaches_the_kernels(driver, way, change):
    tensors, ends = [rows() for _ in range(4)], cu_seqlens(LENGTHS, "cpu")
    for _ in range(replay.SEEN + 2):
        way(tensors, ends)
    known = len(replays())
    seen = {}
    for how in ("counted", "rung"):
        made, launches = launched(driver, lambda: way(tensors, ends, **change))
        given = dict(zip("qkvg", tensors, strict=True)) | {"ends": ends}
        seen[how] = named(launches[-1:], given | {f"made {i}": x for i, x in enumerate(made)})
        assert len(replays()) == (known if how == "counted" else 0)
        replay._known.clear()
    assert seen["counted"][-1].arguments == seen["rung"][-1].arguments
    assert seen["counted"][-1].function == seen["rung"][-1].function


@pytest.mark.parametrize("way", [backward_of_gdpa, backward_of_blocks])
def test_a_gradient_of_another_layout_is_another_call(driver, way):
    tensors, ends = [rows() for _ in range(4)], cu_seqlens(LENGTHS, "cpu")
    for _ in range(replay.SEEN + 2):
        way(tensors, ends)
    kinds, known = len(replay._known), replays()
    others = (
        tensors[3].transpose(0, 1).contiguous().transpose(0, 1),
        tensors[3][:1].expand(47, 2, 16),
    )
    for i, grad_out in enumerate(others, 1):
        way([*tensors[:3], grad_out], ends)
        assert len(replay._known) == kinds + i
    assert replays() == known


def test_only_the_gradients_that_are_needed(driver):
    tensors, ends = [rows() for _ in range(4)], cu_seqlens(LENGTHS, "cpu")

    def one(which: int):
        given = list(tensors[:3])
        given[which] = given[which].detach().requires_grad_()
        out = gdpa(*given, ends, ends, 40, 40, impl="v2_tma", backward_impl="v1_tiled_backward")
        return torch.autograd.grad(out, given[which], tensors[3])

    for _ in range(replay.SEEN + 2):
        backward_of_gdpa(tensors, ends)
        for which in range(3):
            (grad,) = one(which)
            assert grad.shape == tensors[which].shape
    assert len(replays()) == 5


@pytest.mark.parametrize("way", [backward_of_gdpa, backward_of_blocks])
def test_saved_tensors_that_came_back_otherwise_are_another_call(driver, way, monkeypatch):
    module, operator = (api, "gdpa") if way is backward_of_gdpa else (block_api, "block_attention")
    seen, plain = [], module._BACKWARD
    monkeypatch.setattr(module, "_BACKWARD", lambda *a: seen.append(operator) or plain(*a))
    tensors, ends = [rows() for _ in range(4)], cu_seqlens(LENGTHS, "cpu")
    for _ in range(replay.SEEN + 2):
        way(tensors, ends)
    known = replays()
    turned = []

    def unpack(x):
        if x.dim() == 3:
            turned.append(x.transpose(0, 1).contiguous().transpose(0, 1))
            return turned[-1]
        return x

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        _, launches = launched(driver, lambda: way(tensors, ends))
    assert seen == [operator], "which chooses its rung again"
    assert len(turned) == 3 and replays() == known
    given = set(map(str, named(launches, {"q": turned[0]})))
    assert any("'q'" in text for text in given)


def test_what_a_baseline_saves_reaches_its_backward(driver, monkeypatch):
    tensors, ends = [rows() for _ in range(4)], cu_seqlens(LENGTHS, "cpu")

    def forward(q, k, v, cu_seqlens, **options):
        out = q * 2
        return out, (out, q * 3)

    def backward(grad_out, q, k, v, cu_seqlens, saved, **options):
        return saved[0] + saved[1], q * 1, q * 1

    module = ladder.rung("v0_flash", "block_attention").module()
    monkeypatch.setattr(module, "forward", forward)
    monkeypatch.setattr(module, "backward", backward)
    for _ in range(replay.SEEN + 3):
        leaves = [(x + 1).detach().requires_grad_() for x in tensors[:3]]
        out = block_attention(*leaves, ends, impl="v0_flash")
        dq, dk, _ = torch.autograd.grad(out, leaves, tensors[3])
        assert torch.equal(out, leaves[0] * 2) and torch.equal(dk, leaves[0])
        assert torch.equal(dq, leaves[0] * 2 + leaves[0] * 3)
        tensors = [2 * x for x in tensors]
    kinds = [type(known) for known in replay._known.values()]
    assert sorted(map(str, kinds)) == sorted(map(str, (replay.Replay, str)))


def test_other_tensors_are_another_call(driver):
    tensors, ends = [rows() for _ in range(3)], cu_seqlens(LENGTHS, "cpu")
    warm(lambda: forward_of_blocks(tensors, ends))
    (one,) = replays()
    packed = torch.randn(47, 3, 2, 16).bfloat16()
    shifted = torch.randn(47 * 2 * 16 + 1).bfloat16()[1:].view(47, 2, 16)
    others = [
        ([rows([40, 8]) for _ in range(3)], cu_seqlens([40, 8], "cpu")),
        ([rows(dtype=torch.float16) for _ in range(3)], ends),
        ([rows(dim=32) for _ in range(3)], ends),
        ([rows(heads=4), *tensors[1:]], ends),
        (list(packed.unbind(1)), ends),
        ([tensors[0], shifted, tensors[2]], ends),
        (tensors, cu_seqlens([40, 3, 2, 2], "cpu")),
        (tensors, torch.cat([ends, ends])[4:]),
    ]
    assert others[-1][1].data_ptr() % 16 == 0
    others.append((tensors, torch.cat([ends, ends])[:4].clone().resize_(5)[:4]))
    kinds = len(replay._known)
    assert len(others) == 9
    for i, (given, offsets) in enumerate(others[:7], 1):
        forward_of_blocks(given, offsets)
        assert len(replay._known) == kinds + i, i
    for given, offsets in others[7:]:  # equal offsets elsewhere: the same kind
        forward_of_blocks(given, offsets)
        assert len(replay._known) == kinds + 7
    assert replays() == [one]


def test_turns_of_another_layout_are_another_call(driver):
    tensors, ends = [rows() for _ in range(4)], cu_seqlens(LENGTHS, "cpu")
    turns = torch.randn(47, 8), torch.randn(47, 8)
    for _ in range(replay.SEEN + 2):
        backward_of_blocks(tensors, ends, rotary=turns)
    kinds, known = len(replay._known), replays()
    assert len(known) == 2
    others = [
        (turns[0].t().contiguous().t(), turns[1]),
        (turns[0], turns[1].double()),
        (torch.randn(47 * 8 + 1)[1:].view(47, 8), turns[1]),
    ]
    for i, other in enumerate(others, 1):
        backward_of_blocks(tensors, ends, rotary=other)
        assert len(replay._known) == kinds + 2 * i
    _, launches = launched(driver, lambda: backward_of_blocks(tensors, ends, rotary=others[0]))
    assert replays() == known
    assert all("'sin'" in str(each) for each in named(launches, {"sin": others[0][0]}))


def test_another_number_of_sequences_is_another_call(driver):
    tensors = [rows() for _ in range(3)]
    warm(lambda: forward_of_gdpa(tensors, cu_seqlens(LENGTHS, "cpu")))
    _, (one,) = launched(driver, lambda: forward_of_gdpa(tensors, cu_seqlens([40, 7], "cpu")))
    assert one.grid != driver.launched[0].grid


def test_offsets_of_their_own_are_another_call(driver):
    tensors, ends = [rows() for _ in range(3)], cu_seqlens(LENGTHS, "cpu")
    ends_k = ends.clone()

    def call(*offsets):
        return launched(driver, lambda: gdpa(*tensors, *offsets, 40, 40, impl="v2_tma"))[1][-1]

    warm(lambda: call(ends, ends))
    for _ in range(replay.SEEN + 2):
        assert ends_k.data_ptr() in call(ends, ends_k).arguments
    assert len(replays()) == 2
    assert ends_k.data_ptr() not in call(ends, ends).arguments


def test_offsets_at_an_odd_address_are_another_call(driver):
    tensors = [rows() for _ in range(3)]
    ends = torch.zeros(5, dtype=torch.int32)
    ends[1:] = cu_seqlens(LENGTHS, "cpu")
    warm(lambda: forward_of_blocks(tensors, ends[1:].clone()))
    kinds = len(replay._known)
    forward_of_blocks(tensors, ends[1:])
    assert len(replay._known) == kinds + 1


@pytest.mark.parametrize("way", [forward_of_blocks, backward_of_blocks])
def test_lists_are_asked_for_in_each_replay(driver, way, monkeypatch):
    tensors, ends = [rows() for _ in range(4)], cu_seqlens(LENGTHS, "cpu")
    warm(lambda: way(tensors, ends))
    made = []
    make = block_list._lists.make
    monkeypatch.setattr(block_list._lists, "make", lambda *a: made.append(a[0]) or make(*a))
    way(tensors, ends)
    assert not made
    ends[1:3] = 30
    way(tensors, ends)
    assert len(made) == 1 and made[0] is ends
    way(tensors, ends)
    assert len(made) == 1
    way(tensors, ends.clone())
    assert len(made) == 2


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_who_watches_launches_sees_them_all(driver, hook):
    tensors, ends = [rows() for _ in range(3)], cu_seqlens(LENGTHS, "cpu")
    warm(lambda: forward_of_gdpa(tensors, ends))
    seen = []
    getattr(knobs.runtime, hook).add(seen.append)
    try:
        for _ in range(2):
            forward_of_gdpa(tensors, ends)
    finally:
        getattr(knobs.runtime, hook).remove(seen.append)
    assert len(seen) == 2
    slow = driver.slow
    forward_of_gdpa(tensors, ends)
    assert len(seen) == 2 and driver.slow == slow and len(replays()) == 1


def test_nothing_is_written_down_while_launches_are_watched(driver):
    tensors, ends = [rows() for _ in range(3)], cu_seqlens(LENGTHS, "cpu")
    seen = []
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        for _ in range(replay.SEEN + 3):
            forward_of_gdpa(tensors, ends)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert list(replay._known.values()) == [replay.SEEN] and len(seen) == replay.SEEN + 3
    forward_of_gdpa(tensors, ends)
    assert len(replays()) == 1


CHANGES = {
    "debug": lambda m: m.setattr(knobs.runtime, "debug", True),
    "driver": lambda m: m.setattr(
        triton.runtime.driver,
        "_active",
        type("Other", (), dict(vars(triton.runtime.driver.active))),
    ),
    "pre_run_hooks": lambda m: m.setattr(v2_tma.tma_kernel, "pre_run_hooks", [print]),
    "device": lambda m: m.setattr(launching, "current_device", lambda: 1),
    "global": lambda m: m.setattr(ragged, "BOUND", 3),
    "cache": lambda m: v2_tma.tma_kernel.device_caches.clear(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_replay_holds_as_long_as_triton_would_launch_the_same(driver, change, monkeypatch):
    tensors, ends = [rows() for _ in range(3)], cu_seqlens(LENGTHS, "cpu")
    warm(lambda: forward_of_gdpa(tensors, ends))
    (known,) = replays()
    assert known.holds()
    with monkeypatch.context() as patch:
        CHANGES[change](patch)
        assert not known.holds()
    assert known.holds() == (change != "cache")


def test_calls_without_a_kernel_are_calls():
    definition = ladder.rung("reference", "block_attention")
    plain = calls.Known((), definition, definition, "auto")
    assert plain.run(lambda: 3, ("key",), ()) == 3
    kernel = ladder.rung("v1_one_tile", "block_attention")
    for rungs in ((kernel, definition), (definition, kernel)):
        assert calls.Known((), *rungs, "auto").run is replay.run


def test_a_replaced_rung_is_called(driver, monkeypatch):
    tensors, ends = [rows() for _ in range(3)], cu_seqlens(LENGTHS, "cpu")
    warm(lambda: forward_of_gdpa(tensors, ends))
    out = torch.zeros(47, 2, 16)
    monkeypatch.setattr(v2_tma, "forward", lambda *args, **options: out)
    assert forward_of_gdpa(tensors, ends)[0] is out


def test_replays_are_bounded_and_keep_no_tensor(driver, monkeypatch):
    tensors, ends = [rows() for _ in range(4)], cu_seqlens(LENGTHS, "cpu")
    for _ in range(replay.SEEN + 1):
        backward_of_blocks(tensors, ends)
    assert len(replays()) == 2
    refs = [weakref.ref(x) for x in (*tensors, ends)]
    del tensors, ends
    gc.collect()
    assert [ref() for ref in refs] == [None] * 5
    monkeypatch.setattr(replay.calls, "MOST", 4)
    for n in range(1, 12):
        forward_of_gdpa([rows([n]) for _ in range(3)], cu_seqlens([n], "cpu"))
        assert len(replay._known) <= 4


# -- What is written down --------------------------------------------------------------------------


def broken(function, *inputs) -> str:
    """Why a call has no replay."""
    results, found = replay.record(lambda: (function(*inputs),), inputs)
    assert launching.recorder.now is None
    assert isinstance(results[0], torch.Tensor) and isinstance(found, str)
    return found


ELSEWHERE = torch.ones(3)


def test_what_cannot_be_replayed_has_no_replay(driver):
    x, y = torch.randn(3), torch.randn(3)
    assert "aten.nonzero" in broken(lambda x: x.nonzero(), x)
    assert "from elsewhere" in broken(lambda x: torch.cat([x, ELSEWHERE]), x)
    assert "aten.unbind" in broken(lambda x: x.unbind()[0], x)
    assert "add_" in broken(lambda x: x.new_zeros(3).add_(x), x)
    assert "from elsewhere" in broken(lambda x: x * ELSEWHERE, x)
    assert "from elsewhere" in broken(lambda x: ELSEWHERE, x)
    assert "_local_scalar_dense" in broken(lambda x: x.new_zeros(int(x.new_zeros(()))), x)
    assert "aten.new_empty" in broken(lambda x: x.new_empty(3, device="meta"), x)
    assert "stands for two" in broken(lambda x, y: x * y, x, x)
    _, found = replay.record(lambda: (x * y,), (x, y))
    assert torch.equal(found((x, torch.ones(3)))[0], x)


def test_a_tensor_is_not_taken_for_one_that_is_gone():
    def function(x):
        for _ in range(100):
            place = id(x.new_empty(3))
            with _disable_current_modes():
                other = torch.ones(3)
            if id(other) == place:
                return x * other
        raise AssertionError("no place was used again")

    assert broken(function, torch.randn(3)) == "a tensor from elsewhere"


def test_a_launch_that_triton_has_to_make_has_no_replay(driver, monkeypatch):
    tensors, ends = [rows() for _ in range(3)], cu_seqlens(LENGTHS, "cpu")
    monkeypatch.setattr(relaunch, "_relaunchable", lambda *call: False)
    for _ in range(replay.SEEN + 3):
        forward_of_gdpa(tensors, ends)
    (why,) = replay._known.values()
    assert "tma_kernel" in why and driver.slow == replay.SEEN + 3
    monkeypatch.setattr(relaunch, "KNOWN", False)
    replay._known.clear()
    forward_of_gdpa(tensors, ends)
    assert not replay._known


def test_operators_are_done_again_with_other_tensors():
    def function(x, factor=0.5):
        sums, order = torch.cat([x, x[:1]]).view(-1).sort(stable=True)
        wide = torch.zeros((2, 3), dtype=torch.float64)
        copy = x.clone(memory_format=torch.contiguous_format)
        low = (copy.view(-1, 2, 3).sum(0) * factor).to(torch.bfloat16)
        return low, sums, order, wide, None

    x, y = torch.randn(4, 3), torch.randn(4, 3)
    _, found = replay.record(lambda: function(x), (x,))
    assert isinstance(found, replay.Replay), found
    for one, other in zip(found((y,)), function(y), strict=True):
        assert one is other is None or (torch.equal(one, other) and one.dtype == other.dtype)
    low = torch.randn(4, 3).bfloat16()
    _, found = replay.record(
        lambda: (low.view(2, 6).sum(0), low.new_empty(2, dtype=torch.int8)), (low,)
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):  # would sum in fp32
        sums, empty = found((low,))
    assert sums.dtype == torch.bfloat16 and empty.dtype == torch.int8


def test_an_error_of_the_rung_leaves_nothing(driver, monkeypatch):
    tensors, ends = [rows() for _ in range(3)], cu_seqlens(LENGTHS, "cpu")
    for _ in range(replay.SEEN):
        forward_of_gdpa(tensors, ends)
    failing = launching.launch

    def fails(*args, **options):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(launching, "launch", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        forward_of_gdpa(tensors, ends)
    assert launching.recorder.now is None and list(replay._known.values()) == [replay.SEEN]
    monkeypatch.setattr(launching, "launch", failing)
    forward_of_gdpa(tensors, ends)
    assert len(replays()) == 1


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def turned(q, k, v, ends) -> torch.Tensor:
    """Block attention with rotary."""
    angles = torch.linspace(0, 9, len(q) * 64, device=q.device).view(-1, 64)
    turns = angles.sin().bfloat16(), angles.cos().bfloat16()
    return block_attention(q, k, v, ends, rotary=turns, rotate_v=True)


operators = pytest.mark.parametrize("operator", (gdpa, block_attention, turned))
ON_GPU = [200, 0, 130, 64, 1]


def all_of(operator, tensors, ends) -> tuple[torch.Tensor, ...]:
    """The output twice, without and with gradients, and the gradients."""
    more = (ends, 200, 200) if operator is gdpa else ()
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = operator(*leaves, ends, *more)
    with torch.no_grad():
        again = operator(*tensors[:3], ends, *more)
    return again, out, *torch.autograd.grad(out, leaves, tensors[3])


def by_rungs(operator, tensors, ends) -> tuple[torch.Tensor, ...]:
    """`all_of` without a replay."""
    known = dict(replay._known)
    replay._known.clear()
    expected = all_of(operator, tensors, ends)
    replay._known.clear()
    replay._known.update(known)
    return expected


def assert_same(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@needs_gpu
@operators
def test_on_a_gpu(operator):
    ends = cu_seqlens(ON_GPU, "cuda")
    replay._known.clear()
    for i in range(replay.SEEN + 6):
        tensors = [rows(ON_GPU, 4, 128).cuda() for _ in range(4)]
        if i == replay.SEEN + 3:
            ends.copy_(cu_seqlens(ON_GPU[::-1], "cuda"))
        assert_same(all_of(operator, tensors, ends), by_rungs(operator, tensors, ends))
    assert len(replays()) == 2 and not [x for x in replay._known.values() if type(x) is str]


@needs_gpu
@operators
def test_on_other_streams_and_in_a_graph(operator):
    ends = cu_seqlens(ON_GPU, "cuda")
    tensors = [rows(ON_GPU, 4, 128).cuda() for _ in range(4)]
    replay._known.clear()
    expected = by_rungs(operator, tensors, ends)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(replay.SEEN + 2):
            found = all_of(operator, tensors, ends)
    side.synchronize()
    assert len(replays()) == 2
    assert_same(found, expected)
    assert_same(all_of(operator, tensors, ends), expected)  # on the first stream again
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = all_of(operator, tensors, ends)
    for lengths in (ON_GPU, ON_GPU[::-1], [79] * 5):
        ends.copy_(cu_seqlens(lengths, "cuda"))
        graph.replay()
        assert_same(found, by_rungs(operator, tensors, ends))
    assert len(replays()) == 2


# -- The rungs -------------------------------------------------------------------------------------


def tensors_of(args: tuple) -> list[torch.Tensor]:
    """The tensors of a launch, as `relaunch.Again` has them."""
    bases = [arg.base if isinstance(arg, TensorDescriptor) else arg for arg in args]
    return [base for base in bases if isinstance(base, torch.Tensor)]


def places(tensors: list[torch.Tensor], given) -> list[tuple]:
    """What tensors are: where in one of those given, or among others."""
    owners = {x.untyped_storage().data_ptr(): i for i, x in enumerate(given) if x is not None}
    return [
        (owners.get(x.untyped_storage().data_ptr()), x.storage_offset(), x.shape, x.stride(),
         x.dtype)
        for x in tensors
    ]  # fmt: skip


KERNEL_RUNGS = [
    rung
    for rungs in ladder.LADDERS.values()
    for rung in rungs
    if rung.requires.capability is not None
]


@pytest.mark.parametrize("shared", (False, True))
@pytest.mark.parametrize("rung", KERNEL_RUNGS, ids=lambda rung: rung.impl)
def test_every_rung_can_be_replayed(rung, shared, monkeypatch):
    """`shared`: one q for all sequences, or rotary."""
    seen: list[list[torch.Tensor]] = []

    def launch(kernel, grid, device, *args, **options):
        if launching.recorder.now is not None:
            launching.recorder.now.launched(kernel, grid, 0, args, options)

    class Again:
        """Says which tensors it is given, at first and again."""

        def __init__(self, kernel, grid, device, args, options):
            self.tensors = tensors_of(args)
            seen.append(list(self.tensors))

        def __call__(self, tensors):
            seen.append(tensors)

    monkeypatch.setattr(relaunch, "again", Again)
    for module in (rung.module(), block_list, work_list, rotation):
        monkeypatch.setattr(module, "launch", launch)
    q, k, v, grad_out = (rows(dim=64) for _ in range(4))
    ends, options = cu_seqlens(LENGTHS, "cpu"), {"scale": 0.125}
    if rung.operator == "block_attention":
        rotary = (torch.randn(47, 32), torch.randn(47, 32)) if shared else None
        if getattr(rung.module(), "requires", lambda *a: None)(64, q, k, v, rotary) is not None:
            pytest.skip("not such a call")
        inputs, options = (q, k, v, ends, *(rotary or ())), {**options, "block_size": 64}
        options |= {"rotary": rotary, "rotate_v": shared}
        ways = {
            "forward": lambda: (rung.module().forward(*inputs[:4], **options)[0],),
            "backward": lambda: rung.module().backward(grad_out, *inputs[:4], (), **options),
        }
        if rung.impl == "v0_flash":
            del ways["backward"]  # of what it saved
    else:
        q, ends_q, longest = (q[:40], None, 40) if shared else (q, ends, 40)
        grad_out = torch.randn(120, 2, 64).bfloat16() if shared else grad_out
        options |= {
            "activation": ("gelu_tanh",), "output_scale": 1.0, "causal": False, "window": None
        }  # fmt: skip
        if getattr(rung.module(), "requires", lambda *a: None)(ends_q, 40) is not None:
            pytest.skip("not such a call")
        inputs = q, k, v, ends
        call = (q, k, v, ends_q, ends, longest, 40)
        ways = {"forward": lambda: (rung.module().forward(*call, **options),)}
        if rung.operator == "gdpa_backward":
            ways = {"backward": lambda: rung.module().backward(grad_out, *call, **options)}
    for name, function in ways.items():
        given = inputs if name == "forward" else (*inputs, grad_out)
        results, found = replay.record(function, given)
        if rung.impl == "v3_persistent":  # its list takes dozens of PyTorch's operators
            assert found == "aten.index.Tensor"
            continue
        assert isinstance(found, replay.Replay), found
        first = [places(tensors, given) for tensors in seen]
        seen.clear()
        others = [None if x is None else x.clone() for x in given]
        made = found(tuple(others))
        assert first and first == [places(tensors, others) for tensors in seen]
        assert [x.shape for x in made] == [x.shape for x in results]
        seen.clear()
