"""`replace(model, inputs=...)` swaps the modules that make the whole model faster, and leaves the others unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftop.nn
from rooftop.hardware.timing import Timing, is_sure
from rooftop.nn import measuring, replace


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(8)
        self.norm = nn.LayerNorm(8)
        self.rms = nn.RMSNorm(8)
        self.again = nn.RMSNorm(8)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.again(self.rms(self.norm(self.batch(x)))) * scale  # type: ignore[no-any-return]


@pytest.fixture
def slowed(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[nn.Module]], None]:
    """Lets modules of a class take a millisecond, measured by a clock that nothing else advances."""
    clock = [0.0]

    def compared(steps: dict[str, Callable[[], object]], **_: Any) -> dict[str, Timing]:
        found = {}
        for name, step in steps.items():
            before = clock[0]
            step()
            ms = 0.1 + clock[0] - before
            found[name] = Timing(ms, ms, 0.0, 5)
        return found

    def slow(kind: type[nn.Module]) -> None:
        forward: Callable[..., Any] = kind.forward

        def slowly(self: nn.Module, *args: Any) -> Any:
            clock[0] += 1.0
            return forward(self, *args)

        monkeypatch.setattr(kind, "forward", slowly)

    monkeypatch.setattr(measuring, "compare", compared)
    return slow


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("inputs", [(torch.randn(5, 8),), torch.randn(5, 8), {"x": torch.randn(5, 8), "scale": 2.0}])
def test_what_pays_is_swapped_and_the_rest_left_with_its_times(
    train: bool, inputs: Any, slowed: Callable[[type[nn.Module]], None]
) -> None:
    slowed(nn.RMSNorm)  # PyTorch's module is slowed, so replacing it pays
    slowed(rooftop.nn.LayerNorm)  # our module is slowed, so replacing does not pay
    model = Model().train(train)
    before = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    state = torch.get_rng_state()
    done = replace(model, inputs=inputs)
    assert done.swapped == {"rms": "RMSNorm", "again": "RMSNorm"}
    assert list(done.left) == ["norm"]
    assert done.left["norm"].startswith("it is not faster:")
    assert done.measured["RMSNorm"].after_ms < done.measured["RMSNorm"].before_ms
    assert done.measured["LayerNorm"].after_ms > done.measured["LayerNorm"].before_ms
    assert "RMSNorm: " in str(done)
    assert type(model.norm) is nn.LayerNorm
    assert type(model.rms) is rooftop.nn.RMSNorm
    after = [*model.parameters(), *model.buffers()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_only_is_heeded_and_nothing_to_replace_is_no_error(slowed: Callable[[type[nn.Module]], None]) -> None:
    slowed(nn.RMSNorm)
    model = Model().eval()
    assert replace(model, only=["Softmax"], inputs=torch.randn(2, 8)).measured == {}
    done = replace(model, only=["RMSNorm"], inputs=torch.randn(2, 8))
    assert list(done.measured) == ["RMSNorm"]
    assert done.left == {}


def test_what_the_model_raises_leaves_it_as_it_was() -> None:
    model = Model()
    with pytest.raises(RuntimeError):
        replace(model, inputs=torch.randn(2, 9))
    assert type(model.norm) is nn.LayerNorm
    model.odd = (each for each in ())
    with pytest.raises(TypeError, match="replace: Model cannot be copied"):
        replace(model, inputs=torch.randn(2, 8))


def test_what_is_more_than_noise() -> None:
    assert not is_sure([0.5, 0.5]), "two rounds decide nothing"
    assert is_sure([0.1, 0.11, 0.09])
    assert not is_sure([0.1, 0.11, -0.01])
    assert is_sure([0.1, 0.11, 0.09, 0.1, 0.1, -0.01])
    assert not is_sure([0.01, 0.3, 0.02, 0.29, 0.01, 0.02])
    mixed = [0.05 + 0.01 * (i % 3) for i in range(18)] + [-0.01] * 6
    assert is_sure(mixed), "6 of 24 rounds lose by chance with a probability of 1%"
    assert not is_sure(mixed[6:]), "6 of 18 rounds lose by chance more often"
