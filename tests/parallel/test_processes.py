"""Ranks start together, fail together with the same message, and end together. No rank waits for one that will not
come."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rooftop.parallel import Launch, Layout, RankError, World, join, launched, processes, watching
from rooftop.parallel.captures import graphs_end_here
from rooftop.parallel.launchers import first_host
from rooftop.train import Replayed

Run = Callable[..., list[Any]]

# ---- variables of the launcher -----------------------------------------------------------------------------------

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "2",
}


def test_torchrun_says_all() -> None:
    assert launched(TORCHRUN) == Launch(3, 8, 1, "torchrun", "node1", 29500)
    elastic = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert launched({**TORCHRUN, **elastic}) == Launch(3, 8, 1, "torchrun", "node1", 29500, True, 2)


def test_slurm_says_all_and_torchrun_within_it_comes_first() -> None:
    assert launched(SLURM) == Launch(5, 8, 1, "slurm", "gpu003", 20_000 + 16 * 71 + 2)
    assert launched({**SLURM, "MASTER_ADDR": "gpu004", "MASTER_PORT": "7"}) == Launch(5, 8, 1, "slurm", "gpu004", 7)
    assert launched({**SLURM, **TORCHRUN}).launcher == "torchrun"
    far = launched({**SLURM, "SLURM_JOB_ID": "98765432"})
    assert 20_000 <= far.port < 32_000


def test_without_a_launcher_a_process_is_alone() -> None:
    assert launched({}) == Launch(0, 1, 0, "alone")
    assert launched({"SLURM_JOB_ID": "71", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) == Launch()  # not under srun
    assert launched({"MASTER_ADDR": "node1"}) == Launch()


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("gpu[003-006,9],login", "gpu003"), ("gpu7", "gpu7"), ("a,b[1-2]", "a"), ("r[1-2]n[30,31]-ib", "r1n30-ib")],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"RANK": None}, "has WORLD_SIZE, MASTER_ADDR, MASTER_PORT but not RANK"),
        ({"MASTER_PORT": None, "MASTER_ADDR": None}, "but not MASTER_ADDR, MASTER_PORT: start the processes with"),
        ({"RANK": "-1"}, "RANK='-1' in the environment: expected a number"),
        ({"RANK": "8"}, "rank 8 of 8"),
        ({"WORLD_SIZE": "0"}, "rank 3 of 0"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999 in the environment: expected a port, 1 to 65535"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is empty"),
        ({"TORCHELASTIC_RESTART_COUNT": "first"}, "TORCHELASTIC_RESTART_COUNT='first' in the environment: expected a"),
    ],
)
def test_variables_that_are_missing_or_wrong(change: dict[str, str | None], said: str) -> None:
    environment = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=said):
        launched(environment)


# ---- a single process --------------------------------------------------------------------------------------------


def test_a_process_by_itself_needs_no_group() -> None:
    with join(Layout(), device="cpu") as world:
        assert world == World(0, 1, torch.device("cpu"))
        assert not dist.is_initialized()
    with pytest.raises(KeyError, match="as it is"), join():
        raise KeyError("as it is")
    with pytest.raises(ValueError, match="it has 2 ranks and the world 1"), join(Layout(tp=2)):
        pass
    with pytest.raises(ValueError, match="device='tpu': expected 'cuda' or 'cpu'"), join(device="tpu"):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with (
        pytest.raises(RankError, match="PyTorch finds no GPU here: use device='cpu' \\(--device cpu\\)"),
        join(device="cuda"),
    ):
        pass


# ---- the roll call -----------------------------------------------------------------------------------------------


def sum_of_ranks() -> tuple[float, int, bool]:
    with join(Layout(dp=dist.get_world_size() if dist.is_initialized() else 4), device="cpu") as world:
        ranks = torch.tensor(float(world.rank))
        dist.all_reduce(ranks)
    return ranks.item(), world.size, dist.is_initialized()


def test_a_world_begins_and_ends_with_the_block(on_ranks: Run) -> None:
    assert on_ranks(4, sum_of_ranks, joined=False) == [(6.0, 4, False)] * 4


def test_a_group_that_is_there_is_used_and_left(on_ranks: Run) -> None:
    assert on_ranks(2, sum_of_ranks) == [(1.0, 2, True)] * 2


def twice() -> list[tuple[float, int, bool]]:
    return [sum_of_ranks(), sum_of_ranks()]


Stores = Callable[[int], dict[int, dict[str, str]]]


@pytest.fixture
def own_store(free_port: Callable[[], int]) -> Stores:
    """`own_store(4)`: variables of four ranks. Rank 0 holds the store, as without torchrun."""

    def variables(world_size: int) -> dict[int, dict[str, str]]:
        port = str(free_port())
        return {rank: {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": port} for rank in range(world_size)}

    return variables


@pytest.mark.parametrize("served", [True, False])
def test_a_world_can_begin_again(served: bool, on_ranks: Run, own_store: Stores) -> None:
    environments = None if served else own_store(4)
    assert on_ranks(4, twice, joined=False, environments=environments) == [[(6.0, 4, False)] * 2] * 4


def twice_with_a_late_end() -> list[tuple[float, int, bool]]:
    """Rank 0 closes its store a second after the others have left the first block."""
    if os.environ["RANK"] != "0":
        return twice()
    destroy = dist.destroy_process_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", lambda: time.sleep(1.0) or destroy())
        return twice()


def test_a_world_begins_again_at_the_next_store(on_ranks: Run, own_store: Stores) -> None:
    assert on_ranks(4, twice_with_a_late_end, joined=False, environments=own_store(4)) == [[(6.0, 4, False)] * 2] * 4


def started_by_slurm(port: int) -> tuple[float, int, bool]:
    rank = os.environ.pop("RANK")
    del os.environ["WORLD_SIZE"]
    slurm = {**SLURM, "SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "127.0.0.1"}
    del os.environ["MASTER_ADDR"]
    os.environ.update({**slurm, "MASTER_PORT": str(port)})
    return sum_of_ranks()


def test_slurm_starts_the_ranks(on_ranks: Run, free_port: Callable[[], int]) -> None:
    assert on_ranks(4, started_by_slurm, free_port(), joined=False) == [(6.0, 4, False)] * 4


def errors_of(run: Run, failed: type[Exception], *arguments: Any, **options: Any) -> dict[int, str]:
    """The error of each rank, long before PyTorch's own timeout."""
    began = time.monotonic()
    with pytest.raises(failed) as caught:
        run(*arguments, joined=False, **options)
    assert time.monotonic() - began < 150
    return caught.value.errors  # type: ignore[attr-defined]


