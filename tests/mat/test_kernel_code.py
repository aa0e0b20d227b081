"""The compiled code of kernels for Mats, without a GPU: the width of loads and stores, and the arithmetic
instructions."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from rooftop import mat
from rooftop.launch import INTERPRETED
from rooftop.launch.triton_launch import Repeated
from rooftop.mat import Mat, converting, copies, evaluation

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED or os.name == "nt", reason="compiles kernels")
POINTERS = {torch.uint8: "*u8", torch.int32: "*i32", torch.float32: "*fp32", torch.float64: "*fp64"}


@pytest.fixture
def instructions(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], Counter[str]]:
    """The instructions of the one kernel that a call would launch for tensors on a GPU of compute capability 9.0."""
    found: list[str] = []

    def compile_instead(launch: Repeated, *pointers: torch.Tensor) -> None:
        kernel, parameters = launch.kernel, launch.parameters
        given = list(launch.arguments)
        for place, pointer in zip(launch.places, pointers, strict=True):
            given[place] = pointer
        types: dict[str, str] = {}
        constants: dict[tuple[int, ...], object] = {}
        attributes: dict[tuple[int, ...], list[list[object]]] = {}
        for n, parameter in enumerate(kernel.params):
            value = given[n] if n < len(given) else parameters[parameter.name]
            if isinstance(value, torch.Tensor):
                types[parameter.name] = POINTERS[value.dtype]
                aligned = value.data_ptr() % 16 == 0
            elif parameter.is_constexpr or (value == 1 and not parameter.do_not_specialize):
                types[parameter.name], aligned = "constexpr", False
                constants[n,] = value
            else:
                types[parameter.name] = "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"
                aligned = not parameter.do_not_specialize and value % 16 == 0
            if aligned:
                attributes[n,] = [["tt.divisibility", 16]]
        source = triton.compiler.ASTSource(kernel, types, constants, attributes)
        options = {name: parameters[name] for name in ("num_warps", "enable_fp_fusion") if name in parameters}
        target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
        found.append(triton.compile(source, target=target, options=options).asm["ptx"])

    monkeypatch.setattr(Repeated, "__call__", compile_instead)
    for module in (converting, copies, evaluation):
        monkeypatch.setattr(module, "INTERPRETED", True)  # as for a GPU

    def of(call: Callable[[], object]) -> Counter[str]:
        found.clear()
        call()
        (ptx,) = found
        return Counter(re.findall(r"^\s*(?:@%p\d+ )?([a-z]\w*(?:\.\w+)+)", ptx, re.MULTILINE))

    return of


def image(dtype: torch.dtype = torch.uint8, before: int = 0) -> Mat:
    """An image in memory that begins at a multiple of 64 bytes, or a region that begins at this column of a larger
    image."""
    room = torch.zeros(64 << 10, dtype=dtype)
    begin = -(room.data_ptr() // room.element_size()) % 64
    columns = 640 + (16 if before else 0)
    return Mat(room[begin:][: 20 * columns * 3].view(20, columns, 3)[:, before : before + 640])


def test_float64_is_computed_without_conversions(
    instructions: Callable[[Callable[[], object]], Counter[str]],
) -> None:
    """Conversions run at a quarter of the rate of other instructions. The kernel has two products, a sum, and one more
    instruction for each input and output."""
    a, b, out = image(), image(), image()
    counted = instructions(lambda: out.assign(a * 0.3 + b * 0.7))
    assert not [name for name in counted if name.startswith("cvt") and "f64" in name]
    blocks = 2  # one with a mask, one without
    elements = 16 * blocks
    assert counted["mul.rn.f64"] == 2 * elements
    assert counted["add.rn.f64"] == 4 * elements  # no clamping is needed, because 255 (0.3 + 0.7) is within 255.25


def test_rounding_takes_one_sum(instructions: Callable[[Callable[[], object]], Counter[str]]) -> None:
    x, out = image(torch.float32), image()
    counted = instructions(lambda: x.convertTo(mat.CV_8U, 255, 0, out))
    assert not [name for name in counted if re.match(r"cvt\.r[mnz]", name)]
    assert counted["ld.global.v4.b32"] == 8
    assert counted["st.global.v4.b32"] == 2


@pytest.mark.parametrize(
    ("before", "width"), [(16, "v4.b32"), (8, "v2.b32"), (4, "b32"), (2, "b16"), (1, "b8")], ids=lambda n: str(n)
)
def test_regions_are_read_as_wide_as_they_lie(
    instructions: Callable[[Callable[[], object]], Counter[str]], before: int, width: str
) -> None:
    """A column has three bytes. A region is read 16 bytes at a time from column 16 on, 8 from column 8, and so on with
    4, 2 and 1."""
    a, b, out = image(before=before), image(before=before), image(before=before)
    counted = instructions(lambda: out.assign(a + b))
    assert {name for name in counted if name.startswith("ld.global")} == {f"ld.global.{width}"}
    assert {name for name in counted if name.startswith("st.global")} == {f"st.global.{width}"}
    bytes_at_a_time = {"v4.b32": 16, "v2.b32": 8, "b32": 4, "b16": 2, "b8": 1}[width]
    blocks = 2  # one with a mask, one without
    assert counted[f"ld.global.{width}"] == 2 * blocks * 16 // bytes_at_a_time


def test_masked_copies_move_16_bytes_and_do_not_read_the_target(
    instructions: Callable[[Callable[[], object]], Counter[str]],
) -> None:
    a, out = image(), image()
    mask = Mat(torch.ones(20, 640, dtype=torch.uint8))
    counted = instructions(lambda: a.copyTo(out, mask))
    words = 2  # elements of a thread
    assert {name for name in counted if name.startswith("ld.global")} == {"ld.global.v4.b32"}
    assert counted["ld.global.v4.b32"] == 2 * words  # loads of the mask and of the source
    assert counted["st.global.v4.b32"] == words
    assert counted["st.global.b8"] == 16 * words  # stores of groups that are only partly chosen
