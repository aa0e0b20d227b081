"""The kernels of conv_act, compiled for a GPU that this machine need not have; `test_conv_acts.py` runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftop.kernels.convolutions import launches as conv_act_launches
from rooftop.kernels.convolutions.launches import forward
from rooftop.kernels.convolutions.tables import MANY, MANY_OF_GROUPS, ConvPlan, ConvTile, Geometry
from rooftop.launch import INTERPRETED

triton = pytest.importorskip("triton")


@pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted")
@pytest.mark.parametrize("kernel", ["persistent", "gathered"])
def test_operands_of_tensor_cores_are_where_they_were_copied_to(
    kernel: str, monkeypatch: pytest.MonkeyPatch, spilled_bytes: Callable[[str], int]
) -> None:
    """The kernel copies both operands asynchronously, not through registers, and spills nothing."""
    tile = replace(MANY, columns=64) if kernel == "persistent" else ConvTile("gathered", 64, 64, 64, 4, 3)
    ptx = ptx_of(tile, monkeypatch)
    assert "wgmma.mma_async" in ptx
    if kernel == "persistent":
        assert "cp.async.bulk.tensor.5d" in ptx
        assert "ldmatrix" not in ptx
    else:
        assert ptx.count("cp.async.cg") == 3 * (4 + 4)  # both operands: 8 KiB each by 128 threads of 16 bytes
    assert spilled_bytes(ptx) == 0


@pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted")
@pytest.mark.parametrize(("channels", "groups"), [(112, 2), (64, 64)])
def test_groups_spill_nothing(
    channels: int, groups: int, monkeypatch: pytest.MonkeyPatch, spilled_bytes: Callable[[str], int]
) -> None:
    tile = ConvTile("depthwise", 8, 64, 7, 4, 1) if groups == channels else MANY_OF_GROUPS
    ptx = ptx_of(tile, monkeypatch, channels, groups)
    assert ("wgmma.mma_async" in ptx) == (groups < channels)
    assert "cp.async.cg" in ptx or ".v2.b32" in ptx, "loads of 8 or 16 bytes"
    assert spilled_bytes(ptx) == 0


def ptx_of(tile: ConvTile, monkeypatch: pytest.MonkeyPatch, channels: int = 64, groups: int = 1) -> str:
    """The PTX of the kernel that a 3 x 3 convolution launches."""
    found: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(
        conv_act_launches, "launch", lambda kernel, grid, device, *args, **given: found.append((kernel, args, given))
    )
    x, weight = (
        torch.empty(size, dtype=torch.bfloat16, memory_format=torch.channels_last)
        for size in ((2, channels, 16, 16), (channels, channels // groups, 3, 3))
    )
    geometry = Geometry(2, channels, 16, 16, channels, (3, 3), (1, 1), (1, 1), (1, 1), groups)
    bias = torch.empty(channels, dtype=torch.bfloat16)
    forward(ConvPlan(tile.kernel, tile, ""), x, weight, bias, None, geometry, "relu", False)
    ((kernel, arguments, given),) = found
    options = {name: given.pop(name) for name in ("num_warps", "num_stages", "launch_pdl") if name in given}
    types, constants = dict.fromkeys(given, "constexpr"), dict(given)
    divisible: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        if value is None:
            types[name], constants[name] = "constexpr", None
        elif isinstance(value, Tensor | int):
            types[name] = "*bf16" if isinstance(value, Tensor) else "i32"
            if isinstance(value, Tensor) or value % 16 == 0:
                divisible[place,] = [["tt.divisibility", 16]]
        else:
            types[name] = f"tensordesc<bf16[{','.join(map(str, value.block_shape))}]>"
    source = triton.compiler.ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constants, divisible)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options=options).asm["ptx"]