def with_layout(layout: Layout) -> None:
    with join(layout, device="cpu"):
        pass


def test_a_wrong_layout_is_refused_before_anything_is_communicated(
    on_ranks: Run, ranks_failed: type[Exception]
) -> None:
    # with this address, a rank that tried to communicate would fail
    nobody = {rank: {"MASTER_ADDR": "256.0.0.1"} for rank in range(4)}
    errors = errors_of(on_ranks, ranks_failed, 4, with_layout, Layout(tp=3), environments=nobody)
    said = "the layout dp=1 tp=3 pp=1 cp=1 does not fit: it has 3 ranks and the world 4. Nearest for 4 ranks: dp=1 tp=4"
    assert errors.keys() == set(range(4))
    assert all(error.startswith(f"ValueError: {said}") for error in errors.values())


def with_settings(different: int) -> None:
    rank = int(os.environ["RANK"])
    settings = {"seed": 2 if rank == different else 1, "hidden": 64} | ({"bias": True} if rank == 0 else {})
    with join(settings=settings, device="cpu"):
        pass


def test_ranks_with_other_settings_are_named_with_their_values(on_ranks: Run, ranks_failed: type[Exception]) -> None:
    errors = errors_of(on_ranks, ranks_failed, 4, with_settings, 3)
    said = "RankError: the ranks have different settings: seed is 1 at ranks 0-2, 2 at rank 3; bias is True at rank 0, "
    assert errors == dict.fromkeys(range(4), said + "not given at ranks 1-3. Start all ranks with the same settings")


