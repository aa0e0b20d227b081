"""Launch parameters of the kernels of ConvLSTM gates."""

from __future__ import annotations

from rooftop.kernels.operands.launch_data import ElementsConfig

# A thread has 4 elements of up to 9 tensors in forward and up to 11 in backward, which fit in its registers without
# spills. These values are not measured yet; `benchmarks/tuning/conv_lstms.py` compares them with others.
FORWARD = ElementsConfig(elements=512, warps=4, measured=False)
BACKWARD = ElementsConfig(elements=512, warps=4, measured=False)
