"""`rooftop.recording` watches a loop without changing its results, and reports if it has seen too little."""

from __future__ import annotations

import gc
import json
import re
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

import rooftop
from rooftop.analysis import Recording, instruments, recordings, stages
from rooftop.analysis.recordings import NEEDED
from rooftop.analysis.report import Report
from rooftop.errors import InputError
from rooftop.hardware.ceilings import Ceilings


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.ReLU(), nn.Linear(16, 4))


def train(steps: int, recorded: Recording | None = None) -> tuple[list[float], dict[str, Tensor], Tensor]:
    """Losses, weights and the random state after a loop, with or without a recording."""
    torch.manual_seed(0)
    net = small_net()
    optimizer = torch.optim.AdamW(net.parameters())
    losses = []
    for _ in range(steps):
        loss = net(torch.randn(6, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if recorded is not None:
            recorded.step()
    return losses, net.state_dict(), torch.get_rng_state()


class Labelling(instruments._HostClock):
    """An instrument that also labels each operator, as on a GPU, where the end of a label is an operator too."""

    def __enter__(self) -> None:
        self._label = record_function("an operator")
        self._label.__enter__()
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._label.__exit__(*error)


@pytest.mark.parametrize("find_steps", [False, True])
def test_steps_end_where_they_do_without_labels(
    find_steps: bool, ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instruments, "_HostClock", Labelling)
    with rooftop.recording(ceilings=ceilings, find_steps=find_steps) as recorded:
        train(NEEDED + 10, None if find_steps else recorded)
    assert recorded.report.mode == f"{NEEDED + 10} recorded steps"
    assert recorded.report.modules.find("(optimizer)").calls == 1


@pytest.mark.parametrize("steps", [1, NEEDED - 1, NEEDED, NEEDED + 30])
def test_nothing_of_a_loop_changes(steps: int, ceilings: Ceilings) -> None:
    losses, weights, random_state = train(steps)
    with rooftop.recording(ceilings=ceilings) as recorded:
        again, same_weights, same_state = train(steps, recorded)
    assert again == losses
    assert all(torch.equal(value, weights[name]) for name, value in same_weights.items())
    assert torch.equal(same_state, random_state)
    assert recorded.steps == steps
    recorded.report.table()
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_before_the_timed_steps_where_the_program_collects(
    collects: bool, ceilings: Ceilings
) -> None:
    """The recording's own objects must not trigger a full garbage collection in one of the steps."""
    whole: list[str] = []

    def seen(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            whole.append(recorded._stage.name)

    if not collects:
        gc.disable()
    try:
        with rooftop.recording(device="cpu", ceilings=ceilings) as recorded:
            gc.callbacks.append(seen)
            train(NEEDED + 20, recorded)
    finally:
        gc.callbacks.remove(seen)
        gc.enable()
    assert ("settling" in whole) == collects
    assert "timed" not in whole


@pytest.mark.parametrize("training", [True, False])
def test_so_many_steps_are_enough_as_a_report_of_fewer_says(training: bool, ceilings: Ceilings) -> None:
    """If each call is a step, the first two steps are watched together, so one more step is needed."""

    def report_of(steps: int) -> Report:
        net, x = small_net(), torch.randn(6, 8)
        with rooftop.recording(ceilings=ceilings, find_steps=True) as recorded, torch.set_grad_enabled(training):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(steps):
                loss = net(x).sum()
                if training:
                    loss.backward()
                    optimizer.step()
        return recorded.report

    (said,) = [note for note in report_of(4).notes if "There were only" in note]
    needed = int(said.partition("With ")[2].split()[0])
    assert report_of(needed).mode == f"{needed} recorded steps"
    assert report_of(needed - 1).mode == "recorded"


class Seeing(TorchDispatchMode):
    """A mode that keeps the names of all operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def allocated_by_rooftop() -> int:
    """Bytes that Rooftop's code has allocated since tracemalloc started and has not freed."""
    gc.collect()
    of_rooftop = tracemalloc.Filter(True, str(Path(rooftop.__file__).parent / "*"))
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([of_rooftop]).traces)


@pytest.mark.parametrize("find_steps", [False, True])
def test_nothing_is_kept_of_the_steps_after_the_timed_ones(
    find_steps: bool, ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training may take weeks and start new threads at each step."""
    monkeypatch.setattr(recordings, "TIMED_STEPS", 5)
    net, x = small_net(), torch.randn(6, 8)
    optimizer = torch.optim.AdamW(net.parameters())
    kept = []
    import_module("torch._inductor.compile_fx")  # which takes 15 s while memory is traced
    tracemalloc.start()
    with rooftop.recording(ceilings=ceilings, find_steps=find_steps) as recorded:
        for number in range(NEEDED + 160):
            thread = threading.Thread(target=net, args=(x,), name=f"evaluation {number}")
            thread.start()
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            thread.join()
            if not find_steps:
                recorded.step()
            if number in (NEEDED + 60, NEEDED + 159):
                kept.append(allocated_by_rooftop())
    tracemalloc.stop()
    assert recorded.steps == NEEDED + 160
    assert kept[1] <= kept[0] + 1000  # bytes; each of these steps once left about 100
    assert recorded.report.mode == f"{NEEDED + 160} recorded steps"


def test_a_recording_that_another_thread_closes_has_the_report_of_the_stages_before(ceilings: Ceilings) -> None:
    """A watchdog ends a hanging program during the timed steps."""
    with rooftop.recording(ceilings=ceilings) as recorded:
        train(NEEDED + 5, recorded)
        closing = threading.Thread(target=recorded.close)
        closing.start()
        closing.join()
        train(3)
    assert recorded.report.mode == f"{NEEDED + 5} recorded steps"
    assert recorded.report.modules.find("0").calls == 1


def late(
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    ceilings: Ceilings,
    slower_s: float = 0.0,
    took_ms: list[float] | None = None,
) -> Recording:
    """A recording whose profiler stays attached, as with NCCL: each later step takes `slower_s` longer.

    Args:
        took_ms: filled with the time of each step.
    """
    monkeypatch.setattr(Recording, "_profiler_stays", True)
    net, x = small_net(), torch.randn(6, 8)
    optimizer = torch.optim.SGD(net.parameters())
    with rooftop.recording(ceilings=ceilings, find_steps=True) as recorded:
        for step in range(steps):
            began = time.perf_counter()
            time.sleep(0.004 + (slower_s if step > 9 else 0.0))
            net(x).square().mean().backward()
            optimizer.step()
            if took_ms is not None:
                took_ms.append(1e3 * (time.perf_counter() - began))
    return recorded


def test_beside_a_profiler_that_stays_the_steps_before_it_are_the_wall_time(
    monkeypatch: pytest.MonkeyPatch, ceilings: Ceilings
) -> None:
    took_ms: list[float] = []
    slowed = late(monkeypatch, 40, ceilings, slower_s=0.05, took_ms=took_ms).report
    assert slowed.mode == "40 recorded steps"
    assert 4 < slowed.summary.wall_ms < 1.5 * max(took_ms[:10])  # even on a busy machine
    (said,) = [note for note in slowed.notes if "before the profiler began" in note]
    assert "6 steps" in said
    assert slowed.modules.find("0").calls == 1


def test_steps_after_it_are_more_and_count_where_they_are_as_fast(
    monkeypatch: pytest.MonkeyPatch, ceilings: Ceilings
) -> None:
    recorded = late(monkeypatch, 40, ceilings)
    recorded._laps.before_ms = [1.01 * max(recorded._laps.timed_ms)] * 6
    assert not [note for note in recorded.report.notes if "before the profiler" in note]
    assert recorded.report.summary.wall_ms == pytest.approx(fmean(recorded._laps.timed_ms))


def test_a_program_that_ends_before_the_profiler_begins_is_told_how_many_steps_it_needs(
    monkeypatch: pytest.MonkeyPatch, ceilings: Ceilings
) -> None:
    with pytest.raises(InputError, match=r"ended after 5 steps.* run \d+ steps or more") as told:
        _ = late(monkeypatch, 5, ceilings).report
    least = int(re.findall(r"run (\d+) steps", str(told.value))[0])
    assert late(monkeypatch, least, ceilings).report.mode == f"{least} recorded steps"
    with pytest.raises(InputError, match="run"):
        _ = late(monkeypatch, least - 1, ceilings).report


def test_the_first_training_step_does_not_begin_with_the_evaluation_before_it(ceilings: Ceilings) -> None:
    net, x = small_net(), torch.randn(6, 8)
    optimizer = torch.optim.SGD(net.parameters())
    with rooftop.recording(ceilings=ceilings, find_steps=True) as recorded:
        for _ in range(20):  # an evaluation that forgets to disable gradients
            net(x)
            time.sleep(0.1)
        for _ in range(NEEDED):
            net(x).square().mean().backward()
            optimizer.step()
    assert recorded.steps == NEEDED
    assert recorded._laps.laps[0].ms < 20 * 100


def test_little_is_kept_of_kinds_of_steps_that_take_the_lead_in_turn(ceilings: Ceilings) -> None:
    first, last = (torch.optim.SGD(small_net().parameters()) for _ in range(2))
    with rooftop.recording(ceilings=ceilings, find_steps=True) as recorded:
        for _ in range(8):
            for _ in range(4):
                for optimizer in (first, first, last):
                    optimizer.step()
            first, last = last, first
    assert len(recorded._earlier) <= recordings.MOST_EARLIER


def test_a_mode_of_the_program_sees_the_program_alone(ceilings: Ceilings) -> None:
    """The program's mode does not see our labels for the profiler, which are operators."""

    def seen(recorded: Recording | None) -> list[str]:
        with Seeing() as mode:
            train(NEEDED + 2, recorded)
        return mode.names

    alone = seen(None)
    with rooftop.recording(ceilings=ceilings) as recorded:
        assert seen(recorded) == alone


def test_what_is_on_the_meta_device_costs_nothing(ceilings: Ceilings) -> None:
    """A model may be built on the meta device before it has memory."""
    with rooftop.recording(ceilings=ceilings) as recorded:
        nn.Linear(4096, 4096, device="meta")(torch.ones(512, 4096, device="meta"))
        torch.ones(64, 64) @ torch.ones(64, 64)
    report = recorded.report
    assert report.summary.flops == 2 * 64**3
    assert report.summary.percent_of_roof < 100


def test_a_step_of_a_loop_is_counted_as_one_step_of_analyze(ceilings: Ceilings) -> None:
    """The count does not depend on how many steps follow the labelled ones."""
    with rooftop.recording(ceilings=ceilings) as recorded:
        train(NEEDED + 30, recorded)
    report = recorded.report
    net = small_net()
    optimizer = torch.optim.AdamW(net.parameters())
    alone = rooftop.analyze(
        net, torch.randn(6, 8), train=True, optimizer=optimizer, loss=lambda y: y.square().mean(), ceilings=ceilings
    )
    assert {row.phase for row in report.ops} == {"forward", "backward", "optimizer"}
    for path in ("0", "1", "4", "(optimizer)"):
        ours, theirs = report.modules.find(path), alone.modules.find(path)
        assert (ours.type, ours.calls, ours.parameters) == (theirs.type, theirs.calls, theirs.parameters)
        assert (ours.flops, ours.bytes) == (theirs.flops, theirs.bytes)
        assert ours.fused_roof_ms == pytest.approx(theirs.fused_roof_ms)
    assert (report.modules.type, report.modules.calls) == ("Sequential", 1)
    assert report.mode == f"{NEEDED + 30} recorded steps"
    assert report.summary.repeats == stages.LABELLED
    assert not any("There were only" in note for note in report.notes)


def test_too_few_steps_are_a_report_of_those_that_there_were(ceilings: Ceilings) -> None:
    """The wall time is that of the last, unwatched steps, without the step that is in progress at the end."""
    slow, took_ms = [0.2, 0.02, 0.02, 0.02], []
    with rooftop.recording(ceilings=ceilings) as recorded:
        for seconds in slow:
            began = time.perf_counter()
            time.sleep(seconds)
            train(1, recorded)
            took_ms.append(1e3 * (time.perf_counter() - began))
        time.sleep(0.3)
    report = recorded.report
    (note,) = [note for note in report.notes if "There were only" in note]
    assert "There were only 4 steps" in note
    assert f"With {NEEDED} steps or more" in note
    assert (report.mode, report.summary.repeats) == ("recorded", 1)
    assert 20 < report.summary.wall_ms < 1.5 * max(took_ms[1:])  # even on a busy machine
    assert report.modules.find("4").calls == 1
    assert report.modules.find("(optimizer)").parameters == 0


def test_a_block_without_steps_is_one_step(ceilings: Ceilings) -> None:
    with rooftop.recording(ceilings=ceilings, name="three products") as recorded:
        for _ in range(3):
            torch.mm(torch.ones(4, 5), torch.ones(5, 6))
    report = recorded.report
    assert report.target == "three products"
    assert {row.name: row.calls for row in report.ops if row.flops} == {"aten::mm": 3}
    assert report.summary.flops == 3 * 2 * 4 * 5 * 6
    assert any("The report covers the block" in note for note in report.notes)
    assert recorded.report is report


def test_inference_and_the_names_of_modules(ceilings: Ceilings) -> None:
    net = small_net().eval()
    with rooftop.recording(net[4], ceilings=ceilings) as recorded, torch.inference_mode():
        for _ in range(NEEDED):
            net(torch.ones(2, 8))
            recorded.step()
    assert {row.phase for row in recorded.report.ops} == {"forward"}
    assert recorded.report.modules.find("").type == "Linear"
    assert recorded.report.modules.find("Sequential.0").calls == 1


@pytest.mark.parametrize("at", [0, 2, 3, 5, 7, NEEDED])
def test_exceptions_pass_through_and_leave_nothing_behind(at: int, ceilings: Ceilings) -> None:
    """An exception is raised in each stage: watched as a whole, warming up, plain, labelled, settling, timed."""
    net, recorded = small_net(), rooftop.recording(ceilings=ceilings)

    def loop() -> None:
        with recorded:
            for step in range(NEEDED + 1):
                net(torch.ones(2, 8))
                if step == at:
                    raise KeyError("mine")
                recorded.step()

    with pytest.raises(KeyError, match="mine"):
        loop()
    with pytest.raises(RuntimeError, match="ended with an exception"):
        _ = recorded.report
    assert not _has_any_global_hook()
    assert torch._C._len_torch_dispatch_stack() == 0


def test_hooks_are_there_only_while_operators_are_labelled(ceilings: Ceilings) -> None:
    hooked = []
    with rooftop.recording(ceilings=ceilings) as recorded:
        for _ in range(NEEDED + 2):
            torch.ones(3).relu()
            hooked.append(bool(_has_any_global_hook()))
            recorded.step()
    first_labelled = stages.WARM_UP + 1
    expected = [0, *range(first_labelled, first_labelled + stages.LABELLED)]
    assert [step for step, there in enumerate(hooked) if there] == expected
    rooftop.analyze(nn.ReLU(), torch.ones(3), ceilings=ceilings)
    assert not _has_any_global_hook()


def test_what_the_program_compiles_is_compiled(ceilings: Ceilings) -> None:
    """PyTorch never compiles code that it has once met under labels, not even after the recording."""
    net = torch.compile(nn.Linear(8, 4))
    with rooftop.recording(ceilings=ceilings) as recorded, torch.no_grad():
        for _ in range(NEEDED + 3):
            net(torch.randn(6, 8))
            recorded.step()
    compilation = recorded.report.compilation
    assert compilation is not None
    assert (compilation.graphs, compilation.graph_breaks, compilation.recompilations) == (1, (), ())
    assert recorded.report.mode == f"{NEEDED + 3} recorded steps"


@pytest.mark.parametrize("first", [0, 2, 4, 6])
def test_inference_mode_may_begin_and_end_in_any_stage(first: int, ceilings: Ceilings) -> None:
    @torch.inference_mode()
    def validate(steps: int) -> None:
        for _ in range(steps):
            torch.ones(3).relu()
            recorded.step()

    with rooftop.recording(ceilings=ceilings) as recorded:
        for _ in range(first):
            torch.ones(3).relu()
            recorded.step()
        validate(2)
        for _ in range(NEEDED):
            torch.ones(3).relu()
            recorded.step()
    assert torch.ones(3).relu().sum() == 3
    assert {row.name: row.calls for row in recorded.report.ops if row.flops} == {"aten::relu": 1}


def test_every_step_of_the_first_optimizer_can_end_a_step(ceilings: Ceilings) -> None:
    first, second = (torch.optim.SGD(nn.Linear(2, 2).parameters()) for _ in range(2))
    with rooftop.recording(ceilings=ceilings, find_steps=True) as recorded:
        for _ in range(NEEDED):
            torch.ones(3).relu()
            first.step()
            second.step()
    assert recorded.steps == NEEDED
    assert recorded.report.mode == f"{NEEDED} recorded steps"


class Slow(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4 * (NEEDED + 2)

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.008)  # much longer than other work of the machine may disturb a step
        return torch.ones(8)


def test_waiting_for_data_is_noticed(ceilings: Ceilings) -> None:
    net = small_net()
    with rooftop.recording(ceilings=ceilings) as recorded:
        for batch in DataLoader(Slow(), batch_size=4):
            net(batch).sum().backward()
            recorded.step()
    (advice,) = [item for item in recorded.report.advice if item.title == "Load data in parallel with the step"]
    assert advice.gain_ms >= 4 * 8  # four samples of 8 ms
    assert advice.gain_ms <= recorded.report.summary.wall_ms


def test_a_trace_of_one_step(ceilings: Ceilings, tmp_path: Path) -> None:
    with rooftop.recording(ceilings=ceilings, trace=tmp_path / "trace.json") as recorded:
        train(NEEDED, recorded)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "Optimizer.step#AdamW.step" for event in events) == 1


def test_wrong_use(ceilings: Ceilings) -> None:
    recorded = rooftop.recording(ceilings=ceilings)
    with pytest.raises(RuntimeError, match="belongs inside the block"):
        recorded.step()
    with pytest.raises(RuntimeError, match="has not ended"):
        _ = recorded.report
    with recorded:
        pass
    with pytest.raises(InputError, match="no operator of PyTorch ran"):
        _ = recorded.report
    with pytest.raises(RuntimeError, match="belongs inside the block"):
        recorded.step()
    with pytest.raises(RuntimeError, match="records only one block"), recorded:
        pass
    for device in ("mps", "tpu", f"cuda:{torch.cuda.device_count()}"):
        with pytest.raises(ValueError, match=rf"recording\(device='{device}'\)"):
            rooftop.recording(device=device)


def test_wrong_arguments(ceilings: Ceilings, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"recording\(ceilings='h200'\): expected Ceilings"):
        rooftop.recording(ceilings="h200")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"recording\(module=3\): expected a module"):
        rooftop.recording(3, ceilings=ceilings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"trace=.*: expected the path of a file in an existing"):
        rooftop.recording(ceilings=ceilings, trace=tmp_path / "missing" / "trace.json")


def test_steps_of_another_thread_are_refused_and_its_optimizers_end_none(ceilings: Ceilings) -> None:
    with rooftop.recording(ceilings=ceilings, find_steps=True) as recorded, ThreadPoolExecutor(1) as pool:
        with pytest.raises(RuntimeError, match="the thread that opened the recording"):
            pool.submit(recorded.step).result()
        weight = nn.Parameter(torch.ones(3))
        weight.sum().backward()
        pool.submit(torch.optim.SGD([weight], lr=0.1).step).result()
    assert recorded.steps == 1  # the backward pass, which ran in this thread
    assert torch._C._len_torch_dispatch_stack() == 0


def test_recordings_end_in_the_opposite_order_of_their_beginning(ceilings: Ceilings) -> None:
    patched = torch.inference_mode.__exit__
    with rooftop.recording(ceilings=ceilings, find_steps=True) as outer:
        with rooftop.recording(ceilings=ceilings) as inner:
            with pytest.raises(RuntimeError, match="another recording is open inside it"):
                outer.step()
            train(NEEDED, inner)
        train(NEEDED)
    assert (outer.steps, inner.steps) == (NEEDED, NEEDED)
    assert torch.inference_mode.__exit__ is patched
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.mark.gpu
def test_waits_are_named_with_their_line() -> None:
    net = nn.Linear(64, 64, device="cuda")
    x = torch.randn(8, 64, device="cuda")
    with rooftop.recording() as recorded:
        for _ in range(NEEDED):
            value = net(x).sum()
            value.item()
            net(x).cpu()
            recorded.step()
    (advice,) = [item for item in recorded.report.advice if "Do not wait" in item.title]
    # pytest's mark is in the line above the name
    line = test_waits_are_named_with_their_line.__code__.co_firstlineno + 7
    assert f".item() at {__file__}:{line}" in advice.evidence
    assert f"{__file__}:{line + 1}" in advice.evidence
