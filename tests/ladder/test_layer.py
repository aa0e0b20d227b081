"""The layer ladder, and training with its kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from rooftop.ladder import Ladder, climb, digits
from rooftop.ladder.layer import FILE, CudaOperations
from rooftop.ladder.rungs import CUDA, source
from rooftop.launch import cuda


def test_the_rungs_in_cuda_on_the_cpu(
    cuda_on_cpu: Counter[str], ladder_on_cpu: Callable[[str, int], Ladder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rooftop.ladder.layer.digits", lambda device: ())
    outcomes = [rung for rung in climb(ladder_on_cpu("layer", 70)).rungs if rung.tool == CUDA]
    assert [rung.status for rung in outcomes] == ["checked"] * 3, outcomes
    assert cuda_on_cpu == {"layer_each": 1, "product": 2, "bias_sigmoid": 1}


def test_a_step_in_cuda_is_the_step_of_autograd(
    cuda_on_cpu: Counter[str], ladder_on_cpu: Callable[[str, int], Ladder]
) -> None:
    ladder_on_cpu("layer", 8)
    torch.manual_seed(0)
    x, target = torch.rand(70, 64), torch.randint(10, (70,))
    ours, theirs = digits.initial(x.device), digits.initial(x.device)
    digits.step(CudaOperations(), ours, x, target, rate=2.0)
    digits.step_in_pytorch(theirs, x, target, rate=2.0)
    before = vars(digits.initial(x.device))
    for name, expected in vars(theirs).items():
        torch.testing.assert_close(vars(ours)[name], expected, rtol=1e-5, atol=1e-6)
        assert not torch.equal(expected, before[name])
    assert cuda_on_cpu == {"product": 5, "output_gradient": 1, "bias_step": 2}


def test_the_network_learns() -> None:
    pytest.importorskip("sklearn")
    x, target = digits.images(torch.device("cpu"))
    parameters = digits.train(None, x[: digits.TRAINING], target[: digits.TRAINING], epochs=8)
    assert digits.accuracy(parameters, x[digits.TRAINING :], target[digits.TRAINING :]) > 0.9
    assert digits.accuracy(digits.initial(x.device), x, target) < 0.3


def test_without_scikit_learn_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    (said,) = digits.train_and_compare({}, torch.device("cpu"))
    assert 'pip install "rooftop[ladder]"' in said


@pytest.mark.parametrize("name", ["product<2>", "product<3>", "output_gradient", "bias_step"])
def test_what_only_training_launches_compiles(name: str) -> None:
    pytest.importorskip("cuda.core")
    assert cuda.compile(source(FILE), name, arch="sm_90").binary.spill_bytes == 0
