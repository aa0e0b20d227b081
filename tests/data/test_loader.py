"""Batches are the same whichever process makes them. However a loop ends, it leaves nothing behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from rooftop.data import LoadedBatch, Loader, Part, sample
from rooftop.data import loader as loader_module
from rooftop.data.choosing import Choice
from rooftop.errors import InputError, LoadingError

WAYS = [("here", 1), ("threads", 3), ("processes", 2)]
Pair = namedtuple("Pair", ("left", "right"))


class Drawn:
    """Samples that are changed at random, in all kinds of containers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a loader draws")

    def draw(self, index: int, generator: np.random.Generator) -> Any:
        values = torch.from_numpy(generator.standard_normal((2, 3), dtype=np.float32))
        pair = Pair(values.bfloat16(), torch.tensor(index % 2 == 0))
        return {"values": values.T, "index": index, "text": f"sample {index}", "pair": pair, "rest": ("a", 0.5)}


class Failing:
    """Samples, one of which raises an error."""

    def __init__(self, error: BaseException, at: int = 5, count: int = 12) -> None:
        self.error, self.at, self.count = error, at, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if index == self.at:
            raise self.error
        return index

    def name(self, index: int) -> str:
        return f"file-{index}.bin"


class Signalling(Failing):
    """Samples, one of which sends a signal."""

    def __init__(self, to_parent: bool, what: signal.Signals) -> None:
        super().__init__(KeyError("never"))
        self.to_parent, self.what = to_parent, what

    def __getitem__(self, index: int) -> int:
        if index == self.at:
            os.kill(os.getppid() if self.to_parent else os.getpid(), self.what)
            signal.pause()
        return index


