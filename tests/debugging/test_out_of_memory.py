"""The explanation names each large tensor, its module and its line, on a snapshot in torch's format and on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from rooftop.debugging import out_of_memory
from rooftop.debugging.out_of_memory import (
    ACTIVATION,
    BACKWARD,
    GRADIENT,
    OPTIMIZER_STATE,
    OTHER,
    PARAMETER,
    KnownTensor,
    LiveTensor,
    MemoryExplanation,
    MemoryGroup,
    explain_memory,
    explained_memory,
    explanation_of,
)
from rooftop.hardware.memory import DeviceMemory
from rooftop.hardware.source_lines import SourceLine

MIB = 1 << 20
LINEAR = torch.nn.modules.linear.__file__


def frames(*lines: tuple[str, int]) -> list[dict[str, Any]]:
    """Stack frames, innermost first, as in the allocator's records."""
    return [{"filename": file, "line": line, "name": "forward"} for file, line in lines]


def block(address: int, size: int, state: str = "active_allocated", stack: Any = ()) -> dict[str, Any]:
    return {"address": address, "size": size + 512, "requested_size": size, "state": state, "frames": list(stack)}


def alloc(address: int, mark: str, stack: Any = ()) -> dict[str, Any]:
    return {"action": "alloc", "addr": address, "size": 0, "frames": list(stack), "user_metadata": mark}


IN_FORWARD = frames((LINEAR, 134), (out_of_memory.__file__, 9), ("/home/me/model.py", 17), ("/home/me/train.py", 40))
IN_OPTIMIZER = frames((torch.optim.__file__, 100), ("/home/me/train.py", 44))

SNAPSHOT = {
    "segments": [
        {
            "device": 0,
            "address": 0x1000,
            "blocks": [
                block(0x1000, 4 * MIB),  # before the recording
                block(0x2000, 64 * MIB, stack=IN_FORWARD),
                block(0x3000, 32 * MIB, stack=IN_FORWARD),
                block(0x4000, 9 * MIB, "inactive"),
                block(0x5000, 500 * MIB, "active_awaiting_free"),
            ],
        },
        {
            "device": 0,
            "address": 0x10000,
            "blocks": [
                block(0x10000, 3 * MIB),
                block(0x11000, 5 * MIB, stack=IN_OPTIMIZER),
                block(0x12000, 2 * MIB),
                block(0x13000, 1 * MIB),
                block(0x14000, 6 * MIB, "inactive"),
            ],
        },
        {"device": 1, "address": 0x1000, "blocks": [block(0x1000, 1000 * MIB)]},
    ],
    "device_traces": [
        [
            alloc(0x2000, "module layers.9", frames(("/home/me/old.py", 1))),  # a tensor that has been freed since then
            alloc(0x2000, "module layers.1", IN_FORWARD),
            alloc(0x3000, "module layers.1", IN_FORWARD),
            alloc(0x10000, ""),  # on autograd's thread
            alloc(0x11000, "optimizer", IN_OPTIMIZER),
            alloc(0x12000, ""),
            alloc(0x13000, "", frames(("/home/me/train.py", 38))),
            {"action": "oom", "size": 12 * MIB, "device_free": 0, "frames": IN_FORWARD, "user_metadata": "module head"},
        ],
        [alloc(0x1000, "module other.gpu")],
    ],
}
KNOWN = {
    0x1000: KnownTensor(PARAMETER, "layers.1.weight", (1024, 1024), torch.float32),
    0x2000: KnownTensor(None, None, (16, 1024, 1024), torch.float32),
    0x10000: KnownTensor(GRADIENT, "layers.1.weight", (1024, 768), torch.float32),
    0x11000: KnownTensor(OPTIMIZER_STATE, "layers.1.weight (exp_avg)", (1280, 1024), torch.float32),
}
MEMORY = DeviceMemory("cuda:0", 120 * MIB, 130 * MIB, 125 * MIB, 10 * MIB, 1000 * MIB, 131 * MIB)


