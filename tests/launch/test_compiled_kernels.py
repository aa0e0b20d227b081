"""Launches of cached compiled kernels are those that Triton would make.

No kernel is compiled or run here. A stand-in for Triton's compiler records each launch of a requested kernel;
everything before the compiler is Triton's own code.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver, jit  # noqa: E402

from rooftop.launch import INTERPRETED, compiled_kernels, count_launches, known_calls  # noqa: E402
from rooftop.launch.triton_launch import launch, record_launch  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
CPU = torch.device("cpu")
STREAM = 7


def constants_last(x, y, n, m, eps, flag, SIZE: triton.language.constexpr, KIND: triton.language.constexpr):  # type: ignore[no-untyped-def]
    pass


def some_by_position(x, n, SIZE: triton.language.constexpr, KIND: triton.language.constexpr):  # type: ignore[no-untyped-def]
    pass


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """(compiled kernel, grid, stream, arguments) of each launch."""
    found: list[tuple[Any, ...]] = []
    target = GPUTarget("cuda", 90, 32)
    stands_in = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: STREAM, get_current_target=lambda: target
    )

    def compiled(self: Any, key: str, signature: Any, device: int, constants: Any, options: Any, *_: Any) -> Any:
        def run(x: int, y: int, z: int, stream: int, *rest: Any) -> None:
            arguments = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in rest[5:]]
            found.append((key, (x, y, z), stream, *map(repr, arguments)))

        made = SimpleNamespace(run=run, function=0, packed_metadata=(), launch_metadata=lambda *_: None)
        self.device_caches[device][0][key] = made
        return made

    monkeypatch.setattr(driver, "_active", stands_in)
    monkeypatch.setattr(jit.JITFunction, "_do_compile", compiled)
    compiled_kernels._compiled.clear()
    yield found
    compiled_kernels._compiled.clear()


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each launch that Triton itself makes."""
    calls: list[int] = []
    whole = jit.JITFunction.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(1)
        return whole(self, *args, **options)

    monkeypatch.setattr(jit.JITFunction, "run", run)
    return calls


MEMORY = torch.zeros(4096, dtype=torch.uint8)
NUMBERS = [
    0,
    1,
    2,
    15,
    16,
    17,
    32,
    -1,
    -16,
    2**31 - 1,
    2**31,
    2**31 + 5,
    -(2**31),
    -(2**31) - 1,
    2**40,
    2**63,
    2**64 - 1,
]


def tensor(rng: random.Random) -> torch.Tensor | None:
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.int64, torch.bool, None])
    if dtype is None:
        return None
    begin = rng.choice([0, 16, 32, 8, 24])
    return MEMORY[begin : begin + 64].view(dtype)


def test_any_sequence_of_launches_is_the_one_that_triton_makes(
    launched: list[tuple[Any, ...]], by_triton: list[int]
) -> None:
    kernel, rng = triton.jit(constants_last), random.Random(0)
    choices: list[Any] = [
        lambda: tensor(rng),
        lambda: tensor(rng),
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice([1, 16, 5, None]),
        lambda: rng.choice([1e-5, 1.0, 2]),
        lambda: rng.choice([True, False, 1, None]),
    ]
    arguments = [make() for make in choices]
    compared = 4000
    for _ in range(compared):  # each launch changes one argument
        i = rng.randrange(len(choices))
        arguments[i] = choices[i]() if rng.random() < 0.5 else (None, None, 5, 5, 1e-5, False)[i]
        parameters = {"SIZE": rng.choice([16, 64]), "KIND": rng.choice([None, "a"]), "num_warps": 4}
        grid = rng.choice([(3,), (3, 2), (4, 5, 6)])
        kernel.run(*arguments, grid=grid, warmup=False, **parameters)
        expected = launched.pop()
        launch(kernel, grid, CPU, *arguments, **parameters)
        assert launched.pop() == expected
        assert not launched
    assert len(by_triton) < 1.7 * compared  # cached kernels make the other launches