def patient(patience_s: float, folder: Path, present: int) -> None:
    """Join only after all `present` ranks have started, because on a busy machine one may start late."""
    (folder / os.environ["RANK"]).touch()
    while len(os.listdir(folder)) < present:
        time.sleep(0.01)
    with join(device="cpu", patience_s=patience_s):
        pass


@pytest.mark.parametrize("missing", [[2, 3], [0]])
def test_ranks_that_are_missing_are_named(
    missing: list[int], on_ranks: Run, ranks_failed: type[Exception], tmp_path: Path
) -> None:
    present: dict[int, dict[str, str]] = {rank: {} for rank in range(5) if rank not in missing}
    errors = errors_of(on_ranks, ranks_failed, 5, patient, 1.5, tmp_path, len(present), environments=present)
    assert len(set(errors.values())) == 1
    assert errors.keys() == present.keys()
    names = "ranks 2-3" if len(missing) == 2 else "rank 0"
    assert errors[1].startswith(f"RankError: {names} of 5 did not come within 1.5 s of rank {min(present)}")


@pytest.mark.parametrize("missing", [0, 1])
def test_who_is_missing_is_named_where_a_rank_holds_the_store(
    missing: int, on_ranks: Run, ranks_failed: type[Exception], own_store: Stores, tmp_path: Path
) -> None:
    present = {rank: variables for rank, variables in own_store(3).items() if rank != missing}
    errors = errors_of(on_ranks, ranks_failed, 3, patient, 1.5, tmp_path, len(present), environments=present)
    assert errors.keys() == present.keys()
    assert len(set(errors.values())) == 1
    assert errors[2].startswith(f"RankError: rank {missing} of 3 did not come within 1.5 s")


def on_a_gpu_at(rank: int) -> None:
    with join(device="cuda" if int(os.environ["RANK"]) == rank else "cpu"):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_rank_that_cannot_start_is_named_at_all(on_ranks: Run, ranks_failed: type[Exception]) -> None:
    errors = errors_of(on_ranks, ranks_failed, 2, on_a_gpu_at, 1)
    assert len(set(errors.values())) == 1
    assert errors[0].startswith("RankError: rank 1 of 2 cannot start: it is process 1 on a machine")


def started_anew(start: int, attempts: list[int]) -> tuple[int, int, list[float]]:
    """A block of ranks started by launchers whose restart counts differ."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempts[int(os.environ["RANK"])])
    processes._joined.clear()  # forget the joined group, as in a separate process
    with join(settings={"start": start}, device="cpu", patience_s=60.0) as world:
        found = [torch.zeros(1) for _ in range(world.size)]
        dist.all_gather(found, torch.full((1,), float(10 * start + world.rank)))
    return world.rank, world.size, [each.item() for each in found]


def in_a_row(starts: list[tuple[int, list[int]]]) -> list[tuple[int, int, list[float]]]:
    """Starts different numbers of ranks at one store; a rank that is not part of a start continues with the next."""
    rank, said = int(os.environ["RANK"]), []
    waiting = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    for number, (size, attempts) in enumerate(starts):
        if rank < size:
            os.environ["WORLD_SIZE"] = str(size)
            said.append(started_anew(number, attempts))
        waiting.add(f"ended {number}", 1)
        while waiting.add(f"ended {number}", 0) < len(starts[0][1]):
            time.sleep(0.01)
    return said


def test_ranks_that_are_started_anew_meet_at_the_store_of_those_before(on_ranks: Run) -> None:
    """Fewer ranks, then more again, with launchers that have restarted different numbers of times."""
    starts = [(4, [0, 0, 0, 0]), (2, [1, 1, 0, 0]), (4, [1, 1, 0, 0]), (4, [1, 1, 0, 0])]
    found = on_ranks(4, in_a_row, starts, joined=False)
    for rank, said in enumerate(found):
        taking_part = [(number, size) for number, (size, _) in enumerate(starts) if rank < size]
        assert said == [(rank, size, [10.0 * number + each for each in range(size)]) for number, size in taking_part]


def after_a_start_that_did_not_meet(rank: int, late_s: float) -> tuple[int, int, list[float]]:
    """A rank ends during its roll call and leaves its entries in the store; then all ranks start."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    left = dist.PrefixStore("rooftop/0/0", store)  # type: ignore[attr-defined]
    if int(os.environ["RANK"]) == rank:
        left.set(f"here/{rank}", '[{"start": "0"}, "", {}, "of a process that is gone"]')
        time.sleep(late_s)
    left.wait([f"here/{rank}"])
    return started_anew(1, [0, 1, 0])


