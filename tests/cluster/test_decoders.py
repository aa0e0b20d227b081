"""Decoding processes return each item once and in order, even if a process ends or hangs, and leave nothing behind."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from torch import Tensor

from rooftop.cluster import decoders as decoders_module
from rooftop.cluster import map_items
from rooftop.cluster import slots as slots_module
from rooftop.cluster.decoders import Decoders
from rooftop.cluster.items import Item
from rooftop.cluster.tables import Failure
from rooftop.errors import InputError, MissingExtraError

pq = pytest.importorskip("pyarrow.parquet")


def item(number: int) -> Item:
    return Item(f"{number}", None, f"/{number}")


@contextmanager
def decoding(
    decode: Callable[[Item], Any],
    count: int,
    least_ahead: int = 8,
    pinned: bool = False,
    uses_gpu: Callable[[], bool] | None = None,
) -> Iterator[Decoders]:
    """Two processes, which decode `count` items. The items come in pieces of five."""
    pieces: queue.SimpleQueue[list[Item]] = queue.SimpleQueue()
    for first in range(0, count, 5):
        pieces.put([item(number) for number in range(first, min(count, first + 5))])
    made = Decoders(2, decode, least_ahead)
    made.begin(lambda: None if pieces.empty() else pieces.get(), pinned, uses_gpu)
    try:
        yield made
    finally:
        made.close()


def filled(item: Item) -> Any:
    number = int(item.input)
    if number % 10 == 7:
        raise InputError(f"{number} is damaged")
    return {"n": number, "tensor": torch.full((number % 5, 3), number), "empty": torch.empty(0), "float": 0.5}


def test_items_come_in_order_and_damaged_ones_are_failures() -> None:
    with decoding(filled, 200) as made:
        found = [each for count in (1, 64, 64, 71) for each in made.take(count)]
    for number, each in enumerate(found):
        if number % 10 == 7:
            assert each.value == Failure(f"{number} is damaged")
        else:
            assert each.value["n"] == number
            assert torch.equal(each.value["tensor"], torch.full((number % 5, 3), number))
            assert each.value["empty"].shape == (0,)
        assert each.seconds >= 0


def test_successive_clips_of_a_video_are_decoded_by_one_process() -> None:
    """A process that gets clips from the middle of a video must first decode what comes before them."""
    clips = [Item(f"{number}", number, f"/{number // 40}") for number in range(160)]  # 40 of each video
    made = Decoders(4, lambda item: (int(item.input), os.getpid()), 8, in_runs=True)
    given = [clips]
    made.begin(lambda: given.pop() if given else None)
    try:
        found = [each.value for each in made.take(160)]
    finally:
        made.close()
    assert [number for number, _ in found] == list(range(160))
    processes = [process for _, process in found]
    assert len(set(processes)) > 1
    # There are three runs of each of the first three videos, and eleven of the last: runs become shorter near the end,
    # so that all processes have work. There would be 40 tasks of four clips.
    assert sum(one != other for one, other in pairwise(processes)) <= 20


def test_a_value_that_cannot_be_pickled_is_a_failure_of_its_item() -> None:
    """The tensors that were written before the error leave no gap and no rest."""

    def decode(item: Item) -> Any:
        tensor = torch.full((1000,), int(item.input))
        return (tensor, lambda: 0) if int(item.input) % 3 == 1 else tensor

    with decoding(decode, 60) as made:
        found = made.take(60)
    for number, each in enumerate(found):
        if number % 3 == 1:
            assert "pickle" in each.value.why
        else:
            assert each.value.equal(torch.full((1000,), number))


def test_what_was_taken_stays_when_the_shared_memory_is_used_again() -> None:
    with decoding(lambda item: torch.full((1000,), int(item.input)), 300) as made:
        found = made.take(300)
    assert [each.value[999].item() for each in found] == list(range(300))


def test_a_tensor_that_is_kept_keeps_no_other() -> None:
    with decoding(lambda item: {"image": torch.zeros(5000), "label": torch.tensor(int(item.input))}, 40) as made:
        labels = [each.value["label"] for each in made.take(40)]
    assert [label.item() for label in labels] == list(range(40))
    assert {label.untyped_storage().nbytes() for label in labels} == {8}


@pytest.mark.parametrize("change", [torch.conj, lambda z: z.conj().imag, lambda z: z[::2].mT])
def test_views_arrive_with_their_values(change: Callable[[Tensor], Tensor]) -> None:
    with decoding(lambda item: change(int(item.input) + (1 + 2j) * torch.arange(12).view(3, 4)), 20) as made:
        found = made.take(20)
    for number, each in enumerate(found):
        assert torch.equal(each.value, change(number + (1 + 2j) * torch.arange(12).view(3, 4)))


def test_a_tensor_larger_than_the_shared_memory_comes_by_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COPIED_BYTES", "LENT_BYTES"):
        monkeypatch.setattr(slots_module, name, 4096)
    with decoding(lambda item: torch.full((int(item.input) * 200,), 3.0), 20) as made:
        found = made.take(20)
    assert [each.value.sum().item() for each in found] == [600.0 * number for number in range(20)]


def test_tensors_are_the_shared_memory_until_they_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots whose tensors are kept are never written again; without a free slot, tensors are copied."""
    lent: list[int] = []
    lend = slots_module.Arena.lend
    monkeypatch.setattr(
        slots_module.Arena, "lend", lambda arena, slot, *rest: (lent.append(slot), lend(arena, slot, *rest))[1]
    )
    with decoding(lambda item: torch.full((1000,), int(item.input)), 2000) as made:
        kept = [made.take(1)[0].value for _ in range(300)]
        slots = 2 * slots_module.LENT_SLOTS
        assert 0 < len(lent) <= slots, "all tensors are kept, so each slot is lent once"
        assert [tensor[999].item() for tensor in kept] == list(range(300))
        assert {tensor.untyped_storage().nbytes() for tensor in kept} == {8000}
        kept.clear()
        for number in range(300, 2000):
            assert torch.equal(made.take(1)[0].value, torch.full((1000,), number))
        assert len(lent) > slots, "freed slots are lent again"
    assert all(len(each.arena.free) == slots_module.LENT_SLOTS for each in made._processes)