def plain(value: Any) -> Any:
    """Containers of tensors in a comparable form: dtype, shape and bytes of each."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [plain(each) for each in value]
    return value


def listed(batches: Iterator[LoadedBatch]) -> list[Any]:
    return [(plain(batch.value), batch.places.tolist(), batch.indices.tolist()) for batch in batches]


def shared_memory() -> set[str]:
    """This process's mappings of PyTorch's shared memory."""
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "/torch_" in line}


Workers = Callable[[], set[int]]


@pytest.fixture
def begun() -> Workers:
    """Gives the live processes that this test has begun. Earlier tests keep some processes for later tests."""
    before = set(multiprocessing.active_children())
    return lambda: {each.pid for each in multiprocessing.active_children() if each not in before and each.pid}


@pytest.fixture(autouse=True)
def _nothing_stays_behind(begun: Workers) -> Iterator[None]:
    before = shared_memory()
    yield
    if begun() or not shared_memory() <= before:  # a search among all objects takes tenths of a second
        gc.collect()
    assert not begun()
    assert shared_memory() <= before


@pytest.mark.parametrize(("how", "workers"), WAYS)
@pytest.mark.parametrize("collate", [default_collate, list])
def test_batches_are_the_samples_of_the_order(how: str, workers: int, collate: Any) -> None:
    samples = Drawn(11)
    with Loader(samples, 4, shuffle=True, seed=3, how=how, workers=workers, collate=collate) as loader:
        assert len(loader) == 3
        for epoch in (0, 5):
            seen = []
            for batch in loader.batches(epoch):
                expected = [sample(samples, index, 3, epoch) for index in batch.indices.tolist()]
                assert plain(batch.value) == plain(collate(expected))
                assert batch.places.tolist() == list(range(len(expected)))
                seen += batch.indices.tolist()
            assert sorted(seen) == list(range(11))
            assert seen != sorted(seen)


@settings(max_examples=12)
@given(st.data())
def test_any_number_of_workers_ranks_and_any_start_give_the_same(data: st.DataObject) -> None:
    count, batch = data.draw(st.integers(0, 30)), data.draw(st.integers(1, 9))
    samples = Drawn(count)
    shared: Any = {
        "shuffle": data.draw(st.booleans()), "seed": data.draw(st.integers(0, 5)), "drop_last": data.draw(st.booleans())
    }  # fmt: skip
    whole = listed(Loader(samples, batch, how="here", collate=list, **shared).batches(1))
    start, ranks = data.draw(st.integers(0, len(whole))), data.draw(st.integers(1, 3))
    parts = []
    for rank in range(ranks):
        workers, ahead = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
        loader = Loader(
            samples, batch, how="threads", workers=workers, ahead=ahead, collate=list, rank=rank, ranks=ranks, **shared
        )
        parts.append(listed(loader.batches(1, start)))
    assert all(len(part) == len(whole) - start for part in parts)
    for number, (value, places, indices) in enumerate(whole[start:]):
        assert [each for part in parts for each in part[number][1]] == places
        assert [each for part in parts for each in part[number][2]] == indices
        assert [each for part in parts if part[number][0] for each in part[number][0][1]] == value[1]
        sizes = [len(part[number][1]) for part in parts]
        assert max(sizes) - min(sizes) <= 1


class Drawing:
    """Samples that return their index and a number that was drawn for them."""

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("samples are drawn")

    def draw(self, index: int, generator: np.random.Generator) -> Any:
        return index, float(generator.random())


@pytest.mark.parametrize(("how", "workers"), WAYS)
def test_copies_of_a_sample_are_apart_and_drawn_in_their_own_ways(how: str, workers: int) -> None:
    """Each batch of twelve has four samples three times. The first copy of each sample is the one that a loader without
    repeats returns."""
    options: dict[str, Any] = {"shuffle": True, "seed": 3, "drop_last": True, "how": how, "workers": workers}
    with Loader(Drawing(), 12, repeats=3, **options) as loader, Loader(Drawing(), 4, **options) as single:
        assert len(loader) == 2
        alone = list(single.batches(5))
        for number, batch in enumerate(loader.batches(5)):
            indices, drawn = batch.value
            assert batch.places.tolist() == [*range(12)]
            assert torch.equal(indices, alone[number].value[0].repeat(3))
            assert torch.equal(drawn[:4], alone[number].value[1])
            assert len(set(drawn.tolist())) == 12
        (again,) = loader.batches(5, 1)
        assert torch.equal(again.value[1], drawn)


def test_copies_are_the_same_for_any_number_of_ranks() -> None:
    def read(rank: int, ranks: int) -> list[tuple[Tensor, Tensor]]:
        options: dict[str, Any] = {"shuffle": True, "drop_last": True, "how": "here", "rank": rank, "ranks": ranks}
        return [tuple(batch.value) for batch in Loader(Drawing(), 8, repeats=2, **options).batches(1)]

    whole = read(0, 1)
    for first, second, both in zip(read(0, 2), read(1, 2), whole, strict=True):
        assert all(torch.equal(torch.cat(pair), each) for *pair, each in zip(first, second, both, strict=True))
        assert torch.equal(first[0], second[0])  # a copy on each rank


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"repeats": 3, "drop_last": True}, "repeats is 3: expected a number that divides the batch of 8 samples"),
        ({"repeats": 0, "drop_last": True}, "repeats is 0: expected"),
        ({"repeats": 2}, "repeats is 2: expected 1, or drop_last=True"),
    ],
)
def test_repeats_that_do_not_fit(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Loader(Drawing(), 8, **arguments)


def test_a_rank_without_samples_has_an_empty_batch() -> None:
    (batch,) = Loader(TensorDataset(torch.arange(2)), 8, rank=0, ranks=3, how="here").batches(0)
    assert batch.value is None
    assert batch.places.shape == (0,)


def test_epochs_follow_each_other_in_a_plain_loop() -> None:
    loader = Loader(TensorDataset(torch.arange(50)), 50, shuffle=True, how="here")
    first, second = next(iter(loader)).indices.tolist(), next(iter(loader)).indices.tolist()
    assert (first, second) == tuple(next(loader.batches(epoch)).indices.tolist() for epoch in (0, 1))
    assert first != second


@pytest.mark.parametrize(("how", "workers"), WAYS)
def test_several_epochs_at_once_are_those_one_by_one(how: str, workers: int) -> None:
    """The first epoch may start at any batch, and the loader begins an epoch's first batches during the previous
    epoch."""
    options: dict[str, Any] = {"how": how, "workers": workers, "shuffle": True, "drop_last": True, "ahead": 3}
    one, together = Loader(Drawn(11), 4, **options), Loader(Drawn(11), 4, **options)
    expected = [batch for epoch in (3, 4, 5) for batch in one.batches(epoch)][1:]
    found = list(together.batches(3, 1, epochs=3))
    assert len(found) == len(expected) == 5
    for first, second in zip(expected, found, strict=True):
        assert torch.equal(first.indices, second.indices)
        assert torch.equal(first.value["values"], second.value["values"])


def test_the_next_epoch_is_begun_before_the_end() -> None:
    begun = []

    class Watched(Failing):
        def __getitem__(self, index: int) -> int:
            begun.append(index)
            return index

    batches = Loader(Watched(KeyError(), count=4), 2, how="threads", workers=1, ahead=4).batches(0, epochs=2)
    next(batches)
    deadline = time.monotonic() + 10
    while len(begun) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert begun == [0, 1, 2, 3, 0, 1, 2, 3]
    batches.close()


def test_the_draws_of_an_epoch_do_not_depend_on_those_before() -> None:
    loader = Loader(Drawn(6), 6, shuffle=True, how="here")
    assert listed(loader.batches(7)) == listed(Loader(Drawn(6), 6, shuffle=True, how="here").batches(7))
    assert listed(loader.batches(7)) != listed(loader.batches(8))


def test_pieces_of_processes_grow() -> None:
    """A slot of shared memory that is too small is replaced."""

    class Growing(Failing):
        def __getitem__(self, index: int) -> Any:
            return torch.full((index * 100,), index)

    with Loader(Growing(KeyError()), 2, how="processes", workers=2, ahead=1, collate=list) as loader:
        for _ in range(2):
            for batch in loader:
                for index, each in zip(batch.indices.tolist(), batch.value, strict=True):
                    assert each.tolist() == [index] * index * 100


@pytest.mark.parametrize(("how", "workers"), WAYS)
def test_a_loop_that_is_left_early(how: str, workers: int, begun: Workers) -> None:
    loader = Loader(Drawn(40), 4, how=how, workers=workers)
    for _ in loader:
        break
    assert not begun()
    assert [batch.indices.tolist() for batch in loader.batches(0, 9)] == [[36, 37, 38, 39]]


class Conjugate:
    """Complex tensors that PyTorch conjugates only when they are read."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((20_000,), index + 1j).conj()


