"""Machine code that Triton makes of the kernels of the cross entropy for sm_90; no GPU is needed."""

from __future__ import annotations

import re

import pytest

triton = pytest.importorskip("triton")


@pytest.mark.parametrize(("unit", "loads"), [(1, "LDG.E.U16"), (16, "LDG.E.128")])
def test_compiled_gradient_requests_all_logits_before_it_computes(unit: int, loads: str) -> None:
    """If the first logits are computed before the others are requested, each load waits for memory by itself."""
    from rooftop.kernels.losses.tables import GRADIENT_BYTES, GRADIENT_WARPS
    from rooftop.kernels.losses.triton_kernels import cross_entropy_gradient as kernel

    floats = dict.fromkeys(("dloss", "weight", "weight_sum", "inverse", "statistics"), "*fp32")
    tensors = floats | {"x": "*bf16", "target": "*i64", "dx": "*bf16"}
    numbers = dict.fromkeys(("rows", "units", "x_stride", "dloss_stride", "ignored"), "i32")
    columns = GRADIENT_BYTES // 2
    constants = {"HAS_WEIGHT": False, "SMOOTH": False, "Z": False, "MEAN": True}
    constants |= {"UNIT": unit, "ROWS": 1, "COLUMNS": columns}
    types = (
        dict.fromkeys(("kept", "spread", "z_loss"), "fp32") | tensors | numbers | dict.fromkeys(constants, "constexpr")
    )
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in tensors}
    source = triton.compiler.ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constants, aligned)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    code = triton.compile(source, target=target, options={"num_warps": GRADIENT_WARPS}).asm["sass"]
    before, power, _ = code.partition("MUFU.EX2")
    assert power
    bytes_a_load = 2 if loads == "LDG.E.U16" else 16
    of_thread = GRADIENT_BYTES // (32 * GRADIENT_WARPS)
    assert len(re.findall(rf"{re.escape(loads)} ", before)) == of_thread // bytes_a_load