@pytest.mark.parametrize(("rank", "late_s"), [(0, 0.0), (0, 1.0), (2, 0.0), (2, 1.0)])
def test_a_meeting_that_was_left_before_its_verdict_is_closed(rank: int, late_s: float, on_ranks: Run) -> None:
    """A rank replaces another one that left, however late. The other ranks must not mistake the new rank for the one
    that left."""
    found = on_ranks(3, after_a_start_that_did_not_meet, rank, late_s, joined=False)
    assert found == [(each, 3, [10.0, 11.0, 12.0]) for each in range(3)]


# ---- within the block --------------------------------------------------------------------------------------------


def raising(wrong: int, how: str, late_s: float) -> None:
    """Rank `wrong` raises, or ends, while the others wait for it; with `late_s`, after they have ended the block."""
    with join(device="cpu", timeout_s=20) as world:
        group = Layout(dp=world.size).process_groups()["dp"]
        if world.rank == wrong:
            time.sleep(late_s)
            if how == "raise":
                raise KeyError("no such voxel")
            os._exit(9)
        if not late_s:
            dist.all_reduce(torch.ones(1), group=group)


@pytest.mark.parametrize(
    ("wrong", "late_s", "served"), [(0, 0.0, False), (0, 0.4, True), (1, 0.0, True), (1, 0.4, False)]
)
def test_a_rank_that_raises_is_named_at_all(
    wrong: int, late_s: float, served: bool, on_ranks: Run, ranks_failed: type[Exception], own_store: Stores
) -> None:
    environments = None if served else own_store(3)
    errors = errors_of(on_ranks, ranks_failed, 3, raising, wrong, "raise", late_s, environments=environments)
    assert errors.pop(wrong) == "KeyError: 'no such voxel'"
    assert errors == {
        rank: f"RankError: rank {wrong} of 3 failed: KeyError: 'no such voxel'" for rank in range(3) if rank != wrong
    }


def test_a_rank_that_dies_is_named_at_all(on_ranks: Run, ranks_failed: type[Exception]) -> None:
    errors = errors_of(on_ranks, ranks_failed, 3, raising, 1, "exit", 0.0)
    assert errors.pop(1) == "died"
    assert len(set(errors.values())) == 1
    assert errors[0].startswith("RankError: rank 1 of 3 is gone without an error")


def raising_unwatched(watched: bool) -> None:
    """Rank 0 ends. On a busy machine the other ranks fail before their threads look: then `watched` is false."""
    with pytest.MonkeyPatch.context() as patch:
        if not watched:
            patch.setattr(watching.Watch, "_run", lambda watch, store: watch._stop.wait())
        raising(0, "exit", 0.0)


