"""A graph does what the call does without it; a call that waits for the GPU is refused with its line."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rooftop.inference import Engine
from rooftop.rewrites import graphs
from rooftop.rewrites.graphs import UncapturedError, recorded, waits, waits_in_a_capture
from rooftop.rewrites.training_graphs import TrainingReplays


def noted_sync_modes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Note the sync debug modes that are set, as a machine without a GPU cannot set them."""
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return modes


def test_waits_are_told_by_their_lines_and_only_those_of_this_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = noted_sync_modes(monkeypatch)
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *rest: shown.append(str(message)))

    def wait() -> None:
        warnings.warn("called a synchronizing CUDA operation (Triggered internally)", UserWarning, stacklevel=1)

    def call() -> None:
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=1)
        warnings.warn("the model's own", UserWarning, stacklevel=1)

    assert waits(call) == []
    line = wait.__code__.co_firstlineno + 1
    assert waits(wait) == [f"{__file__}:{line}"]
    assert shown == ["the model's own"]
    with pytest.raises(ZeroDivisionError):
        waits(lambda: 1 / 0)
    assert modes == ["warn", 0] * 3


def test_a_call_that_asks_whether_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the waits of a capture count; other threads still learn that they are not captured."""
    noted_sync_modes(monkeypatch)
    asked = lambda: False  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", asked)
    elsewhere: list[bool] = []

    def ask() -> None:
        elsewhere.append(torch.cuda.is_current_stream_capturing())

    def wait() -> None:
        warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)

    def call() -> None:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        if not torch.cuda.is_current_stream_capturing():
            wait()

    def refuses() -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("captured")
        wait()

    line = wait.__code__.co_firstlineno + 1
    found = [f"{__file__}:{line}"]
    assert waits(call) == found
    assert waits_in_a_capture(call, found) == []
    assert elsewhere == [False] * 3
    assert waits_in_a_capture(wait, found) == waits_in_a_capture(refuses, found) == found
    assert torch.cuda.is_current_stream_capturing is asked


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`recorded` on a machine without a GPU: while `record` runs, this thread is on a stream that is being captured.

    `record` returns what the call returns.
    """
    noted_sync_modes(monkeypatch)
    here, active = threading.get_ident(), [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: active[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: threading.get_ident() == here)
    monkeypatch.setattr(graphs, "free_generator", lambda device: None)

    def run(call: Callable[[], Any], compared: bool) -> Any:
        def record() -> Any:
            active[0] = True
            try:
                return call()
            finally:
                active[0] = False

        class Stream:
            device = torch.device("cpu")

            def __eq__(self, other: object) -> bool:
                return other is True

            __hash__ = None  # type: ignore[assignment]

        return recorded(record, call, "outputs", Stream(), compared)  # type: ignore[arg-type]

    return run


def is_captured() -> bool:
    return torch.cuda.is_current_stream_capturing()


def wait() -> None:
    warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)


@pytest.mark.parametrize("compared", [False, True])
def test_a_model_that_does_not_wait_learns_of_no_capture(capture: Callable[..., Any], compared: bool) -> None:
    """Others do: another stream's askers, PyTorch, and Rooftop."""
    from rooftop.train.optimizers.adamw_launches import capturing

    def asked() -> tuple[bool, bool, bool]:
        told: list[bool] = []
        thread = threading.Thread(target=lambda: told.append(is_captured()))
        thread.start()
        thread.join()
        return is_captured(), told[0], capturing(torch.device("cuda"))

    assert capture(asked, compared) == (False, True, True)
    assert is_captured() is False


def test_a_call_that_waits_only_outside_of_captures_learns_of_its_capture(capture: Callable[..., Any]) -> None:
    def call() -> bool:
        if not is_captured():
            wait()
        return is_captured()

    assert capture(call, True) is True
    with pytest.raises(UncapturedError, match="waits for the GPU") as caught:  # its graph would not be compared
        capture(call, False)
    assert caught.value.outputs == "outputs"


@pytest.mark.parametrize("compared", [False, True])
def test_a_capture_that_fails_is_tried_again_with_the_truth_if_the_model_asks(
    capture: Callable[..., Any], compared: bool
) -> None:
    """PyTorch does not detect an explicit synchronization, so it shows in the capture only."""
    runs: list[str] = []
    captures = torch.cuda.is_current_stream_capturing  # its answer is always true

    def careful() -> str:
        runs.append("asks")
        if not is_captured() and captures():
            raise RuntimeError("a synchronization in a capture")
        return "captured"

    def careless() -> None:
        runs.append("does not ask")
        if captures():
            raise RuntimeError("a synchronization in a capture")

    assert capture(careful, compared) == "captured"
    with pytest.raises(UncapturedError, match="a synchronization in a capture"):
        capture(careless, compared)
    assert runs == ["asks"] * 3 + ["does not ask"] * 2


# ---- on a GPU ------------------------------------------------------------------------------------------------------


class AddsMask(nn.Module):
    """It adds a mask that hides nothing, but only in a capture. Results show whether there was a mask."""

    def __init__(self, careful: bool = False) -> None:
        super().__init__()
        self.careful = careful
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            return x * self.weight + 1
        if self.careful:
            torch.cuda.synchronize()
        return x * self.weight


@pytest.mark.gpu
@pytest.mark.parametrize("careful", [False, True])
def test_a_graph_takes_the_path_of_the_model_that_is_not_captured(careful: bool) -> None:
    x = torch.rand(64, device="cuda", dtype=torch.bfloat16)
    engine = Engine(AddsMask(careful).eval().cuda())
    engine(x), engine(x)
    assert torch.equal(engine(x), x + careful)
    assert engine.report.graphs


@pytest.mark.gpu
def test_a_graph_of_a_backward_pass_takes_the_path_that_is_not_captured() -> None:
    """Autograd's threads ask, too: for example, checkpointing runs a part of the model again."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = AddsMask()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False).exp()  # type: ignore[no-any-return]

    x = torch.rand(64, device="cuda")
    model = Checkpointed().cuda()
    replayed = TrainingReplays(model, model, x.device)
    model(x).sum().backward()
    expected, model.inner.weight.grad = model.inner.weight.grad, None
    assert torch.equal(replayed(x), x.exp())
    replayed(x).sum().backward()
    torch.testing.assert_close(model.inner.weight.grad, expected)
