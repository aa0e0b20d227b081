"""Loops that Numba compiles for expressions stay for the next run: loading one takes 4 ms, compiling one 200 ms."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from rooftop.launch import numba_loops
from rooftop.mat import loop_programs


@pytest.fixture(scope="session", autouse=True)
def loops_kept(kept_once: Callable[[str, str, Callable[[Path], None]], Path]) -> Iterator[None]:
    compiled = numba_loops.compiled_loop

    def kept(source: str, name: str, constants: Mapping[str, Any]) -> Callable[..., None]:
        """The loop, compiled by the same options, from a file whose name is a hash of everything that it is made of."""
        import numba

        plain = numba.njit

        def njit(**options: Any) -> Callable[[FunctionType], Callable[..., None]]:
            parts = (source, sorted(constants.items()), sorted(options.items()))
            key = hashlib.sha256(repr(parts).encode()).hexdigest()
            folder = kept_once("numba", key, lambda folder: Path(folder, "loop.py").write_text(source))

            def decorate(function: FunctionType) -> Callable[..., None]:
                function.__code__ = function.__code__.replace(co_filename=str(folder / "loop.py"))
                return plain(**options, cache=True)(function)  # type: ignore[no-any-return]

            return decorate

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(numba, "njit", njit)
            return compiled(source, name, {**constants, "__name__": numba_loops.__name__})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_programs, "compiled_loop", kept)
        yield
