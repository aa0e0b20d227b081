"""Launch kernels, declare operators, and repeat known calls."""

from rooftop.launch.triton_launch import INTERPRETED, count_launches, launch

__all__ = ["INTERPRETED", "count_launches", "launch"]
