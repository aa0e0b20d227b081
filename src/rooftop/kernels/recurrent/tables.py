"""Launch parameters of the kernels of the gates of a ConvLSTM."""

from __future__ import annotations

from rooftop.kernels.operands.launch_data import ElementsConfig

# A thread has 4 elements of up to 9 tensors forward, and of up to 11 backward, which its registers hold without
# spills. `benchmarks/tuning/conv_lstms.py` tries others; there are no figures of a whole run yet.
FORWARD = ElementsConfig(elements=512, warps=4, measured=False)
BACKWARD = ElementsConfig(elements=512, warps=4, measured=False)
