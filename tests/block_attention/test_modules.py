"""`BlockAttention`: against the same layer in plain PyTorch, for both kinds of jagged batches."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import tritonemu
from gdpa_kernels import BlockAttention
from gdpa_kernels.block_attention import modules
from gdpa_kernels.calling import layers, packed
from gdpa_kernels.calling.launches import launches
from gdpa_lab.measuring.inputs import cu_seqlens

LENGTHS = [5, 0, 20, 16, 1]
OPTIONS = {
    "plain": {},
    "grouped": {"num_kv_heads": 1, "bias": False},
    "rotary": {"num_kv_heads": 2, "rotary": 10_000.0},
    "rotary of v": {"rotary": 100.0, "rotate_v": True},
    "qk_norm": {"num_kv_heads": 2, "rotary": 10_000.0, "qk_norm": True},
}


def composed(layer: BlockAttention, values: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """The layer by PyTorch's own parts, one block of one sequence after another."""
    results, heads, dim = [], layer.num_heads, layer.head_dim
    for sequence in values.split(lengths):
        qkv = F.linear(sequence, layer.qkv.weight, layer.qkv.bias)
        qkv = qkv.unflatten(1, (-1, dim))
        q, k, v = qkv[:, :heads], *qkv[:, heads:].chunk(2, dim=1)
        if layer.q_norm is not None:
            norms = (layer.q_norm, q), (layer.k_norm, k)
            q, k = (F.rms_norm(x, (dim,), norm.weight, layers.EPSILON) for norm, x in norms)
        if layer.rotary is not None:
            position = torch.arange(len(sequence))[:, None, None]
            angle = position * layer.rotary ** (-torch.arange(0, dim, 2) / dim)
            turn = torch.polar(torch.ones_like(angle), angle)

            def turned(x, turn=turn):
                pairs = torch.view_as_complex(x.unflatten(-1, (dim // 2, 2)).contiguous())
                return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)

            q, k, v = turned(q), turned(k), turned(v) if layer.rotate_v else v
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        size = layer.block_size
        blocks = [
            F.scaled_dot_product_attention(
                *(x[:, i : i + size] for x in (q, k, v)), enable_gqa=True
            )
            for i in range(0, len(sequence), size)
        ]
        mixed = torch.cat(blocks, 1).transpose(0, 1).flatten(1) if blocks else sequence
        results.append(F.linear(mixed, layer.out.weight, layer.out.bias))
    return torch.cat(results)


def batch(embed_dim: int = 64, lengths=LENGTHS, dtype=torch.float32):
    make = torch.Generator().manual_seed(1)
    values = torch.randn(sum(lengths), embed_dim, generator=make).to(dtype)
    return values, cu_seqlens(lengths, "cpu")


def make(embed_dim: int = 64, num_heads: int = 4, **options) -> BlockAttention:
    """A layer with weights of its norms that are not all 1."""
    torch.manual_seed(0)
    made = BlockAttention(embed_dim, num_heads, **{"block_size": 16} | options)
    for norm in (made.q_norm, made.k_norm):
        if norm is not None:
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return made


def gradients(layer, loss, *others):
    return torch.autograd.grad(loss, [*layer.parameters(), *others])


@pytest.mark.parametrize("impl", ("reference", "v1_one_tile"))
@pytest.mark.parametrize("options", OPTIONS)
def test_is_the_layer_in_plain_pytorch(options, impl):
    layer = make(**OPTIONS[options], impl=impl)
    values, offsets = batch()
    values.requires_grad_()
    weights = torch.randn(len(values), 64, generator=torch.Generator().manual_seed(2))
    with tritonemu.enabled():
        y, same = layer((values, offsets))
        actual = gradients(layer, (y * weights).sum(), values)
    assert same is offsets and y.shape == values.shape
    expected = composed(layer, values, LENGTHS)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    for a, b in zip(actual, gradients(layer, (expected * weights).sum(), values), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_nested_tensor_comes_back_nested(options):
    layer = make(**OPTIONS[options])
    values, offsets = batch()
    x = torch.nested.nested_tensor_from_jagged(values, offsets.long()).requires_grad_()
    y = layer(x)
    assert y.is_nested and y.layout == torch.jagged and y.shape == x.shape  # also the jagged one
    assert torch.equal(y.values(), layer((values, offsets))[0])
    (x + y).values().square().sum().backward()
    leaf = values.requires_grad_()
    (leaf + layer((leaf, offsets))[0]).square().sum().backward()
    assert torch.equal(x.grad.values(), leaf.grad)


def test_layers_follow_each_other_and_share_the_offsets():
    both = torch.nn.Sequential(make(), make(rotary=1e4))
    values, offsets = batch()
    y, same = both((values, offsets))
    assert same is offsets
    expected = composed(both[1], composed(both[0], values, LENGTHS), LENGTHS)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


def test_the_kernels_read_the_packed_projection_where_it_lies(monkeypatch):
    seen, attend = [], modules.block_attention
    monkeypatch.setattr(
        modules, "block_attention", lambda *a, **o: seen.append(a[:3]) or attend(*a, **o)
    )
    make(num_kv_heads=2)(batch())
    (((q, *others),),) = (seen,)
    assert others == [None, None]
    q, k, v = packed.unpack(q, None, None, 2)
    assert q.stride() == k.stride() == v.stride() == (8 * 16, 16, 1)
    assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()


def test_each_direction_by_the_kernel_asked_for():
    layer = make(rotary=1e4, impl="v1_one_tile", backward_impl="reference").bfloat16()
    values, offsets = batch(dtype=torch.bfloat16)
    with tritonemu.enabled(), launches() as seen:
        layer((values, offsets))[0].sum().backward()
    assert [launch.name for launch in seen] == ["block_list_kernel", "forward_kernel"]
    with pytest.raises(NotImplementedError, match="backward_impl 'v3_warp_special.* needs .*sm_90"):
        make(backward_impl="v3_warp_specialized").bfloat16()((values, offsets))


@pytest.mark.parametrize("lengths", ([], [0, 0], [1]))
def test_hardly_any_tokens(lengths):
    layer = make(rotary=1e4)
    values, offsets = batch(lengths=lengths)
    y, _ = layer((values, offsets))
    assert y.shape == (sum(lengths), 64)
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_autocast():
    layer = make(rotary=1e4)
    values, offsets = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = layer((values, offsets))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer((values, offsets))[0], rtol=0.05, atol=0.02)
    y.float().sum().backward()
    assert layer.qkv.weight.grad.dtype == torch.float32


def test_double_precision():
    layer = make(rotary=1e4, dtype=torch.float64)
    values, offsets = batch(dtype=torch.float64)
    expected = composed(layer, values, LENGTHS)
    torch.testing.assert_close(layer((values, offsets))[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nested", (False, True))
def test_torch_compile_sees_one_graph(nested):
    layer = make(rotary=1e4)
    values, offsets = batch()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected, _ = layer((values, offsets))
    if nested:
        y = compiled(torch.nested.nested_tensor_from_jagged(values, offsets.long())).values()
    else:
        y, _ = compiled((values, offsets))
    torch.testing.assert_close(y, expected)
    actual = gradients(layer, y.square().sum())
    for a, b in zip(actual, gradients(layer, expected.square().sum()), strict=True):
        torch.testing.assert_close(a, b)


WRONG = {
    "num_heads": ({"num_heads": 5}, "num_heads must be a positive divisor of embed_dim 64, got 5"),
    "no heads": ({"num_heads": 0}, "num_heads must be a positive divisor .* got 0"),
    "half heads": ({"num_heads": 2.0}, "num_heads must be a positive divisor .* got 2.0"),
    "embed_dim": ({"embed_dim": 64.0}, "embed_dim must be an integer of at least 1, got 64.0"),
    "num_kv_heads": (
        {"num_kv_heads": 3},
        "num_kv_heads must be a positive divisor of num_heads 4, got 3",
    ),
    "block_size": ({"block_size": 48}, "block_size must be one of 16, 32, 64, 128, got 48"),
    "block_size of floats": ({"block_size": 16.0}, "block_size must be one of .*, got 16.0"),
    "impl": ({"impl": "nope"}, "impl must be 'auto' or one of reference, v0_flash, .*, got 'nope'"),
    "backward_impl": (
        {"backward_impl": "v0_flash"},
        "needs what impl 'v0_flash' saves, got 'auto'",
    ),
    "rotary of text": ({"rotary": "1e4"}, "rotary must be None or a base above 0, got '1e4'"),
    "rotary": ({"rotary": True}, "rotary must be None or a base above 0, got True"),
    "rotary below 0": ({"rotary": -1.0}, "rotary must be None or a base above 0, got -1.0"),
    "rotate_v alone": ({"rotate_v": True}, "rotate_v must be False without rotary, got True"),
    "odd head_dim": (
        {"embed_dim": 60, "rotary": 1e4},
        "embed_dim // num_heads must be even for a rotary embedding, got 15",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_say_what_is_wrong(case):
    changes, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_wrong_inputs_say_what_is_wrong():
    layer = make()
    values, offsets = batch()
    with pytest.raises(TypeError, match="pair .values, offsets. or a nested .*got a tensor of lay"):
        layer(values)
    with pytest.raises(TypeError, match="got a tensor of layout torch.strided, nested"):
        layer(torch.nested.nested_tensor([values[:3], values[3:]], layout=torch.strided))
    with pytest.raises(TypeError, match="or a nested tensor of layout torch.jagged, got int"):
        layer(3)
    with pytest.raises(ValueError, match=r"values must have shape \[total_tokens, 64\], got \[42,"):
        layer((values[:, :32], offsets))
    with pytest.raises(TypeError, match="offsets must be int32 or int64, got torch.float32"):
        layer((values, offsets.float()))
    with pytest.raises(TypeError, match="offsets must be a tensor or Lengths, got list"):
        layer((values, offsets.tolist()))
    for wrong in (offsets[:0], offsets[None], offsets.to("meta")):
        with pytest.raises(ValueError, match=r"offsets must have shape \[batch \+ 1\] on cpu, got"):
            layer((values, wrong))
    with pytest.raises(ValueError, match="cu_seqlens must run from 0 to the 42 rows"):
        layer((values, offsets[:-1]))
    far = torch.tensor([0, 2**40, 42])  # 2**40 is 0 in int32
    with pytest.raises(ValueError, match=f"cu_seqlens must not decrease, got {2**40} followed by"):
        layer((values, far))
    assert make(validate=False)((values, far))[0].isfinite().all()
    holes = torch.nested.narrow(
        values.view(2, 21, 64), 1, torch.tensor([0, 3]), torch.tensor([4, 5]), torch.jagged
    )
    with pytest.raises(ValueError, match="without holes between its sequences, .*, with holes"):
        layer(holes)
    with pytest.raises(ValueError, match="got 3 dimensions, of which 2 is jagged"):
        layer(torch.nested.nested_tensor_from_jagged(values, offsets.long()).transpose(1, 2))


def curve(step, layer: BlockAttention, steps: int = 12) -> torch.Tensor:
    """Losses of a layer that learns to give every token the mean of its block."""
    values, _ = batch(32, [20, 3, 16])
    target = torch.cat(
        [
            block.mean(0).expand_as(block)
            for sequence in values.split([20, 3, 16])
            for block in sequence.split(16)
        ]
    )
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(step(layer, values), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("impl", ("reference", "v1_one_tile"))
def test_training_follows_plain_pytorch(impl):
    options = {"embed_dim": 32, "num_heads": 2, "num_kv_heads": 1, "rotary": 1e4, "impl": impl}
    offsets = cu_seqlens([20, 3, 16], "cpu")
    with tritonemu.enabled():
        losses = curve(lambda layer, values: layer((values, offsets))[0], make(**options))
    plain = curve(lambda layer, values: composed(layer, values, [20, 3, 16]), make(**options))
    assert losses[-1] < 0.5 * losses[0]
    torch.testing.assert_close(losses, plain, rtol=1e-3, atol=1e-5)
