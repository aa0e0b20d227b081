"""Ladders on the CPU, whose kernels in CUDA C++ are compiled beforehand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from rooftop.ladder import Ladder, build
from rooftop.ladder.rungs import source

ALSO = {"layer": ("product<2>", "product<3>", "output_gradient", "bias_step")}  # launched only by training


@pytest.fixture
def ladder_on_cpu(
    cuda_on_cpu: Counter[str], compile_for_cpu: Callable[[str, Sequence[str]], None]
) -> Callable[[str, int], Ladder]:
    """`build`, with rungs in CUDA C++ that run on the CPU."""

    def make(name: str, size: int) -> Ladder:
        file = source(f"{name}.cu")
        instances = _instances.get(name)
        if instances is None:
            ladder = build(name, size, "cpu")
            instances = [*dict.fromkeys(k for rung in ladder.rungs for k in rung.kernels), *ALSO.get(name, ())]
            _instances[name] = instances
        compile_for_cpu(file, instances)
        cuda_on_cpu.clear()
        return build(name, size, "cpu")

    return make


_instances: dict[str, list[str]] = {}