def test_slots_are_pinned_once_and_unpinned_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: dict[int, int] = {}

    def register(address: int, size: int) -> bool:
        assert address % 4096 == 0
        assert not any(one < address + size and address < one + other for one, other in pinned.items())
        pinned[address] = size
        return True

    monkeypatch.setattr(slots_module, "register", register)
    monkeypatch.setattr(slots_module, "unregister", lambda address: pinned.pop(address))
    monkeypatch.setattr(slots_module, "_copied", lambda content, pinned=False: torch.from_numpy(content.copy()))
    with decoding(lambda item: torch.full((100 * (1 + int(item.input)),), 2), 200, pinned=True) as made:
        for number in range(200):
            value = made.take(1)[0].value
            assert value.shape == (100 * (1 + number),)
            assert bool((value == 2).all())
        assert 0 < len(pinned) <= 2 * slots_module.LENT_SLOTS
    assert not pinned


def test_slots_of_a_function_that_uses_the_gpu_are_pinned_and_used_again_after_a_synchronization(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slots are pinned when the function has used the GPU, in the thread that calls it. A slot whose tensors are freed
    is not written before the GPU has finished its copies."""
    pinned, threads, synchronized = dict[int, int](), set[int](), list[int]()
    uses_gpu = False

    def register(address: int, size: int) -> bool:
        threads.add(threading.get_ident())
        pinned[address] = size
        return True

    monkeypatch.setattr(slots_module, "register", register)
    monkeypatch.setattr(slots_module, "unregister", lambda address: pinned.pop(address))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: synchronized.append(len(made._found)))

    def numbered(item: Item) -> Tensor:
        return torch.full((500,), int(item.input))

    with decoding(numbered, 400, uses_gpu=lambda: uses_gpu) as made:
        assert [int(each.value[0]) for each in made.take(10)] == list(range(10))
        assert not pinned
        uses_gpu = True
        for number in range(10, 400):
            (found,) = made.take(1)
            assert found.value.tolist() == [number] * 500
            del found
        assert threads == {threading.get_ident()}
        assert 0 < len(pinned) <= 2 * slots_module.LENT_SLOTS
        assert all(size >= 4000 for size in pinned.values())
        assert synchronized
        assert len(synchronized) < 300  # and not for each slot
    assert not pinned


def test_a_larger_tensor_than_what_is_pinned_of_a_slot_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses copies of memory that is pinned only in part."""
    pinned = dict[int, int]()
    monkeypatch.setattr(slots_module, "register", lambda address, size: pinned.update({address: size}) is None)
    monkeypatch.setattr(slots_module, "unregister", lambda address: pinned.pop(address))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def numbered(item: Item) -> Tensor:
        return torch.full((40_000 if item.input == "300" else 500,), int(item.input))

    with decoding(numbered, 400, uses_gpu=lambda: True) as made:
        for number in range(400):
            (found,) = made.take(1)
            assert int(found.value[-1]) == number
            if number == 300:
                first, bytes_ = found.value.data_ptr(), found.value.nbytes
                around = [address + size for address, size in pinned.items() if address <= first < address + size]
                assert all(first + bytes_ <= end for end in around), "pinned only in part"


def test_without_the_right_to_pin_tensors_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "register", lambda address, size: False)
    monkeypatch.setattr(slots_module, "_copied", lambda content, pinned=False: torch.from_numpy(content.copy()))
    told: list[str] = []
    monkeypatch.setattr(decoders_module.warnings, "warn", lambda message, *_, **__: told.append(message))
    with decoding(lambda item: torch.full((1000,), int(item.input)), 300, pinned=True) as made:
        found = made.take(300)
    assert [each.value[999].item() for each in found] == list(range(300))
    assert len(told) == 1
    assert "raise the limit (ulimit -l" in told[0]


