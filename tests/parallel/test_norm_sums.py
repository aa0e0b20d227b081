"""Sums over ranks and their norms: which ranks may share memory, and the kernel on GPUs.
tests/kernels/norms/test_rank_sums.py tests the kernel on the CPU, test_generation.py the models that use it."""

from __future__ import annotations

import copy
import ctypes
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from rooftop.hardware.graphs import captured
from rooftop.kernels.norms.rank_sums import MOST_RANKS, norm_of_rank_sum_reference
from rooftop.nn import LayerNorm, RMSNorm
from rooftop.parallel import norm_sums as module
from rooftop.parallel import peer_memory as memory_module
from rooftop.parallel.norm_sums import NormSums, Summand, norm_sums, takes
from rooftop.parallel.peer_memory import Offer, PeerMemory, peer_memory, refusal
from rooftop.parallel.watching import abort_communication
from rooftop.testing import assert_as_accurate

Run = Callable[..., list[Any]]

# ---- memory --------------------------------------------------------------------------------------------------------


class FilesForGpus:
    """A stand-in for the driver of a rank: memory is a file, and its path is the handle."""

    def __init__(self, rank: int, refuses: str) -> None:
        self.rank, self.refuses, self.held = rank, refuses, {}

    def allocated(self, bytes: int) -> tuple[int, bytes]:
        if self.refuses == "memory" and self.rank == 1:
            raise OSError("cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY")
        path = f"/dev/shm/rooftop-{os.getpid()}"
        with open(path, "wb") as file:
            file.write(b"\0" * bytes)
        return self.mapped(path.encode()), path.encode()

    def mapped(self, handle: bytes) -> int:
        if self.refuses == "handles" and self.rank == 2 and str(os.getpid()) not in handle.decode():
            raise OSError("cuIpcOpenMemHandle_v2 failed: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
        with open(handle, "r+b") as file:
            held = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        self.held[held.data_ptr()] = held
        return held.data_ptr()


def shared_by_files(refuses: str) -> tuple[str, list[int]]:
    """The refusals of a rank, and the values that the others wrote into its memory."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    driver = FilesForGpus(rank, refuses)
    same = 0 if refuses == "one GPU" else rank
    lacking = "cuda.core is missing" if refuses == "packages" and rank == 1 else ""
    with (
        patch.object(torch.cuda, "device", lambda _: nullcontext()),
        patch.object(torch.cuda, "synchronize", lambda _: None),
        patch.object(torch.cuda, "current_device", lambda: 0),
        patch.object(memory_module, "gpu_uuid", lambda _: f"GPU-{same}"),
        patch.object(memory_module, "allocated", driver.allocated),
        patch.object(memory_module, "mapped", driver.mapped),
    ):
        found = peer_memory(64, dist.group.WORLD, torch.device("cuda", rank), lacking)  # type: ignore[arg-type]
    written: list[int] = []
    if not found.refused:
        for address in found.addresses:
            driver.held[address][rank] = 10 + rank
        dist.barrier()
        written = driver.held[found.addresses[rank]][: ranks + 1].tolist()
    path = f"/dev/shm/rooftop-{os.getpid()}"
    if os.path.exists(path):
        os.unlink(path)
    return found.refused, written


def test_each_rank_writes_into_the_memory_of_all(on_ranks: Run) -> None:
    assert on_ranks(3, shared_by_files, "") == [("", [10, 11, 12, 0])] * 3


@pytest.mark.parametrize(
    ("refuses", "reason"),
    [
        ("memory", "rank 1: cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY"),
        ("packages", "rank 1: cuda.core is missing"),
        (
            "handles",
            "rank 2 cannot map the memory of rank 0: cuIpcOpenMemHandle_v2 failed: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
        ),
        ("one GPU", "some ranks share a GPU"),
    ],
)
def test_one_rank_that_cannot_refuses_for_all(refuses: str, reason: str, on_ranks: Run) -> None:
    assert on_ranks(3, shared_by_files, refuses) == [(reason, [])] * 3


def test_ranks_on_several_machines_share_no_memory() -> None:
    there, elsewhere = Offer("a", "GPU-0", b"handle"), Offer("b", "GPU-1", b"handle")
    assert refusal([there, elsewhere]) == "the ranks are on several machines or in several containers"
    assert refusal([there, Offer("a", "GPU-1", b"handle")]) == ""


def test_without_a_driver_the_reason_is_the_library() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    with pytest.raises(OSError, match=r"libcuda\.so\.1"):
        memory_module.allocated(64)


DRIVER = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef struct { char reserved[64]; } Handle;  // as in cuda.h
int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    if (bytes % (2 << 20)) return 1;
    *address = (uint64_t)malloc(bytes);
    memset((void*)*address, 7, bytes);
    return 0;
}
int cuMemsetD8_v2(uint64_t address, unsigned char value, size_t bytes) {
    memset((void*)address, value, bytes);
    return 0;
}
int cuIpcGetMemHandle(Handle* handle, uint64_t address) {
    memset(handle->reserved, 0, 64);
    memcpy(handle->reserved + 40, &address, 8);
    handle->reserved[63] = 1;
    return 0;
}
int cuIpcOpenMemHandle_v2(uint64_t* address, Handle handle, unsigned flags) {
    if (flags != 1 || handle.reserved[63] != 1) return 217;
    memcpy(address, handle.reserved + 40, 8);
    return 0;
}
int cuGetErrorName(int status, const char** name) {
    *name = status == 217 ? "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED" : 0;
    return 0;
}
"""


def test_the_driver_is_called_by_its_c_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    (tmp_path / "driver.c").write_text(DRIVER)
    library = str(tmp_path / "libcuda.so.1")
    subprocess.run(["gcc", "-shared", "-fPIC", str(tmp_path / "driver.c"), "-o", library], check=True)
    opened = ctypes.CDLL(library)
    monkeypatch.setattr(memory_module.ctypes, "CDLL", lambda name: {"libcuda.so.1": opened}[name])
    address, handle = memory_module.allocated(1000)
    assert len(handle) == 64
    assert ctypes.string_at(address, 1000) == bytes(1000)
    assert memory_module.mapped(handle) == address
    with pytest.raises(OSError, match="cuIpcOpenMemHandle_v2 failed: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"):
        memory_module.mapped(bytes(64))


def test_kernels_no_longer_wait_once_communication_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_stops", [])
    stops = [memory_module.stop_of_waits() for _ in range(2)]
    assert [stop.item() for stop in stops] == [0, 0]
    abort_communication()
    assert [stop.item() for stop in stops] == [1, 1]
    assert memory_module.stop_of_waits().item() == 0


# ---- users of norm sums --------------------------------------------------------------------------------------------


class Group:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("ranks", "device", "reason"),
    [
        (None, "cuda", "there is one rank"),
        (1, "cuda", "there is one rank"),
        (2, "cpu", "the ranks are on a CPU"),
        (9, "cuda", "there are 9 ranks, the kernel is for 8 at most"),
    ],
)
def test_the_reason_is_told(ranks: int | None, device: str, reason: str) -> None:
    sums = norm_sums(None if ranks is None else Group(ranks), torch.device(device))  # type: ignore[arg-type]
    assert sums.mailboxes is None
    assert sums.refused(1, 4096, torch.bfloat16) == reason