def test_the_second_launch_passes_triton_by(launched: list[tuple[Any, ...]], by_triton: list[int]) -> None:
    kernel = triton.jit(constants_last)
    for n in (3, 5, 7):  # Triton specializes these arguments alike
        with count_launches() as count:
            launch(kernel, (2,), CPU, MEMORY, None, n, 1, 1e-5, False, SIZE=16, KIND=True)
        assert count == {"constants_last": 1}
    assert len(by_triton) == 1
    assert [each[1:3] for each in launched] == [((2, 1, 1), STREAM)] * 3
    assert [each[5] for each in launched] == ["3", "5", "7"]


def test_constants_by_position_are_left_to_triton(launched: list[tuple[Any, ...]], by_triton: list[int]) -> None:
    kernel = triton.jit(some_by_position)
    for size in (16, 32, 16, 48):
        launch(kernel, (1,), CPU, MEMORY, 5, size, KIND=0)
    assert [each[5] for each in launched] == ["16", "32", "16", "48"]
    assert len({each[0] for each in launched}) == 3
    assert len(by_triton) == 4


def test_tensors_elsewhere_and_other_kinds_are_left_to_triton() -> None:
    assert compiled_kernels.facts_of((MEMORY, 5), -1) is not None
    assert compiled_kernels.facts_of((MEMORY, 5), 0) is None  # on a GPU
    assert compiled_kernels.facts_of((torch.nn.Buffer(MEMORY), torch.nn.Parameter(torch.ones(3))), -1) is not None
    for other in ("a", torch.float32, (1, 2), torch.ones(3).as_subclass(Subclass)):
        assert compiled_kernels.facts_of((other,), -1) is None


class Subclass(torch.Tensor):
    pass


def test_hooks_see_every_launch(by_triton: list[int], launched: list[tuple[Any, ...]]) -> None:
    kernel = triton.jit(constants_last)
    arguments = (MEMORY, None, 5, 5, 1.0, False)
    hook = triton.knobs.runtime.launch_enter_hook
    for expected in (1, 1):
        launch(kernel, (1,), CPU, *arguments, SIZE=16, KIND=0)
        assert len(by_triton) == expected
    hook.add(print)
    try:
        launch(kernel, (1,), CPU, *arguments, SIZE=16, KIND=0)
    finally:
        hook.remove(print)
    assert len(by_triton) == 2
    launch(kernel, (1,), CPU, *arguments, SIZE=16, KIND=0)
    assert len(by_triton) == 2


