"""Launch parameters of the kernels of ConvLSTM gates."""

from __future__ import annotations

from rooftop.kernels.operands.launch_data import ElementsConfig

# A thread computes 4 elements of up to 9 tensors in forward and up to 11 in backward, which fit in registers without
# spills. The parameters in this file are not measured yet; `benchmarks/tuning/conv_lstms.py` compares them with other
# parameters.
FORWARD = ElementsConfig(elements=512, warps=4, measured=False)
BACKWARD = ElementsConfig(elements=512, warps=4, measured=False)
