"""Compare the version of PyTorch."""

from __future__ import annotations

import torch


def torch_at_least(major: int, minor: int) -> bool:
    """Whether PyTorch has at least this version. Builds before a release ("2.13.0a0") have the version of the
    release."""
    return [int(number) for number in torch.__version__.split(".")[:2]] >= [major, minor]
