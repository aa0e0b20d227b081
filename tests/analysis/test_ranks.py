"""Several ranks: exposed communication, which rank waits for which, and no rank hangs after another has failed."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rooftop.analysis.advice.rank_rules import rank_advice
from rooftop.analysis.program import Program
from rooftop.analysis.ranks import lockstep
from rooftop.analysis.ranks.lockstep import distributed, process_group, several_ranks
from rooftop.analysis.ranks.measuring import (
    RANK_STEP_LABEL,
    clipped,
    length,
    measure_rank,
    measure_ranks,
    merged,
    rank_row,
    without,
)
from rooftop.analysis.ranks.merging import RankRow, Ranks, compared
from rooftop.analysis.report import Report
from rooftop.analysis.stages import stages, steps_needed
from rooftop.analysis.text import ranks_table
from rooftop.hardware.ceilings import Ceilings

# ---- intervals ---------------------------------------------------------------------------------------------------

intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def points(given_intervals: list[tuple[int, int]]) -> set[int]:
    """Each unit of time that some interval covers."""
    return {time for start, end in given_intervals for time in range(start, end)}


@given(intervals)
def test_merged_covers_the_same_times_once_each(some: list[tuple[int, int]]) -> None:
    union = merged(some)
    assert points(union) == points(some)
    assert length(union) == len(points(some))
    assert all(before[1] < after[0] for before, after in pairwise(union))


@given(intervals, intervals)
def test_without_leaves_what_no_other_covers(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    left = without(merged(some), merged(others))
    assert points(left) == points(some) - points(others)
    assert length(left) == len(points(left))


@given(intervals, st.integers(0, 30), st.integers(0, 30))
def test_clipped_keeps_what_is_between(some: list[tuple[int, int]], start: int, end: int) -> None:
    assert points(clipped(merged(some), start, end)) == points(some) & set(range(start, end))


# ---- events ------------------------------------------------------------------------------------------------------


@dataclass
class Named:
    name: str


@dataclass
class Event:
    """An event with the interface of the profiler's; times in ms."""

    label: str
    start: float
    end: float
    device: str = "CPU"
    thread: int = 1
    annotation: bool = False
    index: int = 0

    def name(self) -> str:
        return self.label

    def start_ns(self) -> int:
        return round(self.start * 1e6)

    def duration_ns(self) -> int:
        return round((self.end - self.start) * 1e6)

    def device_type(self) -> Named:
        return Named(self.device)

    def device_index(self) -> int:
        return self.index

    def start_thread_id(self) -> int:
        return self.thread

    def is_user_annotation(self) -> bool:
        return self.annotation

    def correlation_id(self) -> int:
        return 0

    def linked_correlation_id(self) -> int:
        return 0


def test_on_a_gpu_what_no_other_kernel_of_the_device_hides_is_exposed() -> None:
    events = [
        Event(RANK_STEP_LABEL, 0, 20, annotation=True),
        Event(RANK_STEP_LABEL, 0, 20, device="CUDA", annotation=True),
        Event("gemm", 1, 8, device="CUDA"),
        Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 5, 15, device="CUDA"),
        Event("gemm", 10, 11, device="CUDA"),
        Event("gemm", 0, 20, device="CUDA", index=1),
        Event("ncclDevKernel_AllReduce", 30, 40, device="CUDA"),  # after the step
    ]
    row = rank_row(events, 3, torch.device("cuda", 0))
    assert (row.rank, row.device) == (3, "cuda:0")
    assert (row.wall_ms, row.busy_ms, row.communication_ms, row.exposed_ms) == (20, 14, 10, 6)
    assert row.own_ms == 14


