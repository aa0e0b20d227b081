"""Repeat the tests of rotary embeddings, SwiGLU, embeddings, merged attention, max pools and random numbers with their
Triton kernels interpreted.

All tests run in one process, because starting a process takes longer than the tests. Tests that do not concern kernels
are omitted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rooftop.launch import INTERPRETED

FILES = (
    *("attentions/test_rotary", "attentions/test_states", "convolutions/test_max_pools", "gated/test_gated"),
    *("lookups/test_embeddings", "randoms/test_randoms", "randoms/test_triton_kernels"),
)
WITHOUT_KERNELS = "operator_checks or compiled or finite_differences or refused or wrong_arguments or cost"


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_all_through_the_interpreter(interpreted: Callable[..., int]) -> None:
    files = [str(Path(__file__).parent / f"{name}.py") for name in FILES]
    assert interpreted(*files, __file__, "-k", f"not ({WITHOUT_KERNELS})") > 140
