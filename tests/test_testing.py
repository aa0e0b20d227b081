"""Results as accurate as PyTorch's pass the numerics gate, and worse results fail."""

from __future__ import annotations

import pytest
import torch

from rooftop.testing import assert_as_accurate


def sums(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.rand(64, 512).to(dtype)
    exact = x.double().sum(1)
    return x, exact.to(dtype), exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_correctly_rounded_result_passes(dtype: torch.dtype) -> None:
    _, rounded, exact = sums(dtype)
    assert_as_accurate(rounded, rounded, exact)


def test_accumulating_in_bfloat16_fails() -> None:
    x, eager, exact = sums(torch.bfloat16)
    sloppy = torch.zeros(64, dtype=torch.bfloat16)
    for column in x.unbind(1):
        sloppy += column
    with pytest.raises(AssertionError, match="allowed"):
        assert_as_accurate(sloppy, eager, exact, what="row sums")


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 0.0, 1e30])
def test_one_wrong_element_fails(poison: float) -> None:
    _, eager, exact = sums(torch.float32)
    wrong = eager.clone()
    wrong[17] = poison
    with pytest.raises(AssertionError, match="row sums"):
        assert_as_accurate(wrong, eager, exact, what="row sums")


def test_a_small_bias_on_every_element_fails() -> None:
    """Each element is within eager's largest error, but all are wrong, which the mean shows."""
    exact = torch.linspace(1, 2, 1000, dtype=torch.float64)
    eager = exact.float()
    eager[0] += 1e-3
    with pytest.raises(AssertionError, match="root mean square"):
        assert_as_accurate(exact.float() + 1e-3, eager, exact)


def test_special_values_must_be_where_they_belong() -> None:
    exact = torch.tensor([1.0, float("nan"), float("inf")], dtype=torch.float64)
    assert_as_accurate(exact.float(), exact.float(), exact)
    for wrong in ([1.0, 2.0, float("inf")], [1.0, float("nan"), float("-inf")]):
        with pytest.raises(AssertionError, match=r"should be|infinities"):
            assert_as_accurate(torch.tensor(wrong), exact.float(), exact)


def test_shapes_dtypes_and_the_reference_are_checked() -> None:
    exact = torch.ones(3, dtype=torch.float64)
    with pytest.raises(AssertionError, match=r"expected \(3,\)"):
        assert_as_accurate(torch.ones(1), torch.ones(3), exact)
    with pytest.raises(AssertionError, match=r"torch\.float16"):
        assert_as_accurate(torch.ones(3).half(), torch.ones(3), exact)
    with pytest.raises(AssertionError, match="must be float64"):
        assert_as_accurate(torch.ones(3), torch.ones(3), torch.ones(3))
    assert_as_accurate(torch.ones(0), torch.ones(0), torch.ones(0, dtype=torch.float64))