def test_on_a_cpu_an_operator_hides_a_collective_unless_it_waits_for_it() -> None:
    events = [
        Event(RANK_STEP_LABEL, 0, 20, annotation=True),
        Event("c10d::allreduce_", 1, 2),
        Event("gloo:all_reduce", 1, 11, thread=2, annotation=True),
        Event("aten::linear", 3, 6),
        Event("aten::addmm", 3, 5),
        Event("aten::add", 6, 12),  # a method of an AsyncCollectiveTensor, which waits first
        Event("_c10d_functional::wait_tensor", 6, 11),
        Event("aten::add", 11, 12),
    ]
    row = rank_row(events, 0, torch.device("cpu"))
    assert (row.wall_ms, row.communication_ms, row.exposed_ms, row.busy_ms) == (20, 10, 8, 11)


def test_figures_are_medians_over_the_steps() -> None:
    steps = [(0, 10), (100, 112), (200, 260)]
    events = [Event(RANK_STEP_LABEL, start, end, annotation=True) for start, end in steps]
    events += [Event("gloo:barrier", start + 1, start + 3, thread=2, annotation=True) for start, _ in steps]
    row = rank_row(events, 0, torch.device("cpu"))
    assert (row.wall_ms, row.exposed_ms, row.own_ms) == (12, 2, 10)
    assert row.own_spread_ms == 25  # own times 8, 10, 58: quartiles 9 and 34


# ---- rows --------------------------------------------------------------------------------------------------------


def make_row(rank: int, own_ms: float, wall_ms: float = 100.0, spread_ms: float = 0.5) -> RankRow:
    exposed_ms = wall_ms - own_ms
    return RankRow(rank, f"cuda:{rank}", wall_ms, own_ms, exposed_ms + 4, exposed_ms, own_spread_ms=spread_ms)


def test_the_rank_that_waits_least_is_the_straggler() -> None:
    ranks = compared([make_row(1, 90), make_row(0, 40), make_row(2, 50)])
    assert [row.rank for row in ranks.rows] == [0, 1, 2]
    assert [row.waited_ms for row in ranks.rows] == [50, 0, 40]
    assert ranks.straggler == 1
    assert ranks.imbalance == pytest.approx((90 - 60) / 60)
    assert ranks.exposed_share == pytest.approx(0.4)
    assert "Rank 1 (cuda:1) holds the others up" in ranks.sentence
    assert "90 ms a step, 45 ms more" in ranks.sentence


@pytest.mark.parametrize(
    "rows",
    [
        [make_row(0, 80), make_row(1, 85)],
        [make_row(0, 40, spread_ms=20), make_row(1, 90)],
        [make_row(0, 40)],
    ],
    ids=["less than 10%", "no more than the noise", "a rank alone"],
)
def test_no_straggler(rows: list[RankRow]) -> None:
    assert compared(rows).straggler is None
    assert "No rank" in compared(rows).sentence


times = st.floats(0.1, 1e4)
rows_of_ranks = st.lists(st.tuples(times, st.floats(0, 1), times), min_size=1, max_size=8).map(
    lambda drawn: [
        RankRow(rank, "cpu", wall, wall, share * wall, share * wall, own_spread_ms=spread)
        for rank, (wall, share, spread) in enumerate(drawn)
    ]
)


@given(rows_of_ranks)
def test_laws_of_the_rows(rows: list[RankRow]) -> None:
    ranks = compared(rows)
    assert min(row.waited_ms for row in ranks.rows) == 0
    assert all(0 <= row.waited_ms <= row.exposed_ms <= row.wall_ms for row in ranks.rows)
    assert ranks.imbalance >= -1e-9
    assert 0 <= ranks.exposed_share <= 1 + 1e-9
    gains = [item.gain_ms for item in rank_advice(ranks)]
    assert gains == sorted(gains, reverse=True)
    assert all(0 <= gain <= max(row.wall_ms for row in rows) for gain in gains)
    assert Ranks.from_dict(json.loads(json.dumps(ranks.to_dict()))) == ranks


@pytest.mark.parametrize(
    "plain",
    [
        {},
        {"rows": [{"rank": 0}]},
        {"rows": None},
        {"rows": []},
        {"rows": [{**asdict(RankRow(0, "cpu", 1.0, 1.0, 1.0, 1.0)), "wall_ms": "long"}]},
        {"rows": [{**asdict(RankRow(0, "cpu", 1.0, 1.0, 1.0, 1.0)), "device": None}]},
    ],
)
def test_damaged_json(plain: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="damaged"):
        Ranks.from_dict(plain)