def explanation(**changes: Any) -> MemoryExplanation:
    return explanation_of(
        **{"snapshot": SNAPSHOT, "memory": MEMORY, "known": KNOWN, "device": 0, "out": True} | changes
    )


def test_each_tensor_has_its_kind_name_module_and_line() -> None:
    model, train = SourceLine("/home/me/model.py", 17), SourceLine("/home/me/train.py", 44)
    assert explanation().tensors == (
        LiveTensor(64 * MIB, ACTIVATION, None, "layers.1", model, (16, 1024, 1024), torch.float32),
        LiveTensor(32 * MIB, ACTIVATION, None, "layers.1", model, None, None),
        LiveTensor(5 * MIB, OPTIMIZER_STATE, "layers.1.weight (exp_avg)", None, train, (1280, 1024), torch.float32),
        LiveTensor(4 * MIB, PARAMETER, "layers.1.weight", None, None, (1024, 1024), torch.float32),
        LiveTensor(3 * MIB, GRADIENT, "layers.1.weight", None, None, (1024, 768), torch.float32),
        LiveTensor(2 * MIB, BACKWARD, None, None, None, None, None),
        LiveTensor(1 * MIB, OTHER, None, None, SourceLine("/home/me/train.py", 38), None, None),
    )


def test_tensors_of_one_module_and_line_are_added_up() -> None:
    found = explanation(most=2)
    assert found.groups[0] == MemoryGroup(ACTIVATION, "layers.1", SourceLine("/home/me/model.py", 17), 2, 96 * MIB)
    assert len(found.groups) == len(found.tensors) == 2
    assert list(found.by_kind) == [ACTIVATION, OPTIMIZER_STATE, PARAMETER, GRADIENT, BACKWARD, OTHER]
    assert sum(found.by_kind.values()) == 111 * MIB


def test_what_was_asked_for_and_where() -> None:
    found = explanation()
    assert (found.requested_bytes, found.module) == (12 * MIB, "head")
    assert found.line == SourceLine("/home/me/model.py", 17)
    now = explanation(out=False)
    assert (now.requested_bytes, now.module, now.line) == (None, None, None)


def test_the_text_says_it_all() -> None:
    text = str(explanation())
    assert "cuda:0 is out of memory: 12.00 MiB requested in head at /home/me/model.py:17" in text
    assert "131.00 MiB of them for this process" in text
    assert "64.00 MiB  activations [16, 1024, 1024] float32 in layers.1 at /home/me/model.py:17" in text
    assert "layers.1.weight (exp_avg) (optimizer states) [1280, 1024] float32 at /home/me/train.py:44" in text
    assert "96.00 MiB  2 x activations in layers.1 at /home/me/model.py:17" in text
    assert str(explanation(out=False)).startswith("memory of cuda:0:\n")


def test_the_advice_follows_what_holds_the_memory() -> None:
    fragments, others, activations = explanation().advice
    assert "expandable_segments" in fragments  # 15 MiB are free in pieces of at most 9 MiB; 12 MiB are requested
    assert "860.00 MiB are held outside" in others
    assert activations.startswith("Activations take 96.00 MiB (86%): use a smaller batch")

    states = {address: KnownTensor(OPTIMIZER_STATE, "w", (1,), torch.float32) for address in (0x2000, 0x3000)}
    alone = DeviceMemory("cuda:0", 1, 1, 1, 999 * MIB, 1000 * MIB, 11 * MIB)
    request, optimizer = explanation(memory=alone, known=states).advice
    assert request.startswith("The request alone (12.00 MiB) exceeds the 11.00 MiB")
    assert "8-bit Adam" in optimizer


def test_a_free_piece_that_is_large_enough_is_no_fragmentation() -> None:
    trace = [{"action": "oom", "size": 8 * MIB, "device_free": 0, "frames": []}]
    assert not any("expandable" in line for line in explanation(snapshot={**SNAPSHOT, "device_traces": [trace]}).advice)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 2:
            raise ValueError(x.shape)
        return self.linear(x)