def test_memory_is_shared_once_for_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def shared(bytes: int, *_: object) -> PeerMemory:
        asked.append(bytes)
        return PeerMemory(refused="no access")

    monkeypatch.setattr(module, "peer_memory", shared)
    groups = Group(2), Group(2)
    for group in (*groups, *groups):
        assert norm_sums(group, torch.device("cuda")).refused(1, 8, torch.bfloat16) == "no access"  # type: ignore[arg-type]
    assert asked == [2 * 2 * module.WORDS * 8] * 2


def test_only_plain_norms_of_one_dimension() -> None:
    hooked = RMSNorm(8)
    hooked.register_forward_hook(lambda *_: None)
    norms = [RMSNorm(8), LayerNorm(8), LayerNorm(8, bias=False), hooked, RMSNorm((2, 4)), nn.LayerNorm(8)]
    assert [takes(norm) for norm in norms] == [True, True, True, False, False, False]


@pytest.mark.parametrize(
    "norm", [RMSNorm(64, eps=1e-5), RMSNorm(64), LayerNorm(64), LayerNorm(64, bias=False)], ids=str
)
def test_modules_on_ranks_in_threads(norm: RMSNorm | LayerNorm, cuda_of_ranks: Callable[..., list[Any]]) -> None:
    generator = torch.Generator().manual_seed(0)
    parts, x = (
        [torch.randn(2, 1, 64, generator=generator) for _ in range(2)],
        torch.randn(2, 1, 64, generator=generator),
    )
    bias = torch.randn(64, generator=generator)
    memory = [torch.zeros(module.Mailboxes.bytes_of(2, 256), dtype=torch.uint8) for _ in range(2)]
    addresses, stop = [each.data_ptr() for each in memory], torch.zeros(1, dtype=torch.int32)
    boxes = [module.Mailboxes.at(addresses, stop, rank, 256, torch.device("cpu")) for rank in range(2)]

    @torch.no_grad()
    def called(rank: int) -> list[tuple[Tensor, Tensor]]:
        sums = NormSums(boxes[rank])
        first = Summand(parts[rank], bias, sums).summed_and_normed(norm, None)
        return [first, Summand(parts[rank], None, sums).summed_and_normed(norm, x)]

    found = cuda_of_ranks(2, called)
    for ours, terms in zip(zip(*found, strict=True), ([*parts, bias], [*parts, x]), strict=True):
        for total, normed in ours:
            assert_as_accurate(total, sum(terms), sum(each.double() for each in terms))
            exact = copy.deepcopy(norm).double()(sum(each.double() for each in terms))
            assert_as_accurate(normed.detach(), norm(sum(terms)).detach(), exact.detach())
            assert torch.equal(total, ours[0][0])
            assert torch.equal(normed, ours[0][1])


