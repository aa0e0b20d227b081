"""The kernels of a ConvLSTM's gates, compiled for a GPU that this machine need not have; `test_conv_lstms.py` runs
them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rooftop.kernels.operands.launch_data import tile_of
from rooftop.kernels.recurrent.tables import BACKWARD, FORWARD
from rooftop.launch import INTERPRETED

triton = pytest.importorskip("triton")


@pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted")
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_kernels_compile_for_sm_90_without_spills(direction: str, spilled_bytes: Callable[[str], int]) -> None:
    from rooftop.kernels.recurrent import triton_kernels as kernels

    kernel = kernels.conv_lstm_forward if direction == "forward" else kernels.conv_lstm_backward
    config = FORWARD if direction == "forward" else BACKWARD
    constants = tile_of(config.elements, 64, config.warps)
    warps = constants.pop("num_warps")
    constants |= {"UNIT": 8, "ACTIVATION": 0, "RECURRENT": 1, "ADD": True, "PRECISE": True}
    constants |= {"KEEP": True, "BIAS": True, "positions": 1} if direction == "forward" else {"MORE": True}
    names = kernel.arg_names
    types = {n: "constexpr" if n in constants else "i32" if n in ("rows", "columns") else "*fp32" for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types[n].startswith("*")}
    source = triton.compiler.ASTSource(kernel, types, constants, aligned)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    ptx = triton.compile(source, target=target, options={"num_warps": warps}).asm["ptx"]
    assert spilled_bytes(ptx) == 0
    assert "ld.global.v4" in ptx, "16 bytes at a time"