@pytest.mark.parametrize(("how", "workers"), WAYS)
@pytest.mark.parametrize("collate", [default_collate, list])
def test_conjugate_tensors(how: str, workers: int, collate: Callable[[list[Any]], Any]) -> None:
    with Loader(Conjugate(), 4, how=how, workers=workers, collate=collate) as loader:
        (batch,) = loader
    assert [row[-1].item() for row in batch.value] == [index - 1j for index in range(4)]


@pytest.mark.parametrize(("how", "workers"), WAYS)
def test_two_iterations_at_the_same_time(how: str, workers: int, begun: Workers) -> None:
    with Loader(TensorDataset(torch.arange(24)), 4, how=how, workers=workers) as loader:
        early = loader.batches(0)
        seen = [next(early).indices.tolist()]
        for one, other in zip(early, loader.batches(0, 1), strict=True):
            assert one.indices.tolist() == other.indices.tolist()
            seen.append(one.indices.tolist())
        assert [index for indices in seen for index in indices] == list(range(24))
        assert [batch.indices[0].item() for batch in loader] == list(range(0, 24, 4))
    assert not begun()


def test_processes_stay_for_the_next_epoch_and_end_with_the_loader(begun: Workers) -> None:
    loader = Loader(Drawn(8), 4, how="processes", workers=2)
    list(loader)
    first = begun()
    assert len(first) == 2
    list(loader)
    assert begun() == first
    batches = loader.batches(2)
    for _ in range(len(loader)):
        next(batches)
    del batches  # dropped after the last batch, before the iterator's end
    assert begun() == first
    del loader
    gc.collect()
    assert not begun()