@pytest.mark.parametrize("watched", [True, False])
def test_the_death_of_the_rank_that_holds_the_store(
    watched: bool, on_ranks: Run, ranks_failed: type[Exception], own_store: Stores
) -> None:
    errors = errors_of(on_ranks, ranks_failed, 3, raising_unwatched, watched, environments=own_store(3))
    assert errors.pop(0) == "died"
    named = "rank 0 of 3, or the launcher that held the store, is gone"
    assert [error for error in errors.values() if named not in error] == []


def late(rank: int, seconds: float, share: float = 1.0) -> tuple[float, float]:
    """When a rank has finished its part of the block, and when it has left the block; `rank` finishes last.

    Ranks wait for each other's end for a part of the 20 s, which is also enough to form a group on a busy machine.
    """
    end = processes._Ranks.end
    with pytest.MonkeyPatch.context() as patch, join(device="cpu", timeout_s=20.0) as world:
        patch.setattr(processes._Ranks, "end", lambda ranks, timeout_s: end(ranks, share * timeout_s))
        store = dist.distributed_c10d._get_default_store()
        if world.rank == rank:
            store.wait([f"ends/{other}" for other in range(world.size) if other != rank])
            time.sleep(seconds)
        else:
            store.set(f"ends/{world.rank}", "1")
        ended = time.monotonic()
    return ended, time.monotonic()


def test_no_rank_ends_before_the_last_has_ended(on_ranks: Run) -> None:
    said = on_ranks(3, late, 1, 0.8, joined=False)  # times of a clock that all processes share
    assert min(left for _, left in said) >= max(ended for ended, _ in said)


def slow_to_hear(seconds: float) -> None:
    poll = processes.poll
    with pytest.MonkeyPatch.context() as patch, join(device="cpu") as world:
        if world.rank == 1:
            patch.setattr(processes, "poll", lambda done, until: time.sleep(seconds) or poll(done, until))


def test_the_rank_that_holds_the_store_stays_until_all_have_heard(on_ranks: Run, own_store: Stores) -> None:
    assert on_ranks(2, slow_to_hear, 0.5, joined=False, environments=own_store(2)) == [None, None]


def test_a_rank_that_does_not_end_is_named_at_all(on_ranks: Run, ranks_failed: type[Exception]) -> None:
    errors = errors_of(on_ranks, ranks_failed, 3, late, 1, 3.5, 0.1)
    assert len(set(errors.values())) == 1
    assert errors[1].startswith("RankError: rank 1 of 3 did not reach the end of the block within 2 s after rank ")


def forms_after_one_that_did_not() -> float:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            patch.setattr(dist, "init_process_group", lambda *_, **__: {}["no such backend"])
        with pytest.raises((KeyError, RankError)), join(device="cpu", timeout_s=2.0):
            pass
    with join(device="cpu", timeout_s=20) as world:
        found = torch.ones(1)
        dist.all_reduce(found)
        assert found.item() == world.size
        return found.item()


def test_a_group_forms_after_one_that_did_not(on_ranks: Run) -> None:
    assert on_ranks(3, forms_after_one_that_did_not, joined=False) == [3.0] * 3


# ---- the pool itself ---------------------------------------------------------------------------------------------


def hanging(rank: int) -> int:
    if dist.get_rank() == rank:
        time.sleep(60)
    return dist.get_rank()


def test_a_hang_is_ended_and_the_pool_goes_on(on_ranks: Run, ranks_failed: type[Exception]) -> None:
    with pytest.raises(ranks_failed) as failed:
        on_ranks(2, hanging, 1, limit_s=1.0)
    assert failed.value.errors == {0: "killed", 1: "killed"}  # type: ignore[attr-defined]
    assert on_ranks(2, hanging, 2) == [0, 1]


def test_a_failing_rank_shows_its_traceback(on_ranks: Run, ranks_failed: type[Exception]) -> None:
    with pytest.raises(ranks_failed, match='in raising\n    raise KeyError\\("no such voxel"\\)'):
        on_ranks(1, raising, 0, "raise", 0.0, joined=False)


