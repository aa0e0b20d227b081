"""Launch kernels, declare operators, and repeat earlier calls without deciding again how to launch them."""

from rooftop.launch.triton_launch import INTERPRETED, count_launches, launch

__all__ = ["INTERPRETED", "count_launches", "launch"]
