"""cuDNN's ragged attention by its own frontend.

PyTorch 2.11 offers it by a private operator alone, which plans a graph in every call, longer than
its kernels run, and whose backward takes head_dim for the longest sequence, so that its gradients
are wrong (https://github.com/pytorch/pytorch/pull/186142). Here a graph is planned once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gdpa_lab.measuring.baselines import peer
from gdpa_lab.measuring.baselines.peer import Call, needs_module
from gdpa_lab.measuring.inputs import BlockInputs, Inputs
from gdpa_lab.measuring.workload import STEP


@dataclass
class Graph:
    """A graph of cuDNN on ragged tensors `[total, num_heads, head_dim]`: `tensors`, the graph's by
    the names of their buffers, and `fixed`, buffers that are the same in every call."""

    inputs: Inputs | BlockInputs
    library: Any
    handle: object
    graph: Any
    tensors: dict[str, Any]
    fixed: dict[str, torch.Tensor]

    @staticmethod
    def of(inputs: Inputs | BlockInputs) -> Graph:
        """Begin a graph with the lengths of a batch and where its sequences begin."""
        library = importlib.import_module("cudnn")
        handle, stream = library.create_handle(), torch.cuda.current_stream().cuda_stream
        library.set_stream(handle=handle, stream=stream)
        types = library.data_type
        io_type = {torch.bfloat16: types.BFLOAT16, torch.float16: types.HALF}[inputs.q.dtype]
        graph = library.pygraph(
            handle=handle, io_data_type=io_type, intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
        )  # fmt: skip
        ragged = Graph(inputs, library, handle, graph, {}, {})
        ends_q, ends_k, *_ = peer.ragged(inputs)
        for side, ends, heads in (("q", ends_q, inputs.q), ("k", ends_k, inputs.k)):
            ragged.add_fixed(f"seqlens_{side}", ends.diff())
            ragged.add_fixed(f"begin_{side}", ends.long() * heads.stride(0))
        return ragged

    def add_fixed(self, name: str, values: torch.Tensor) -> None:
        self.fixed[name] = values.view(-1, 1, 1, 1).contiguous()
        types = self.library.data_type
        kind = types.INT64 if values.dtype == torch.int64 else types.INT32
        self.tensors[name] = self.graph.tensor(
            name=name, dim=[len(values), 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind
        )

    def shape(self, like: torch.Tensor, side: str) -> tuple[list[int], list[int]]:
        """Sizes and strides of `[batch, num_heads, length, head_dim]`, as if all were longest."""
        _, _, longest_q, longest_k = peer.ragged(self.inputs)
        longest = longest_q if side == "q" else longest_k
        (_, heads, head_dim), (token, head, _) = like.shape, like.stride()
        batch = len(self.fixed["seqlens_q"])
        return [batch, heads, longest, head_dim], [longest * token, head, token, 1]

    def add(self, name: str, like: torch.Tensor, side: str) -> Any:
        """Add an input whose sequences are those of `side`, "q" or "k"."""
        dim, stride = self.shape(like, side)
        tensor = self.graph.tensor(name=name, dim=dim, stride=stride)
        tensor.set_ragged_offset(self.tensors[f"begin_{side}"])
        self.tensors[name] = tensor
        return tensor

    def returns(self, name: str, tensor: Any, like: torch.Tensor, side: str) -> None:
        """Declare a result of the graph."""
        dim, stride = self.shape(like, side)
        tensor.set_output(True).set_dim(dim).set_stride(stride)
        tensor.set_ragged_offset(self.tensors[f"begin_{side}"])
        self.tensors[name] = tensor

    def options(self) -> dict[str, object]:
        """Arguments that both directions have."""
        return {
            "attn_scale": self.inputs.scale(), "use_padding_mask": True,
            "seq_len_q": self.tensors["seqlens_q"], "seq_len_kv": self.tensors["seqlens_k"],
            "use_causal_mask": self.inputs.workload.causal,
        }  # fmt: skip

    def build(self) -> Callable[[dict[str, torch.Tensor]], None]:
        """Plan the graph; return what runs it on buffers by name."""
        modes = self.library.heur_mode
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([modes.A, modes.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        size = max(self.graph.get_workspace_size(), 1)
        workspace = torch.empty(size, dtype=torch.uint8, device=self.inputs.q.device)
        fixed = {self.tensors[name]: values for name, values in self.fixed.items()}

        def run(buffers: dict[str, torch.Tensor]) -> None:
            named = {self.tensors[name]: buffer for name, buffer in buffers.items()}
            self.graph.execute(fixed | named, workspace, handle=self.handle)

        return run


def cudnn_varlen(inputs: Inputs | BlockInputs, direction: str = "forward") -> Call:
    """Run cuDNN's ragged attention from graphs that are planned here."""
    qkv = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    saves = direction != "forward"
    first = Graph.of(inputs)
    tensors = [first.add(name, x, "q" if name == "q" else "k") for name, x in qkv.items()]
    out, stats = first.graph.sdpa(
        name="forward", **dict(zip("qkv", tensors, strict=True)), generate_stats=saves,
        **first.options(),
    )  # fmt: skip
    first.returns("out", out, inputs.q, "q")
    batch, heads, longest, _ = first.shape(inputs.q, "q")[0]
    if saves:
        stats.set_output(True).set_data_type(first.library.data_type.FLOAT)
        first.tensors["stats"] = stats
    run = first.build()

    def forward() -> dict[str, torch.Tensor]:
        results = {"out": torch.empty_like(inputs.q)}
        if saves:
            size = batch, heads, longest, 1
            # Beyond a sequence's end nothing is stored, and the backward reads it.
            results["stats"] = inputs.q.new_zeros(size, dtype=torch.float32)
        run(qkv | results)
        return results

    if not saves:
        return lambda: forward()["out"]
    backward = _backward(inputs, qkv)
    if direction == STEP:
        return lambda: backward(forward())
    saved = forward()
    return lambda: backward(saved)