def test_no_more_is_decoded_ahead_than_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders_module, "TASK_ITEMS", 2)
    monkeypatch.setattr(decoders_module, "MOST_BYTES", 20_000)  # twenty items

    def marked(item: Item) -> Any:
        (tmp_path / item.input).touch()
        return torch.zeros(1000, dtype=torch.uint8)

    with decoding(marked, 200, least_ahead=100) as made:
        made.take(10)
        until = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) <= 10 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.5)
        assert 10 < len(list(tmp_path.iterdir())) <= 10 + 20 + 8  # two processes, two tasks of two items each
        assert len(made.take(190)) == 190


def test_a_process_that_is_killed_is_replaced(tmp_path: Path) -> None:
    def once(item: Item) -> Any:
        marker = tmp_path / item.input
        if int(item.input) in (3, 40) and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return int(item.input)

    with decoding(once, 100) as made:
        assert [each.value for each in made.take(100)] == list(range(100))


def test_an_item_that_ends_three_processes_is_a_failure() -> None:
    def deadly(item: Item) -> Any:
        if int(item.input) == 20:
            os._exit(9)
        return int(item.input)

    with decoding(deadly, 60) as made:
        values = [each.value for each in made.take(60)]
    assert values.pop(20) == Failure("the decoding process ended with status 9 during this item, 3 times")
    assert values == [number for number in range(60) if number != 20]


def test_a_missing_package_ends_all() -> None:
    def needs(item: Item) -> Any:
        raise MissingExtraError("needs more")

    with decoding(needs, 3) as made, pytest.raises(MissingExtraError, match="needs more"):
        made.take(1)


# ---- in a run --------------------------------------------------------------------------------------------------------

TARGETS = """
import os
from pathlib import Path


def size(image):
    return {"height": image.shape[1], "width": image.shape[2], "pid": os.getpid()}


def count(points):
    return {"points": len(points)}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(TARGETS)
    return tmp_path


def descendants() -> list[psutil.Process]:
    """The workers and decoding processes, without Python's tracker of resources."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "resource_tracker" not in " ".join(each.cmdline()):
                found.append(each)
    return found


def gone(processes: list[psutil.Process], patience_s: float = 5.0) -> bool:
    return not psutil.wait_procs(processes, patience_s)[1]


def test_photographs_by_decoding_processes_one_killed_and_a_worker_killed(here: Path) -> None:
    """Each photograph has one row, damaged ones have their error, and no process remains."""
    Path("photos").mkdir()
    for width in range(20):
        Image.new("RGB", (10 + width, 8)).save(f"{width}.png")
    whole = [Path(f"{width}.png").read_bytes() for width in range(20)]
    damaged = set(range(0, 1500, 300))
    for number in range(1500):
        content = whole[number % 20]
        Path(f"photos/{number:04}.png").write_bytes(content[: len(content) // 2] if number in damaged else content)
    before = descendants()
    seen: dict[int, psutil.Process] = {}
    killed: list[str] = []

    def kill(what: str, fraction: float) -> None:
        new = [each for each in descendants() if each not in before]
        seen.update((each.pid, each) for each in new)
        workers = [each for each in new if each.ppid() == os.getpid() and each.children()]
        if fraction >= 0.2 and not killed:
            os.kill(workers[0].children()[0].pid, signal.SIGKILL)
            killed.append("decoder")
        elif fraction >= 0.5 and killed == ["decoder"]:
            os.kill(workers[0].pid, signal.SIGKILL)
            killed.append("worker")

    report = map_items("my.py:size", ["photos"], "out", workers=1, decoders=2, device="cpu", progress=kill)
    assert killed == ["decoder", "worker"]
    assert (report.items, report.errors, report.decoding) == (1500, len(damaged), "2 processes")
    rows = sorted(pq.read_table("out").to_pylist(), key=lambda row: row["input"])
    for number, row in enumerate(rows):
        assert row["input"] == f"photos/{number:04}.png"
        assert (row["error"] is not None) == (number in damaged)
        assert row["width"] == (None if number in damaged else 10 + number % 20)
    assert len({row["pid"] for row in rows if row["pid"]}) == 2
    assert gone(list(seen.values()))
    assert set(report.start) >= {"inputs", "process", "imports", "decoding processes", "target", "first results"}
    assert "decodes by 2 processes" in str(report)


def test_a_file_that_hangs_a_decoding_process_is_an_error_of_its_item(here: Path) -> None:
    for number in range(6):
        np.save(f"{number}.npy", np.zeros((number, 3)))
    Path("2.npy").unlink()
    os.mkfifo("2.npy")  # nobody writes
    before = descendants()
    report = map_items(
        "my.py:count", [f"{number}.npy" for number in range(6)], "out", workers=1, decoders=2, device="cpu",
        timeout_s=4.0,
    )  # fmt: skip
    rows = sorted(pq.read_table("out").to_pylist(), key=lambda row: row["input"])
    assert [row["points"] for row in rows] == [0, 1, None, 3, 4, 5]
    assert rows[2]["error"] == "took longer than the timeout of 4 s"
    assert report.errors == 1
    assert gone([each for each in descendants() if each not in before])
