"""The kernels of linear_act, compiled for a GPU that this machine need not have; `test_matmuls.py` runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rooftop.kernels.matmuls import launches as matmul_launches
from rooftop.kernels.operands.activations import ACTIVATIONS
from rooftop.launch import INTERPRETED

triton = pytest.importorskip("triton")


@pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted")
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_pointwise_kernels_compile_for_sm_90_without_spills(
    activation: str, spilled_bytes: Callable[[str], int]
) -> None:
    from rooftop.kernels.matmuls import triton_kernels as kernels

    common = {"ACTIVATION": ACTIVATIONS.index(activation), "UNIT": 8, "HALF": False}
    backward_ = {"OF_OUTPUT": False, "SUM": True, "ROWS": matmul_launches.BACKWARD_ROWS // 2, "COLUMNS": 128}
    finish = {"HAS_BIAS": True, "HAS_RESIDUAL": True, "KEEP": True, "SPLIT": 1}
    finish |= {"ROWS": matmul_launches.FINISH_ELEMENTS // 512, "COLUMNS": 512}
    for kernel, constants in ((kernels.linear_act_backward, backward_), (kernels.linear_act_finish, finish)):
        assert spilled_bytes(ptx_of(kernel, common | constants)) == 0, kernel.__name__


def ptx_of(kernel: Any, constants: dict[str, int | bool]) -> str:
    """The PTX of a kernel with aligned float32 tensors and 32-bit sizes, compiled with four warps."""
    names = kernel.arg_names
    tensors = {"dy", "saved", "dz", "partial", "sums", "bias", "residual", "y", "z"} & set(names)
    types = {name: "constexpr" if name in constants else "*fp32" if name in tensors else "i32" for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in tensors}
    source = triton.compiler.ASTSource(kernel, types, constants, aligned)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    return str(triton.compile(source, target=target, options={"num_warps": 4}).asm["ptx"])
