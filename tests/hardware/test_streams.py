"""Work on a second stream is ordered and its memory is kept. Without CUDA the same code runs without streams."""

from __future__ import annotations

import pytest
import torch

from rooftop.debugging.stream_races import check_streams
from rooftop.hardware.streams import join, on_stream, side_stream


def test_without_cuda_the_code_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    x = torch.ones(3)
    side = side_stream()
    with on_stream(side, {"x": [x]}):
        y = x * 2
    join(side, y)
    assert side is None
    assert y.tolist() == [2.0, 2.0, 2.0]


def test_each_side_waits_for_the_other_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def __init__(self, name: str) -> None:
            self.name, self.device = name, None

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name} waits for {other.name}")

        def __enter__(self) -> None:
            log.append(f"{self.name} begins")

        def __exit__(self, *error: object) -> None:
            log.append(f"{self.name} ends")

    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    side = Stream("side")
    with on_stream(side):  # type: ignore[arg-type]
        log.append("work")
    join(side)  # type: ignore[arg-type]
    assert log == ["side waits for current", "side begins", "work", "side ends", "current waits for side"]


@pytest.mark.gpu
def test_on_a_gpu_the_helpers_leave_no_race() -> None:
    side = side_stream()
    with check_streams() as check:
        x = torch.empty(1 << 22, device="cuda").normal_()
        with on_stream(side, x):
            assert torch.cuda.current_stream() == side
            y = x * 2
        z = x + 1
        del x
        w = torch.zeros(1 << 22, device="cuda")
        join(side, y)
        total = (y - 2 * (z - 1)).abs().max() + w.max()
    assert check.races == []
    assert total.item() < 1e-5
