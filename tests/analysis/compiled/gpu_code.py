"""Print the kernels that inductor would make for an H200, on a machine without one. This file is a separate program,
not a test.

    python gpu_code.py convolutions text

Forward and backward of each network are traced, moved to fake CUDA tensors and lowered; nothing is compiled or run. The
program prints the name, cost and reason of each kernel as JSON lines. The program uses private parts of torch, so it
works only with the pinned version.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch._inductor.scheduler
import torch._inductor.utils
import torch.utils._triton
import triton
from torch import Tensor, fx, nn
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config, debug
from torch._inductor.compile_fx import view_to_reshape
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from rooftop.analysis.compiled.kernel_work import KernelWork, kernel_works

H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=140 << 30,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    gcnArchName="",
)


class Block(nn.Module):
    """A norm, attention by single operators, and a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, width)
        heads = [t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1)]
        scores = torch.softmax((heads[0] @ heads[1].transpose(-1, -2)).float(), -1).to(x.dtype)
        x = x + self.out((scores @ heads[2]).transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(1000, 256), nn.Embedding(128, 256)
        self.block, self.norm, self.head = Block(256), nn.LayerNorm(256), nn.Linear(256, 1000, bias=False)

    def forward(self, ids: Tensor) -> Tensor:  # (B, T)
        x = self.block(self.tokens(ids) + self.positions(torch.arange(ids.shape[1])))
        return nn.functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), ids.flatten())


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        layer = (nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        super().__init__(*stem, *layer, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:  # (B, 3, H, W)
        return super().forward(x).float().square().mean()


def networks(name: str) -> tuple[nn.Module, Tensor]:
    if name == "text":
        return Text().bfloat16(), torch.randint(0, 1000, (4, 128))
    network = Convolutions().bfloat16().to(memory_format=torch.channels_last)
    x = torch.randn(8, 3, 64, 64, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    return network, x


def training_graphs(network: nn.Module, x: Tensor) -> list[fx.GraphModule]:
    """The forward and backward graphs, decomposed and partitioned as for inductor."""
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def loss(parameters: Any, buffers: Any, x: Tensor) -> Any:
        return torch.func.functional_call(network, {**parameters, **buffers}, (x,))

    compiled = aot_function(
        loss,
        fw_compiler=keep,
        bw_compiler=keep,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    compiled(dict(network.named_parameters()), dict(network.named_buffers()), x).backward()
    return graphs


def pretend_an_h200_is_here() -> None:
    """The properties of a GPU that inductor queries before it writes code."""
    answers = {
        "get_device_properties": H200,
        "get_compute_capability": 90,
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "raise_if_triton_unavailable": None,
        "is_bf16_supported": True,
    }
    for name, answer in answers.items():
        setattr(CudaInterface, name, staticmethod(lambda *args, answer=answer, **kwargs: answer))
    for name in ("get_device_properties", "current_device"):
        setattr(CudaInterface.Worker, name, staticmethod(lambda *args, answer=answers[name], **kwargs: answer))
    for name in ("is_available", "current_device", "device_count", "get_device_properties"):
        setattr(torch.cuda, name, lambda *args, answer=answers[name], **kwargs: answer)
    torch.cuda.get_device_capability = lambda *args, **kwargs: (9, 0)
    torch.version.cuda = "13.0"
    torch._inductor.utils.get_gpu_shared_memory = lambda: H200.shared_memory_per_block_optin
    torch.utils._triton.triton_hash_with_backend = lambda: "none"
    torch._inductor.scheduler.has_triton = lambda *args: True
    target = SimpleNamespace(backend="cuda", arch=90, warp_size=32)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))


class OnGpu(fx.Interpreter):
    """Run a graph on fake tensors of a GPU and record the value of each node."""

    def __init__(self, module: fx.GraphModule, fake: FakeTensorMode) -> None:
        super().__init__(module)
        self.fake = fake

    def moved(self, tensor: Tensor) -> Tensor:
        with self.fake:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")

    def run_node(self, node: fx.Node) -> Any:
        try:
            node.meta["val"] = super().run_node(node)
        except RuntimeError:  # decompositions that need a real GPU; the shape is known from the CPU
            node.meta["val"] = tree_map_only(Tensor, self.moved, node.meta["val"])
        return node.meta["val"]


def gpu_kernels(module: fx.GraphModule, number: int) -> list[KernelWork]:
    """The work of the kernels that inductor makes of a graph."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    run = OnGpu(module, fake)
    values = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    inputs = tree_map_only(Tensor, run.moved, values)
    for node in module.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    module.recompile()
    with fake, torch.no_grad():
        run.run(*inputs)
    kernels = debug._inductor_triton_kernel_to_post_grad_node_info
    kernels.clear()
    settings = {"trace.provenance_tracking_level": 1, "fx_graph_cache": False, "compile_threads": 1}
    with V.set_fake_mode(fake), config.patch(settings), torch.no_grad():
        view_to_reshape(module)
        lowering = GraphLowering(module, example_inputs=inputs, graph_id=number, is_backward=number == 1)
        with V.set_graph_handler(lowering), V.set_debug_handler(debug.DebugContext()):
            lowering.run(*inputs)
            lowering.codegen()
    return kernel_works(module.graph, [(name.rpartition(":")[0], nodes) for name, nodes in kernels.items()])


def main(*names: str) -> None:
    graphs = {name: training_graphs(*networks(name)) for name in names}
    pretend_an_h200_is_here()
    for name, modules in graphs.items():
        for number, module in enumerate(modules):
            for work in gpu_kernels(module, number):
                moved = None if work.cost is None else [work.cost.read_bytes, work.cost.write_bytes]
                found = {"network": name, "graph": number, "name": work.name}
                print(json.dumps({**found, "moved": moved, "uncovered": work.uncovered}))


if __name__ == "__main__":
    main(*sys.argv[1:])