def test_without_triton_nothing_watches_kernels_in_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_kernels._settings.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(known_calls, "ON_CPU", True)

    class Made(NamedTuple):
        name: str = "add"
        takes_descriptors: bool = False

        def launch(self, grid: tuple[int, ...], given: list[Any]) -> None:
            assert grid == (2, 1, 1)
            assert all(given)

    def run(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        record_launch("add", Made(), (2, 1, 1), (x, y))
        return y

    again = known_calls.remembering(run)
    try:
        with count_launches() as counted:
            for _ in range(4):
                again(MEMORY)
    finally:
        compiled_kernels._settings.cache_clear()
    assert counted == {"add": 4}


def test_few_enough_are_kept(launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_kernels, "MOST_COMPILED", 4)
    kernel = triton.jit(constants_last)
    for size in range(1, 40):
        launch(kernel, (1,), CPU, MEMORY, None, 5, 5, 1.0, False, SIZE=size, KIND=0)
        assert len(compiled_kernels._compiled) <= 4
    assert [each[9] for each in launched] == [repr(size) for size in range(1, 40)]


# ---- calls of operators whose facts are known ------------------------------------------------------------------------


def test_a_known_call_makes_the_same_launches(
    launched: list[tuple[Any, ...]], by_triton: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = triton.jit(constants_last)
    ran: list[int] = []

    def run(x: torch.Tensor, n: int, eps: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        ran.append(1)
        y = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
        launch(kernel, (2, n), CPU, x[1:], y.view(-1)[8:], n, 1, eps, True, SIZE=16, KIND=0)
        scratch = x.new_empty(5)
        launch(kernel, (3,), CPU, scratch, y[:0], x.stride(0), 16, eps, False, SIZE=32, KIND=0)
        return y, None

    monkeypatch.setattr(known_calls, "ON_CPU", True)
    again = known_calls.remembering(run)
    for number in range(6):
        x = torch.zeros(4, 8)
        y, nothing = again(x, 7, 0.5)
        assert nothing is None
        assert (y.shape, y.dtype) == (x.shape, torch.bfloat16)
        one, other = launched[-2:]
        assert one[1:3] == ((2, 7, 1), STREAM)
        assert other[1:3] == ((3, 1, 1), STREAM)
        assert one[3:9] == (repr(x.data_ptr() + 32), repr(y.data_ptr() + 16), "7", "1", "0.5", "True")
        assert other[4:9] == ("0", "8", "16", "0.5", "False")
        assert len(ran) == min(number + 1, 2)
    assert len(launched) == 12
    again(torch.zeros(4, 8), 6, 0.5)
    again(torch.zeros(4, 8), 7, -0.0)
    again(torch.zeros(4, 8), 7, 0.0)
    assert len(ran) == 5


def test_calls_with_more_than_launches_run_each_time(
    launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = triton.jit(constants_last)
    ran: list[int] = []
    monkeypatch.setattr(known_calls, "ON_CPU", True)
    others: dict[str, Any] = {
        "a copy": lambda x: x.t().contiguous(),
        "an argument": lambda x: x,
        "a part of memory": lambda x: torch.empty_like(x)[1:],
        "memory that stays": lambda x: launch(kernel, (2,), CPU, MEMORY, x, 1, 1, 1.0, False, SIZE=1, KIND=0),
        "another kind of launch": lambda x: record_launch("cuda"),
        "a number": lambda x: x.sum().item(),
    }
    for name, other in others.items():

        def run(x: torch.Tensor, other: Any = other) -> torch.Tensor:
            ran.append(1)
            made = other(x)
            return made if isinstance(made, torch.Tensor) else torch.empty_like(x)

        again = known_calls.remembering(run)
        ran.clear()
        for _ in range(4):
            again(torch.ones(3, 4))
        assert len(ran) == 4, name


def test_functions_of_facts_may_be_called(launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch dispatches some functions of dtypes as operators."""
    kernel = triton.jit(constants_last)
    monkeypatch.setattr(known_calls, "ON_CPU", True)
    ran: list[int] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        launch(kernel, (2,), CPU, x, y, 1, 1, 0.5, True, SIZE=16, KIND=0)
        return y

    again = known_calls.remembering(run)
    for _ in range(4):
        again(torch.ones(3, 4))
    assert len(ran) == 2
    assert len(launched) == 4


def test_known_calls_of_several_threads(launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = triton.jit(constants_last)
    monkeypatch.setattr(known_calls, "ON_CPU", True)

    def run(x: torch.Tensor, n: int) -> torch.Tensor:
        y = torch.empty_like(x)
        launch(kernel, (n,), CPU, x, y, n, 1, 0.5, True, SIZE=16, KIND=0)
        return y

    again = known_calls.remembering(run)
    kept: list[list[tuple[Any, ...]]] = [[] for _ in range(4)]

    def work(number: int) -> None:
        for i in range(300):
            x, n = torch.empty(4 + i % 3, 8), 2 + i % 5
            kept[number].append((x, again(x, n), n))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    calls = [call for each in kept for call in each]
    expected = {(repr(x.data_ptr()), repr(y.data_ptr()), repr(n), n) for x, y, n in calls}
    assert all(y.shape == x.shape for x, y, _ in calls)
    assert len(launched) == len(expected) == 1200
    assert {(*each[3:6], each[1][0]) for each in launched} == expected