def test_the_running_module_is_marked_and_unmarked_again() -> None:
    net, loss = nn.Sequential(Block()), nn.MSELoss()
    watched, marks = out_of_memory._Watched(), list[str]()
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    with out_of_memory._marking(watched, marks.append):
        loss(net(torch.ones(1, 2)), torch.ones(1, 2)).backward()
        optimizer.step()
        optimizer.step()
    inside = ["module Sequential", "module 0", "module 0.linear", "module 0", "module Sequential", ""]
    assert marks == [*inside, "module MSELoss", "", "optimizer", "", "optimizer", "", ""]
    assert watched.optimizers == [optimizer]
    net(torch.ones(1, 2))
    assert marks[-2:] == ["", ""]


def test_a_module_of_several_parents_is_marked_under_each() -> None:
    shared, marks = nn.Linear(2, 2), list[str]()
    net = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    with out_of_memory._marking(out_of_memory._Watched(), marks.append):
        net(torch.ones(1, 2))
    assert [mark for mark in marks if mark.endswith(".0")] == ["module 0.0", "module 1.0"]


def test_no_model_and_no_optimizer_is_kept_alive() -> None:
    watched = out_of_memory._Watched()

    def train() -> None:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters())
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert [scope for scope, _ in watched.roots] == [""]
        assert watched.optimizers == [optimizer]

    with out_of_memory._marking(watched, lambda mark: None):
        train()
    gc.collect()
    assert (watched.roots, watched.optimizers) == ([], [])


def test_an_error_in_a_module_leaves_no_mark() -> None:
    marks: list[str] = []
    with out_of_memory._marking(out_of_memory._Watched(), marks.append), pytest.raises(ValueError, match="3"):
        nn.Sequential(Block())(torch.ones(3, 2))
    assert marks == ["module Sequential", "module 0", "module Sequential", "", ""]


def test_what_was_interrupted_is_marked_no_more() -> None:
    class Interrupted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    class Broken(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            raise ValueError("no step")

    marks: list[str] = []
    net, other = nn.Sequential(Interrupted()), nn.ReLU()
    optimizer = Broken(nn.Linear(2, 2).parameters())
    with out_of_memory._marking(out_of_memory._Watched(), marks.append):
        with pytest.raises(KeyboardInterrupt):
            net(torch.ones(1, 2))
        other(torch.ones(1, 2))
        with pytest.raises(ValueError, match="no step"):
            optimizer.step()
        other(torch.ones(1, 2))
    assert marks == ["module Sequential", "module 0", "module ReLU", "", "optimizer", "module ReLU", "", ""]


@contextmanager
def pretended_gpu(monkeypatch: pytest.MonkeyPatch, snapshot: Any) -> Iterator[list[Any]]:
    """A recorded GPU with this snapshot; yields the calls that start and stop the recording."""
    calls: list[Any] = []
    memory = torch.cuda.memory
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "init", lambda: None)
        patch.setattr(torch.cuda, "current_device", lambda: 1)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * MIB, 1000 * MIB))
        patch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False)
        patch.setattr(memory, "_record_memory_history", lambda enabled="all", **options: calls.append(enabled))
        patch.setattr(memory, "_set_memory_metadata", lambda mark: None)
        patch.setattr(memory, "_snapshot", snapshot)
        patch.setattr(out_of_memory, "gpu_memory", lambda device, free: MEMORY)
        yield calls


MESSAGE = "CUDA out of memory. Tried to allocate 12.00 MiB. GPU 0 has a total capacity of 1000 MiB"


def test_the_error_itself_leaves_with_the_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.OutOfMemoryError(MESSAGE)
    with (
        pretended_gpu(monkeypatch, lambda: SNAPSHOT) as calls,
        pytest.raises(torch.OutOfMemoryError) as raised,
        explained_memory(Block()) as recording,
    ):
        raise error
    assert raised.value is error
    assert recording.explanation is not None
    assert recording.explanation.requested_bytes == 12 * MIB  # the request on GPU 0, which the message names
    assert error.__notes__ == [str(recording.explanation)]
    assert calls == ["all", None]