def test_advice_names_the_straggler_and_what_could_be_overlapped() -> None:
    straggler, overlap = rank_advice(compared([make_row(0, 40), make_row(1, 90), make_row(2, 50)]))
    assert straggler.title == "Make rank 1 (cuda:1) as fast as the others"
    assert straggler.gain_ms == 40
    assert overlap.gain_ms == 10
    assert "for 10.00 ms, not counting waits" in overlap.evidence


def test_nobody_waits_where_nothing_is_communicated() -> None:
    ranks = compared([RankRow(0, "cpu", 40, 40, 0, 0), RankRow(1, "cpu", 90, 90, 0, 0)])
    assert ranks.straggler == 1
    assert "is slower than the others" in ranks.sentence
    assert rank_advice(ranks) == []


def test_table() -> None:
    console = Console(width=110, color_system=None)
    with console.capture() as capture:
        console.print(ranks_table(compared([make_row(0, 40), make_row(1, 90)])))
    first, second = capture.get().splitlines()[-2:]
    assert " ".join(first.split()) == "0 cuda:0 100 ms 40 ms 64 ms 60 ms 50 ms 40 ms"
    assert second.rstrip().endswith("the straggler")


# ---- a single process --------------------------------------------------------------------------------------------


def test_alone() -> None:
    device, module = torch.device("cpu"), torch.nn.Linear(8, 8)
    with process_group(device) as where:
        assert where == device
        assert not several_ranks()
    assert distributed(module, device) is module
    program = Program(module, (torch.randn(4, 8),), {}, train=True)
    assert measure_ranks(program, device) is None
    row = measure_rank(program, device, steps=3)
    assert row.communication_ms == 0
    assert row.own_ms == row.wall_ms > row.busy_ms > 0
    with pytest.raises(ValueError, match="steps=0"):
        measure_rank(program, device, steps=0)


# ---- several processes -------------------------------------------------------------------------------------------

PROLOGUE = """
import json, os, sys, time
import torch
import torch.distributed as dist
from rooftop.analysis.ranks.lockstep import SharedProgram, distributed, on_all_ranks, process_group
from rooftop.analysis.program import Program
from rooftop.analysis.ranks.measuring import measure_rank, measure_ranks
from rooftop.errors import MeasurementError

rank = int(os.environ["RANK"])

def write(found):
    with open(os.path.join(sys.argv[1], f"{rank}.json"), "w") as file:
        json.dump(found, file)

class Net(torch.nn.Module):
    def __init__(self, seconds, wrong=False):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
        self.seconds, self.wrong = seconds, wrong
        self.calls = []  # a log, which goes on

    def forward(self, x):
        self.calls.append(len(self.calls) + 1)
        time.sleep(self.seconds)
        if self.wrong and len(self.calls) == 5:
            raise KeyError("no such voxel")
        return self.layers(x)

x = torch.randn(16, 64)
"""

Launch = Callable[..., tuple[list[Any], int, str]]