def test_a_killed_process_is_an_error_at_its_batch(begun: Workers) -> None:
    loader = Loader(Signalling(to_parent=False, what=signal.SIGKILL), 2, how="processes", workers=2)
    batches = loader.batches(3)
    assert [next(batches).indices.tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(LoadingError, match="killed by SIGKILL while it made batch 2 of epoch 3"):
        next(batches)
    assert not begun()


def test_sigterm_ends_no_process() -> None:
    """A job scheduler sends the signal to all processes of a training, which still needs batches."""
    loader = Loader(Drawn(40), 4, how="processes", workers=2)
    batches = loader.batches(0)
    next(batches)
    assert loader._processes is not None
    pids = loader._processes.processes
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert len(list(batches)) == 9
    assert all(psutil.pid_exists(pid) for pid in pids)
    loader.close()


def test_a_program_ends_although_its_processes_ignore_sigterm() -> None:
    """This holds even if the loader still exists and multiprocessing was imported after the first finalizer."""
    program = """
import weakref
class Thing: pass
thing = Thing()
weakref.finalize(thing, print)
import torch
from torch.utils.data import TensorDataset
from rooftop.data import Loader
loader = Loader(TensorDataset(torch.arange(40)), 4, how="processes", workers=2)
batches = loader.batches(0)
next(batches)
print("end", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "end", done.stderr
    assert done.returncode == 0


def test_a_process_that_ends_itself_is_an_error() -> None:
    class Leaving(Failing):
        def __getitem__(self, index: int) -> int:
            os._exit(7)

    with pytest.raises(LoadingError, match="ended with status 7"):
        list(Loader(Leaving(KeyError()), 2, how="processes", workers=1))


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_ends_the_processes(begun: Workers) -> None:
    loader = Loader(Signalling(to_parent=True, what=signal.SIGINT), 2, how="processes", workers=2)
    with pytest.raises(KeyboardInterrupt):
        list(loader)
    assert not begun()


ORPHANS = """
import os, signal
from rooftop.data import Loader
from torch.utils.data import TensorDataset
import torch
loader = Loader(TensorDataset(torch.arange(100)), 2, how="processes", workers=2)
next(loader.batches(0))
batches = loader.batches(0)
next(batches)
print(*loader._processes.processes, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_end_after_their_parent_was_killed(forked: Callable[[str], tuple[int, str, str]]) -> None:
    status, output, errors = forked(ORPHANS)
    assert status == -signal.SIGKILL, errors
    pids = [int(each) for each in output.split()]
    assert len(pids) == 2
    until = time.monotonic() + 120
    while not all(map(ended, pids)):
        assert time.monotonic() < until
        time.sleep(0.02)


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(("how", "workers"), WAYS)
def test_a_damaged_sample_is_named_or_skipped(how: str, workers: int) -> None:
    samples = Failing(OSError("bad magic"))
    with pytest.raises(InputError, match=r"sample 5 \(file-5\.bin\) cannot be read: bad magic"):
        list(Loader(samples, 4, how=how, workers=workers))
    with Loader(samples, 4, how=how, workers=workers, on_damage="skip") as loader:
        found = [(batch.value.tolist(), batch.places.tolist()) for batch in loader]
        assert found == [([0, 1, 2, 3], [0, 1, 2, 3]), ([4, 6, 7], [0, 2, 3]), ([8, 9, 10, 11], [0, 1, 2, 3])]
        assert loader.skipped == [(5, "file-5.bin", "bad magic")]


@pytest.mark.parametrize(("how", "workers"), WAYS)
def test_an_error_of_the_program_is_never_skipped(how: str, workers: int) -> None:
    with pytest.raises(KeyError, match="no such column") as caught:
        list(Loader(Failing(KeyError("no such column")), 4, how=how, workers=workers, on_damage="skip"))
    assert "while sample 5 was read" in caught.value.__notes__


def test_an_error_that_cannot_be_sent_keeps_its_words() -> None:
    class OwnError(Exception):
        def __init__(self, one: str, two: str) -> None:
            super().__init__(f"{one} and {two}")

    with pytest.raises(RuntimeError, match="OwnError: this and that"):
        list(Loader(Failing(OwnError("this", "that")), 4, how="processes", workers=1))


def test_data_of_which_nothing_can_be_read() -> None:
    class Nothing(Failing):
        def __getitem__(self, index: int) -> int:
            raise ValueError("empty")

    loader = Loader(Nothing(KeyError()), 4, how="here", on_damage="skip")
    batches = loader.batches(0)
    assert [next(batches).value for _ in range(3)] == [None] * 3
    with pytest.raises(InputError, match="none of 12 samples can be read; the last: empty"):
        next(batches)


@pytest.mark.parametrize(("how", "workers"), WAYS)
def test_samples_of_several_shapes_are_an_error(how: str, workers: int) -> None:
    class Ragged(Failing):
        def __getitem__(self, index: int) -> Tensor:
            return torch.zeros(2 if index < 2 else 3)

    with pytest.raises(InputError, match=r"of shapes \(2,\) and \(3,\) cannot form a batch"):
        list(Loader(Ragged(KeyError()), 4, how=how, workers=workers))


def test_auto_tries_each_way_and_delivers_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftop.data.choosing.QUICK_S", 0.0)
    monkeypatch.setattr("rooftop.data.choosing.NEAR_LINEAR", float("inf"))
    expected = listed(Loader(Drawn(60), 4, shuffle=True, how="here").batches(2))
    with Loader(Drawn(60), 4, shuffle=True, workers=2, ahead=2) as loader:
        assert loader.description == "not chosen yet: nothing was measured"
        assert listed(loader.batches(2)) == expected
        assert loader._choice.seconds.keys() == {"here", "threads", "processes"}
        assert loader.chosen in loader_module.WAYS
        assert listed(loader.batches(2, 10)) == expected[10:]


def test_auto_goes_on_where_processes_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    class Parents(Failing):
        pid = os.getpid()

        def __getitem__(self, index: int) -> int:
            if os.getpid() != self.pid:
                raise RuntimeError("not in a fork")
            return index

    monkeypatch.setattr("rooftop.data.choosing.QUICK_S", 0.0)
    monkeypatch.setattr("rooftop.data.choosing.NEAR_LINEAR", float("inf"))
    loader = Loader(Parents(KeyError(), count=40), 2, workers=2, ahead=2)
    assert [index for batch in loader for index in batch.value.tolist()] == list(range(40))
    assert "not by 2 processes: RuntimeError: not in a fork" in loader.description


def test_samples_that_threads_may_not_share_get_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftop.data.choosing.QUICK_S", 0.0)
    samples = Drawn(40)
    samples.thread_safe = False  # type: ignore[attr-defined]
    with Loader(samples, 4, workers=2, ahead=2) as loader:
        list(loader)
        assert loader._choice.seconds.keys() == {"here", "processes"}


def choice(overlaps: bool = False, **milliseconds: float) -> str | None:
    found = Choice(loader_module.WAYS, 4, overlaps)
    for way in loader_module.WAYS:
        if found.trial == way:
            found.timed(way, milliseconds[way] / 1e3)
    return found.chosen


def test_the_choice() -> None:
    assert choice(here=0.4) == "here"  # quick, so nothing else is tried
    assert choice(here=80, threads=21) == "threads"  # near a quarter, so processes are not tried
    assert choice(here=80, threads=60, processes=25) == "processes"
    assert choice(here=80, threads=60, processes=57) == "threads"  # too small a gain to use processes
    assert choice(here=20, threads=30, processes=30) == "here"
    assert choice(overlaps=True, here=20, threads=30, processes=40) == "threads"  # the device does not wait
    said = Choice(("here", "threads"), 4)
    said.timed("here", 0.08)
    said.timed("threads", 0.0212)
    assert str(said) == "by 4 threads (a batch takes 80 ms in the loop, 21.2 ms by 4 threads)"


def test_the_time_that_a_consumer_waits_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))
    monkeypatch.setattr("rooftop.data.loader.time.perf_counter", lambda: float(next(now)))
    loader = Loader(TensorDataset(torch.arange(6)), 2, how="here")
    list(loader)
    assert loader.waited_s == 3.0  # three batches, each between two readings of the clock


