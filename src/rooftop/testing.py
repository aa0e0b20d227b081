"""The numerics gate that every operator passes.

Against a float64 reference, an operator's error may be at most twice PyTorch's error in the same dtype, plus one
rounding of the output. The limit applies to the worst element and to the root mean square. So neither one bad element
nor a small bias over all elements passes. The file also has `no_waiting_for_gpu`, which finds GPU synchronizations in
tests.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def assert_as_accurate(actual: Tensor, eager: Tensor, exact: Tensor, *, what: str = "result") -> None:
    """Assert that `actual` is as accurate as `eager` PyTorch, both compared with `exact`.

    Args:
        actual: the result to test.
        eager: PyTorch's result in the same dtype (TF32 and reduced-precision reductions off).
        exact: the exact result, in float64.
        what: name of the result in the message.

    Raises:
        AssertionError: the shapes or dtypes differ, `exact` is not float64, `actual` does not have NaN exactly where
            `exact` has NaN, `actual` lacks an infinity of `exact`, or the error is above the limit. Only elements where
            `exact` and `eager` are finite count for the error. The message has the worst element or the root mean
            square error, and the allowed error.
    """
    if actual.shape != eager.shape or actual.dtype != eager.dtype or exact.shape != eager.shape:
        raise AssertionError(
            f"{what}: expected {tuple(eager.shape)} {eager.dtype}, got {tuple(actual.shape)} {actual.dtype} "
            f"(reference {tuple(exact.shape)})"
        )
    if exact.dtype != torch.float64:
        raise AssertionError(f"{what}: the reference must be float64, got {exact.dtype}")
    if actual.numel() == 0:
        return
    device = actual.device if actual.is_cuda else torch.device("cpu")  # some devices other than CUDA have no float64
    got, plain, truth = (t.detach().to(device).double() for t in (actual, eager, exact))
    _assert_same_specials(got, truth, what)
    finite = truth.isfinite() & plain.isfinite()
    got, plain, truth = got[finite], plain[finite], truth[finite]
    if got.numel() == 0:
        return
    limits = torch.finfo(actual.dtype)
    rounding = limits.eps * truth.abs() + limits.tiny
    error, allowed = (got - truth).abs(), 2 * (plain - truth).abs().max() + rounding
    if bool((error > allowed).any()):
        worst = int((error - allowed).argmax())
        raise AssertionError(
            f"{what}: element {worst} of the finite elements is {got[worst]:.9g}, exact {truth[worst]:.9g}, eager "
            f"{plain[worst]:.9g}: error {error[worst]:.3g}, allowed {allowed[worst]:.3g} "
            f"({int((error > allowed).sum())} of {error.numel()} finite elements exceed their limit)"
        )
    mean, mean_allowed = _rms(error), 2 * _rms(plain - truth) + _rms(rounding)
    if mean > mean_allowed:
        raise AssertionError(f"{what}: root mean square error {mean:.3g}, allowed {mean_allowed:.3g}")


def _assert_same_specials(got: Tensor, truth: Tensor, what: str) -> None:
    """Assert that NaN is exactly where the exact result has NaN, and that the result is the same infinity where the
    exact result is infinite. (A large finite value may overflow to infinity.)"""
    if not torch.equal(got.isnan(), truth.isnan()):
        raise AssertionError(
            f"{what}: {int((got.isnan() & ~truth.isnan()).sum())} elements are NaN but should not be, "
            f"{int((~got.isnan() & truth.isnan()).sum())} should be NaN but are not"
        )
    infinite = truth.isinf()
    if not torch.equal(got[infinite], truth[infinite]):
        raise AssertionError(f"{what}: infinities differ")


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


@contextmanager
def no_waiting_for_gpu() -> Iterator[None]:
    """Let any GPU synchronization that PyTorch detects inside this block raise RuntimeError.

    The setting applies to the whole process, not to one thread.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