def refusals(own: list[str]) -> str:
    return module.first_refusal(own[dist.get_rank()], dist.group.WORLD)


def test_the_first_refusal_counts_on_all_ranks(on_ranks: Run) -> None:
    assert on_ranks(3, refusals, ["", "hooks", "others"]) == ["rank 1: hooks"] * 3
    assert on_ranks(3, refusals, ["", "", ""]) == [""] * 3


# ---- on GPUs -------------------------------------------------------------------------------------------------------

REPLAYS = 300
CASES = [  # rows, columns, dtype, RMS norm
    (1, 4096, torch.bfloat16, True),
    (16, 4096, torch.bfloat16, True),
    (3, 1001, torch.bfloat16, False),
    (2, 1600, torch.float16, False),
    (5, 260, torch.float32, True),
    (1, 16384, torch.bfloat16, False),
]


def inputs(call: int, ranks: int, rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    """Inputs that are the same on each rank: the parts of all ranks, and the residual."""
    generator = torch.Generator().manual_seed(call * 1000 + columns)
    return [torch.randn(rows, columns, generator=generator).to(dtype) for _ in range(ranks + 1)]


def norm_of(columns: int, dtype: torch.dtype, rms: bool) -> tuple[nn.Module, Tensor]:
    """A norm, and the bias of the sum."""
    norm = RMSNorm(columns, eps=1e-5) if rms else LayerNorm(columns, eps=1e-5)
    generator = torch.Generator().manual_seed(columns)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(columns, generator=generator) + 0.5)
    return norm.to(dtype), torch.randn(columns, generator=generator).to(dtype)