def test_trouble_with_the_explanation_does_not_hide_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pretended_gpu(monkeypatch, dict) as calls,
        pytest.raises(torch.OutOfMemoryError) as raised,
        explained_memory(),
    ):
        raise torch.OutOfMemoryError(MESSAGE)
    assert raised.value.__notes__ == ["rooftop could not explain the error: KeyError: 'device_traces'"]
    assert calls == ["all", None]


def test_without_a_gpu_there_is_nothing_to_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with explained_memory(Block()) as recording:
        pass
    assert recording.explanation is None
    with pytest.raises(RuntimeError, match="NVIDIA GPU"):
        explain_memory()


WIDTH = 4096
LAYERS = 24


class Wide(nn.Module):
    """A stack of linear layers whose activations (16 KiB a row, two for each layer) grow until memory runs out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = gelu(layer(x))  # saves its input, and the next layer saves its output
        return x


LAYER_LINE = Wide.forward.__code__.co_firstlineno + 2


@pytest.fixture
def limited_gpu() -> Iterator[int]:
    """A GPU of which this process may reserve 3 GiB; the limit in bytes."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.get_per_process_memory_fraction()
    total = torch.cuda.get_device_properties(0).total_memory
    limit = torch.cuda.memory_reserved() + (3 << 30)
    torch.cuda.set_per_process_memory_fraction(limit / total)
    yield limit
    torch.cuda.set_per_process_memory_fraction(before)
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_on_a_gpu_the_largest_tensors_have_their_module_and_line(limited_gpu: int) -> None:
    net = Wide().cuda()  # 24 x 64 MiB
    x = torch.randn(2 * WIDTH, WIDTH, device="cuda")  # 128 MiB; the results of the sixth layer do not fit
    with pytest.raises(torch.OutOfMemoryError) as raised, explained_memory(net, most=60) as recording:
        net(x)
    found = recording.explanation
    assert found is not None
    assert str(found) in raised.value.__notes__
    assert found.requested_bytes is not None
    assert found.requested_bytes >= 128 * MIB
    assert found.memory.limit_bytes == pytest.approx(limited_gpu, rel=1e-3)
    here = SourceLine(__file__, LAYER_LINE)
    assert found.line == here

    activations = [tensor for tensor in found.tensors if tensor.kind == ACTIVATION and tensor.size_bytes >= 128 * MIB]
    assert len(activations) >= 4
    assert all(tensor.line == here for tensor in activations)
    assert (
        {"layers.0", "layers.1"}
        <= {tensor.module for tensor in activations}
        <= {
            "Wide",
            *(f"layers.{index}" for index in range(LAYERS)),
        }
    )
    weights = [tensor for tensor in found.tensors if tensor.kind == PARAMETER]
    assert {tensor.name for tensor in weights} == {f"layers.{index}.weight" for index in range(LAYERS)}
    assert {tensor.shape for tensor in weights} == {(WIDTH, WIDTH)}
    assert found.by_kind[PARAMETER] == LAYERS * WIDTH * WIDTH * 4
    assert any(sentence.startswith("Activations") for sentence in found.advice)


@pytest.mark.gpu
def test_on_a_gpu_gradients_and_optimizer_states_are_named() -> None:
    net = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).cuda()
    optimizer = torch.optim.Adam(net.parameters())
    with explained_memory(net) as recording:
        net(torch.randn(64, 512, device="cuda")).sum().backward()
        optimizer.step()
        found = recording.explain(most=100)
    assert not torch._C._cuda_isHistoryEnabled()
    named = {(tensor.kind, tensor.name) for tensor in found.tensors}
    assert {
        (GRADIENT, "0.weight"),
        (GRADIENT, "2.weight"),
        (OPTIMIZER_STATE, "0.weight (exp_avg)"),
        (OPTIMIZER_STATE, "2.weight (exp_avg_sq)"),
    } <= named
    assert found.requested_bytes is None
    assert (PARAMETER, "2.weight") in {(t.kind, t.name) for t in explain_memory(net, most=1000).tensors}