# ---- on GPUs -----------------------------------------------------------------------------------------------------


def raising_on_gpus(wrong: int) -> None:
    with join(timeout_s=60) as world:
        assert dist.get_backend() == "nccl"
        group = Layout(tp=world.size).process_groups()["tp"]
        found = torch.ones(1, device=world.device)
        dist.all_reduce(found, group=group)
        assert found.item() == world.size
        if world.rank == wrong:
            raise KeyError("no such voxel")
        dist.all_reduce(found, group=group)
        torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("wrong", [0, 1])
def test_between_gpus_a_rank_that_raises_is_named_at_all(
    wrong: int, on_ranks: Run, ranks_failed: type[Exception]
) -> None:
    errors = errors_of(on_ranks, ranks_failed, 2, raising_on_gpus, wrong)
    assert errors[wrong] == "KeyError: 'no such voxel'"
    assert errors[1 - wrong] == f"RankError: rank {wrong} of 2 failed: KeyError: 'no such voxel'"


def device_of_this_rank() -> tuple[str, str, int]:
    with join(Layout(tp=2)) as world:
        mesh = Layout(tp=2).mesh()
        return str(world.device), mesh.device_type, torch.cuda.current_device()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_rank_has_the_gpu_of_its_number(on_ranks: Run) -> None:
    assert on_ranks(2, device_of_this_rank, joined=False) == [("cuda:0", "cuda", 0), ("cuda:1", "cuda", 1)]


held: list[object] = []  # keeps a reference to the graph


def replaying(wrong: int, error: type[BaseException]) -> float:
    """All-reduces from a CUDA graph that is still referenced when the block ends; rank `wrong` leaves the block
    early."""
    with join(timeout_s=60) as world:
        found = torch.ones(1 << 20, device=world.device)

        def step() -> tuple[torch.Tensor, ...]:
            dist.all_reduce(found)
            return (found / found.max(),)

        replayed = Replayed(step, world.device)
        held.append(replayed)
        for number in range(50):
            (ones,) = replayed()
            if number == 20 and world.rank == wrong:
                raise error("enough")
        assert replayed.captured
        return float(ones.sum())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("wrong", "error"), [(-1, KeyError), (0, KeyError), (1, KeyError), (1, KeyboardInterrupt)])
def test_a_graph_with_work_of_nccl_keeps_no_rank(
    wrong: int, error: type[BaseException], on_ranks: Run, ranks_failed: type[Exception]
) -> None:
    began = time.monotonic()
    if wrong < 0:
        assert on_ranks(2, replaying, wrong, error, joined=False, limit_s=40) == [1 << 20] * 2
    else:
        errors = errors_of(on_ranks, ranks_failed, 2, replaying, wrong, error)
        assert errors[wrong].startswith(error.__name__)
        assert errors[1 - wrong].startswith(f"RankError: rank {wrong} of 2 failed: {error.__name__}")
    assert time.monotonic() - began < 150  # even on a busy machine


@contextmanager
def counted_graphs() -> Iterator[list[str]]:
    """Replaces torch's class of graphs by one that only records its calls."""
    calls: list[str] = []

    class Graph:
        def capture_begin(self) -> None:
            calls.append("begin")

        def reset(self) -> None:
            calls.append("reset")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        yield calls


def test_graphs_end_with_their_block() -> None:
    with counted_graphs() as calls:
        before, gone, kept = (torch.cuda.CUDAGraph() for _ in range(3))
        before.capture_begin()
        with pytest.raises(KeyError), graphs_end_here():  # noqa: PT012
            gone.capture_begin()
            del gone
            kept.capture_begin()
            raise KeyError
        before.capture_begin()
        assert calls == ["begin", "begin", "begin", "reset", "begin"]