def results_of_replays(rows: int, columns: int, dtype: torch.dtype, rms: bool) -> list[tuple[Tensor, Tensor]]:
    """(total, normed) of every thirtieth replay, and of launches without a graph after them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    sums = norm_sums(dist.group.WORLD, device)
    assert sums.refused(rows, columns, dtype) == ""
    norm, bias = norm_of(columns, dtype, rms)
    norm, bias = norm.to(device), bias.to(device)
    part, x = (torch.empty(rows, columns, dtype=dtype, device=device) for _ in range(2))
    made: list[tuple[Tensor, Tensor]] = []

    def three_calls() -> None:
        """Each call begins at once after the last, as in a model. The first two calls add parts other than those of the
        third."""
        made.clear()
        with torch.no_grad():
            parts = (part * 0.5, part * 2, part)
            made.extend([Summand(given, bias, sums).summed_and_normed(norm, x) for given in parts])

    found = []
    replay = captured(three_calls)
    for call in range(REPLAYS):
        given = inputs(call, ranks, rows, columns, dtype)
        part.copy_(given[rank])
        x.copy_(given[-1])
        replay()
        if call % 30 == 0:
            found.append(tuple(each.cpu() for each in made[-1]))
    three_calls()
    found.append(tuple(each.cpu() for each in made[-1]))
    torch.cuda.synchronize()
    return found  # type: ignore[return-value]


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns", "dtype", "rms"), CASES)
def test_on_gpus_replays_give_the_same_bits_on_all_ranks(
    rows: int, columns: int, dtype: torch.dtype, rms: bool, on_ranks: Run
) -> None:
    ranks = min(torch.cuda.device_count(), MOST_RANKS)
    if ranks < 2:
        pytest.skip("needs two GPUs")
    if not all(torch.cuda.can_device_access_peer(*pair) for pair in permutations(range(ranks), 2)):
        pytest.skip("needs GPUs that access each other's memory")
    every = on_ranks(ranks, results_of_replays, rows, columns, dtype, rms, device="cuda", limit_s=240.0)
    norm, bias = norm_of(columns, dtype, rms)
    weight, shift = norm.weight.detach(), None if rms else norm.bias.detach()  # type: ignore[union-attr]
    calls = [*range(0, REPLAYS, 30), REPLAYS - 1]
    for number, call in enumerate(calls):
        *parts, x = inputs(call, ranks, rows, columns, dtype)
        for other in every[1:]:
            for ours, theirs in zip(every[0][number], other[number], strict=True):
                assert torch.equal(ours, theirs)
        total, normed = every[0][number]
        reference = norm_of_rank_sum_reference(parts, x, weight, shift, 1e-5, input_bias=bias, rms=rms)
        assert torch.equal(total, reference[1])
        eager, exact = (
            normed_sum([each.to(kind) for each in (*parts, bias, x)], weight.to(kind), shift, rms)
            for kind in (dtype, torch.float64)
        )
        assert_as_accurate(normed, eager, exact, what=f"normed of call {call}")


def normed_sum(terms: list[Tensor], weight: Tensor, shift: Tensor | None, rms: bool) -> Tensor:
    total = sum(terms[1:], start=terms[0])
    if rms:
        return F.rms_norm(total, total.shape[-1:], weight, 1e-5)
    return F.layer_norm(total, total.shape[-1:], weight, None if shift is None else shift.to(total.dtype), 1e-5)


def test_the_cases_on_gpus_fit_into_the_mailboxes() -> None:
    for ranks in range(2, MOST_RANKS + 1):
        stop = torch.zeros(1, dtype=torch.int32)
        boxes = module.Mailboxes.at([0] * ranks, stop, 0, module.WORDS, torch.device("cpu"))
        for rows, columns, dtype, _ in CASES:
            assert NormSums(boxes).refused(rows, columns, dtype) == ""
        assert "17 rows of 4,096 elements" in NormSums(boxes).refused(17, 4096, torch.bfloat16)