def test_parts_keep_draws_and_names() -> None:
    part = Part(Drawn(10), range(1, 10, 2))
    (batch,) = Loader(part, 8, how="here", seed=4).batches(2)
    assert batch.value["index"].tolist() == [1, 3, 5, 7, 9]
    expected = Drawn(10).draw(3, np.random.default_rng((4, 2, 1)))
    assert torch.equal(batch.value["values"][1], expected["values"])
    failing = Failing(ValueError("bad"))
    for samples in (Part(failing, [4, 5]), Subset(failing, [4, 5])):  # type: ignore[arg-type]
        with pytest.raises(InputError, match=r"sample 1 \(file-5\.bin\)"):
            list(Loader(samples, 8, how="here"))
    assert Part(failing, [4])[0] == 4
    with pytest.raises(InputError, match="expected 0 to 11"):
        Part(failing, [12])
    assert len(Part(failing, [])) == 0
    assert Part(failing, np.array([4, 5], object)).indices.tolist() == [4, 5]  # type: ignore[arg-type]
    for wrong in (np.arange(12) < 3, [0.0, 1.5], [[0, 1]]):
        with pytest.raises(InputError, match=r"expected a list of integers; for a mask, pass np\.flatnonzero\(mask\)"):
            Part(failing, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"how": "fast"}, "how is 'fast'"),
        ({"on_damage": "ignore"}, "on_damage is 'ignore'"),
        ({"ahead": 0}, "ahead=0"),
        ({"batch": 0}, "batch is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"rank": 2, "ranks": 2}, "rank 2 of 2"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Loader(TensorDataset(torch.arange(4)), **{"batch": 2, **arguments})
    with pytest.raises(InputError, match="epochs is 0: expected 1 or more"):
        Loader(TensorDataset(torch.arange(4)), 2).batches(0, epochs=0)
    with pytest.raises(InputError, match="batch 3 of epoch 0: an epoch has 2"):
        Loader(TensorDataset(torch.arange(4)), 2).batches(0, 3)


@pytest.mark.gpu
@pytest.mark.parametrize(("how", "workers"), WAYS)
def test_batches_on_a_gpu(how: str, workers: int) -> None:
    samples = Drawn(300)
    expected = listed(Loader(samples, 32, shuffle=True, how="here").batches(1))
    with Loader(samples, 32, shuffle=True, how=how, workers=workers, device="cuda") as loader:
        found = []
        for batch in loader.batches(1):
            assert batch.value["values"].is_cuda
            torch.cuda._sleep(1_000_000)  # the step is behind the copies
            found.append((batch.value, batch.places.tolist(), batch.indices.tolist()))
    on_cpu = torch.utils._pytree.tree_map_only(Tensor, Tensor.cpu, found)
    assert [(plain(value), places, indices) for value, places, indices in on_cpu] == expected


def test_more_workers_than_the_machine_can_use_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftop.data.loader.usable_cpus", lambda: 2)
    assert Loader(Drawn(8), 4, how="threads", workers=32).workers == 32
    with pytest.raises(InputError, match=r"workers=500: expected at most 32, since this process may use 2 CPUs"):
        Loader(Drawn(8), 4, workers=500)
