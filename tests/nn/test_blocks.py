"""Whole blocks of networks, built with torch.nn and with Rooftop: the same state, results and gradients."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rooftop.cost import CountingMode
from rooftop.launch import INTERPRETED, count_launches
from rooftop.testing import assert_as_accurate

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "transformer_blocks.py"
SPECIFICATION = importlib.util.spec_from_file_location("transformer_blocks", EXAMPLE)
assert SPECIFICATION is not None
assert SPECIFICATION.loader is not None
blocks = sys.modules["transformer_blocks"] = importlib.util.module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(blocks)

SIZES = (48, 3, 320)  # features, heads, tokens
USES = {  # Rooftop's operators, forward and backward
    "gpt": {"embedding", "layer_norm", "linear_act", "attention", "linear_cross_entropy", "norm_backward"},
    "llama": {"rms_norm", "linear_act", "attention", "rope", "swiglu", "swiglu_backward", "norm_backward"},
    "swin": {"layer_norm", "linear_act", "window_attention", "window_attention_backward", "norm_backward"},
}
each_block = pytest.mark.parametrize("name", sorted(USES))


def build(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """(theirs, ours, the first exactly, inputs, inputs exactly)."""
    torch.manual_seed(7)
    theirs, ours = blocks.pair(name, *SIZES)
    given = blocks.inputs(name, *SIZES, batch=2, size=8)
    modules = [module.to(device, dtype) for module in (theirs, ours)]
    given = [given[0].to(device, dtype if given[0].is_floating_point() else None), *(x.to(device) for x in given[1:])]
    exact, _ = blocks.pair(name, *SIZES)
    exact.load_state_dict(modules[0].state_dict())
    wide = [x.double() if x.is_floating_point() else x for x in given]
    return (*modules, exact.to(device).double(), given, wide)


def results(module: Callable[..., Tensor], parameters: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """The output, and the gradients of the parameters and of the input (unless the input consists of tokens)."""
    first = given[0].clone().requires_grad_() if given[0].is_floating_point() else given[0]
    y = module(first, *given[1:])
    torch.manual_seed(1)
    weights = torch.randn(y.shape, dtype=torch.float64).to(y.device, y.dtype)
    wanted = [*parameters, *([first] if first.requires_grad else [])]
    return [y, *torch.autograd.grad(y, wanted, weights)]


def assert_alike(name: str, device: str, dtype: torch.dtype, compiled: Callable[[nn.Module], Any]) -> None:
    theirs, ours, exact, given, wide = build(name, device, dtype)
    found = results(compiled(ours), list(ours.parameters()), given)
    plain = results(theirs, list(theirs.parameters()), given)
    truth = results(exact, list(exact.parameters()), wide)
    names = ["result", *(n for n, _ in ours.named_parameters()), "input"]
    for what, *values in zip(names, found, plain, truth, strict=False):
        assert_as_accurate(*values, what=f"{name}: {what}")


@each_block
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_eager(name: str, dtype: torch.dtype) -> None:
    with count_launches() as launches:
        assert_alike(name, "cpu", dtype, lambda module: module)
    assert bool(launches) == INTERPRETED


@each_block
def test_as_one_graph(name: str) -> None:
    assert_alike(name, "cpu", torch.float32, lambda m: torch.compile(m, fullgraph=True, backend="aot_eager"))


@pytest.mark.gpu
@each_block
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_eager_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    with count_launches() as launches:
        assert_alike(name, "cuda", dtype, lambda module: module)
    assert launches


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@each_block
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    assert_alike(name, "cuda", dtype, lambda m: torch.compile(m, fullgraph=True, dynamic=False))


@each_block
def test_a_checkpoint_of_one_is_a_checkpoint_of_the_other(name: str) -> None:
    theirs, ours = blocks.pair(name, *SIZES)
    for module in (theirs, ours):
        torch.nn.init.uniform_(next(module.parameters()))
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)


@each_block
def test_every_operator_of_a_block_has_a_cost(name: str) -> None:
    _, ours, _, given, _ = build(name)
    with CountingMode() as counted:
        results(ours, list(ours.parameters()), given)
    used = {r.name.removeprefix("rooftop::") for r in counted.records if r.name.startswith("rooftop::")}
    assert used >= USES[name]
    assert [r.name for r in counted.records if r.cost is None] == []


def test_places_that_the_shift_brought_together_do_not_see_each_other() -> None:
    """The mask of the Swin block is compared with its meaning: distances in the image."""
    window, side = 4, 8
    at = torch.stack(torch.meshgrid(*[torch.arange(side)] * 2, indexing="ij"), -1)[None]  # (1, side, side, 2)
    places = blocks.to_windows(at, window)  # (windows, area, 2)
    near = (places[:, :, None] - places[:, None]).abs().amax(-1) < window
    mask = blocks.shift_mask(at, window)
    assert torch.equal(mask[:, 0], near)
    assert torch.equal(blocks.from_windows(places, at, window), at)


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_blocks_through_the_interpreter(interpreted: Callable[..., int]) -> None:
    cases = "test_eager and torch.float32 and not swin"  # the interpreter is slow; the softmax has separate tests
    assert interpreted(__file__, "-k", f"{cases} or through_the_interpreter") == 2