def _backward(
    inputs: Inputs | BlockInputs, qkv: dict[str, torch.Tensor]
) -> Callable[[dict[str, torch.Tensor]], tuple[torch.Tensor, ...]]:
    """Plan the backward; return what computes gradients from what forward saved."""
    second = Graph.of(inputs)
    sides = {"q": "q", "k": "k", "v": "k"}
    tensors = {name: second.add(name, x, sides[name]) for name, x in qkv.items()}
    tensors |= {"o": second.add("out", inputs.q, "q")}
    tensors |= {"dO": second.add("grad_out", inputs.grad_out, "q")}
    batch, heads, longest, _ = second.shape(inputs.q, "q")[0]
    second.tensors["stats"] = tensors["stats"] = second.graph.tensor(
        name="stats", dim=[batch, heads, longest, 1], stride=[heads * longest, longest, 1, 1],
        data_type=second.library.data_type.FLOAT,
    )  # fmt: skip
    gradients = second.graph.sdpa_backward(
        name="backward", **tensors, **second.options(),
        max_total_seq_len_q=_rounded(inputs.q), max_total_seq_len_kv=_rounded(inputs.k),
    )  # fmt: skip
    for (name, like), gradient in zip(qkv.items(), gradients, strict=True):
        second.returns(f"d{name}", gradient, like, sides[name])
    run = second.build()

    def backward(saved: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        results = {f"d{name}": torch.empty_like(like) for name, like in qkv.items()}
        run(qkv | saved | {"grad_out": inputs.grad_out} | results)
        return tuple(results.values())

    return backward


def _rounded(tensor: torch.Tensor) -> int:
    """Round its tokens up to whole tiles of 64, for which the backward makes room."""
    return -(-len(tensor) // 64) * 64


needs_frontend = needs_module("cudnn", "cuDNN's frontend")
INSTALL = "pip install nvidia-cudnn-frontend==1.18.0"