@pytest.fixture
def launch(tmp_path: Path, fork: Callable[..., BaseProcess]) -> Launch:
    """Run a program on two ranks; return what each wrote, the exit status and stderr.

    torchrun would end all ranks as soon as one has failed, perhaps before they could report the reason. The command
    line's tests cover torchrun.
    """

    def run(body: str) -> tuple[list[Any], int, str]:
        program = PROLOGUE + textwrap.dedent(body)
        errors = tmp_path / "errors"
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        served = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": "2"}
        served |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        places = {"folder": tmp_path, "output": errors, "errors": errors}
        ranks = [{**served, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        status = ended([fork(program, str(tmp_path), environment=each, **places) for each in ranks])
        files = [tmp_path / f"{rank}.json" for rank in range(2)]
        return [json.loads(f.read_text()) if f.exists() else None for f in files], status, errors.read_text()

    return run


def ended(processes: list[BaseProcess]) -> int:
    """The largest exit status of processes, all of which have ended."""
    until = time.monotonic() + 300
    try:
        for process in processes:
            process.join(until - time.monotonic())
        assert not any(process.is_alive() for process in processes), "not done after five minutes"
        return max(abs(process.exitcode or 0) for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.join()


TRAINING = """
    with process_group(torch.device("cpu")) as device:
        model = distributed(Net({seconds}), device)
        assert distributed(model, device) is model
        program = Program(model, (x,), {{}}, train=True)
        write(measure_ranks(program, device).to_dict())
"""


def test_balanced_ranks_have_no_straggler(launch: Launch) -> None:
    found, status, errors = launch(TRAINING.format(seconds=0.05))
    assert status == 0, errors
    assert found[0] == found[1]
    ranks = Ranks.from_dict(found[0])
    assert ranks.straggler is None
    assert [row.device for row in ranks.rows] == ["cpu", "cpu"]
    assert all(0 < row.exposed_ms <= row.communication_ms < row.wall_ms for row in ranks.rows)
    assert all(row.own_ms > 50 for row in ranks.rows)


def test_a_delayed_rank_is_the_straggler(launch: Launch) -> None:
    found, status, errors = launch(TRAINING.format(seconds="0.2 * rank"))
    assert status == 0, errors
    ranks = Ranks.from_dict(found[0])
    prompt, late = ranks.rows
    assert ranks.straggler == 1
    assert prompt.waited_ms > 100
    assert late.waited_ms == 0
    assert late.own_ms - prompt.own_ms == pytest.approx(200, abs=100)
    assert late.wall_ms == pytest.approx(prompt.wall_ms, rel=0.2)


def test_a_rank_that_raises_is_named_at_all(launch: Launch) -> None:
    began = time.monotonic()
    found, status, errors = launch("""
        with process_group(torch.device("cpu")) as device:
            program = Program(distributed(Net(0.0, wrong=rank == 1), device), (x,), {}, train=True)
            try:
                measure_ranks(program, device)
            except MeasurementError as error:
                write(str(error))
                os._exit(1)  # as a program ends that does not catch it
    """)
    assert status != 0
    assert found[0] == found[1], errors
    assert found[0].startswith("rank 1 of 2 failed: DistributedDataParallel raised KeyError for inputs 16x64:float32")
    assert time.monotonic() - began < 200


def test_a_rank_that_raised_before_gathering_is_named_at_all(launch: Launch) -> None:
    found, status, errors = launch("""
        with process_group(torch.device("cpu")) as device:
            program = Program(Net(0.0), (x,), {})
            row = measure_rank(program, device, steps=2)

            def half_a_step():
                if rank == 1:
                    raise ZeroDivisionError("half a step")
                return row

            try:
                on_all_ranks(half_a_step)
            except MeasurementError as error:
                write([str(error), len(on_all_ranks(lambda: row))])  # and they can go on together
    """)
    assert status == 0, errors
    assert found == [["rank 1 of 2 failed: ZeroDivisionError: half a step", 2]] * 2


def test_the_others_follow_each_step_of_the_leading_rank(launch: Launch) -> None:
    found, status, errors = launch("""
        from rooftop.analysis.profiling import profile_program
        with process_group(torch.device("cpu")) as device:
            net = Net(0.0)
            program = SharedProgram(distributed(net, device), (x,), {}, train=True)
            names = program.lead(lambda: [op.record.name for op in profile_program(program).operators])
            again = program.lead(lambda: rank)
            write([len(net.calls), names, again, len(measure_ranks(program, device).rows)])
    """)
    assert status == 0, errors
    assert found[0] == found[1]
    calls, names, again, rows = found[0]
    assert calls > 10  # steps of a profile, even where each block has the fewest
    assert "aten::addmm" in names
    assert (again, rows) == (0, 2)


@pytest.mark.parametrize(("rank", "named"), [(0, 0), (1, 0)])
def test_a_rank_without_a_store_leaves_the_report_to_rank_0(
    rank: int, named: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> None:
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(lockstep, "_store", gone)
    monkeypatch.setattr(lockstep.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(lockstep.dist, "get_world_size", lambda: 2)
    said = str(lockstep._failure(0, ValueError("too large")))
    assert said.startswith(f"rank {named} of 2 failed: ")
    assert "ValueError: too large" in said


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_failure_while_one_rank_leads_is_named_at_all(launch: Launch, wrong: int) -> None:
    found, status, errors = launch(f"""
        with process_group(torch.device("cpu")) as device:
            program = SharedProgram(Net(0.0, wrong=rank == {wrong}), (x,), {{}})
            try:
                program.lead(lambda: [program.step() for _ in range(8)])
            except MeasurementError as error:
                write(str(error))
    """)
    assert status == 0, errors
    assert found[0] == found[1]
    assert found[0].startswith(f"rank {wrong} of 2 failed: Net raised KeyError")


def test_a_model_that_outlives_its_group_does_not_hang(launch: Launch) -> None:
    """gloo's thread still holds a collective, and with it a Python object: the mode that `torch.device` sets."""
    found, status, errors = launch("""
        import torch.distributed.nn  # whose default arguments hold the first group for ever, if there is one by then
        from rooftop.analysis.ranks.lockstep import process_groups_kept

        def train():
            model = torch.nn.parallel.DistributedDataParallel(Net(0.0))
            model(x).sum().backward()
            time.sleep(0.3 * rank)
            with torch.device("cpu"):
                dist.all_reduce(torch.ones(1), async_op=True)
            dist.destroy_process_group()

        with process_groups_kept():
            dist.init_process_group("gloo")
            train()
        write("ended")
    """)
    assert (found, status) == (["ended"] * 2, 0), errors


# ---- scripts -----------------------------------------------------------------------------------------------------

TRAIN = """
import os, signal, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["RANK"])

def train():
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        time.sleep(DELAY * rank)
        if rank == 1 and step == WRONG:
            raise KeyError("no such voxel")
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()

dist.init_process_group("gloo")
train()
dist.destroy_process_group()
"""
RUN = """
    from datetime import timedelta
    from rooftop.analysis.ranks import recorded
    from rooftop.analysis.scripts import run_script
    from rooftop.hardware.ceilings import Ceilings

    recorded.ROW_TIMEOUT = timedelta(seconds=10)
    began = time.monotonic()
    folder = sys.argv[1]
    ceilings = Ceilings.load(os.path.join(folder, "ceilings.json"))
    ended = run_script(os.path.join(folder, "train.py"), device="cpu", ceilings=ceilings)
    report = ended.report.to_dict() if ended.report is not None else None
    write([ended.status, ended.problem, report, time.monotonic() - began])
    os._exit(0)
"""
NEEDED_OF_RANKS = steps_needed(stages(found=True, compiled=False, ranks=True))


def write_script(
    folder: Path, ceilings: Ceilings, steps: int, wrong: int = -1, end: str = "", delay_s: float = 0.0
) -> None:
    """A training whose second rank begins each step late."""
    ceilings.save(folder / "ceilings.json")
    program = TRAIN.replace("STEPS", str(steps)).replace("WRONG", str(wrong)).replace("DELAY", str(delay_s))
    (folder / "train.py").write_text(program + end)


def test_all_ranks_of_a_script_are_in_its_report(launch: Launch, tmp_path: Path, ceilings: Ceilings) -> None:
    write_script(tmp_path, ceilings, NEEDED_OF_RANKS + 3, delay_s=0.2)
    (first, second), status, errors = launch(RUN)
    assert status == 0, errors
    assert (first[:2], second[:3]) == ([0, ""], [0, "", None])
    report = Report.from_dict(first[2])
    assert report.mode == f"{NEEDED_OF_RANKS + 3} recorded steps"
    assert report.ranks is not None
    prompt, late = report.ranks.rows
    assert (prompt.rank, late.rank, report.ranks.straggler) == (0, 1, 1)
    assert prompt.waited_ms > 100
    assert late.own_ms > 199 > prompt.own_ms
    assert prompt.wall_ms == pytest.approx(late.wall_ms, rel=0.3)
    assert report.summary.wall_ms == pytest.approx(prompt.wall_ms, rel=0.5)
    assert any(item.title == "Make rank 1 (cpu) as fast as the others" for item in report.advice)
    assert any("of exposed communication, including waits." in note for note in report.notes)


def test_ranks_that_end_before_they_could_be_compared_say_so(
    launch: Launch, tmp_path: Path, ceilings: Ceilings
) -> None:
    write_script(tmp_path, ceilings, 5)
    (first, _), status, errors = launch(RUN)
    assert status == 0, errors
    report = Report.from_dict(first[2])
    assert report.ranks is None
    for rank in range(2):
        (note,) = [note for note in report.notes if note.startswith(f"Rank {rank} of 2 is not in the report")]
        assert "its script ended after 5 steps" in note


def test_a_rank_of_a_script_that_raises_is_named_by_the_first(
    launch: Launch, tmp_path: Path, ceilings: Ceilings
) -> None:
    write_script(tmp_path, ceilings, NEEDED_OF_RANKS, wrong=4)
    (first, second), _, errors = launch(RUN)
    assert second[0] == 1, errors
    assert "raised KeyError: 'no such voxel'" in second[1]
    assert first[0] == 1
    assert "Rank 1 of 2 is not in the report" in first[1]
    assert "no such voxel" in first[1]
    assert max(first[3], second[3]) < 200


def test_a_rank_of_a_script_that_is_killed_is_named_and_nothing_hangs(
    launch: Launch, tmp_path: Path, ceilings: Ceilings
) -> None:
    kill = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)"
    write_script(tmp_path, ceilings, NEEDED_OF_RANKS + 1, end=kill)
    (first, second), _, errors = launch(RUN.replace("seconds=10", "seconds=1"))
    assert second is None
    assert first[0] == 0, errors
    report = Report.from_dict(first[2])
    assert report.ranks is not None
    assert [row.rank for row in report.ranks.rows] == [0]
    assert any(note.startswith("Rank 1 of 2 is not in the report: it ended") for note in report.notes)
    assert first[3] < 200


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_between_gpus_the_rank_with_more_work_is_the_straggler(launch: Launch) -> None:
    found, status, errors = launch("""
        class Heavy(Net):
            def forward(self, x):
                busy = self.heavy = torch.ones(4096, 4096, device=x.device)
                for _ in range(20 * rank):
                    busy = busy @ self.heavy / 4096
                return super().forward(x)

        with process_group(torch.device("cuda")) as device:
            model = distributed(Heavy(0.0).to(device), device)
            program = SharedProgram(model, (x.to(device),), {}, train=True)
            program.lead(lambda: [program.step() for _ in range(4)])
            write(measure_ranks(program, device).to_dict())
    """)
    assert status == 0, errors
    ranks = Ranks.from_dict(found[0])
    assert found[0] == found[1]
    assert [row.device for row in ranks.rows] == ["cuda:0", "cuda:1"]
    assert ranks.straggler == 1
    assert ranks.rows[0].exposed_ms > ranks.rows[1].exposed_ms > 0
    assert ranks.rows[1].busy_ms > ranks.rows[1].communication_ms


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_between_gpus_a_rank_that_raises_is_named_though_it_lives_on(launch: Launch) -> None:
    found, _, errors = launch("""
        with process_group(torch.device("cuda")) as device:
            model = distributed(Net(0.0, wrong=rank == 1).to(device), device)
            program = Program(model, (x.to(device),), {}, train=True)
            try:
                measure_ranks(program, device)
            except MeasurementError as error:
                write(str(error))
                time.sleep(5 * rank)
                os._exit(0)
    """)
    assert found[0] == found[1], errors
    assert found[0].startswith("rank 1 of 2 failed: DistributedDataParallel raised KeyError")
