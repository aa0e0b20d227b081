"""Globals in Triton kernels: each launch compares them with their values at compilation."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import rooftop.kernels

triton = pytest.importorskip("triton")


def jitted() -> Iterator[triton.JITFunction]:
    for module in pkgutil.walk_packages(rooftop.kernels.__path__, "rooftop.kernels."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, triton.JITFunction) and value.__module__ == module.name:
                yield value


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted")
def test_a_kernel_can_be_launched_a_second_time() -> None:
    """NaN is not equal to itself, so it must not be a global: every launch after the first would fail."""
    kernels = list(jitted())
    assert len(kernels) > 30
    for kernel in kernels:
        assert kernel.cache_key  # finds the globals
        for (name, _), (value, found_in) in kernel.used_global_vals.items():
            assert found_in[name] == value, f"{kernel.__name__}: {name}"
