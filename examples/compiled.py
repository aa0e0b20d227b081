"""What `torch.compile` does to a model, kernel by kernel, and whether it was worth it.

    python examples/compiled.py [--batch 256] [--features 512] [--whole]

The script analyzes the same network twice, uncompiled and compiled, and compares the two reports. Compiling closes two
gaps: operators between matrix products are fused into one kernel each (fusion headroom), and there are fewer launches
(launch gap). Matrix products stay unchanged.

Between its layers the network reads a value (`.item()`), which the compiler cannot keep in a graph (a graph break). The
report of the compiled model names that line, the reason, and the time to compile the rest. On a GPU such a read also
makes the host wait. With `--whole` the network reads no value, and compiles into one graph.

Compiling needs a C++ compiler for the CPU, and Triton for a GPU; `rooftop doctor` says whether they are installed.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import rooftop
from rooftop.analysis.comparison import compare_reports


class Network(nn.Module):
    """Two layers with much elementwise work between them."""

    def __init__(self, features: int, whole: bool) -> None:
        super().__init__()
        self.first = nn.Linear(features, features)
        self.norm = nn.LayerNorm(features)
        self.second = nn.Linear(features, features)
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:  # (B, features)
        hidden = torch.sigmoid(self.first(x)) * torch.tanh(x) + 0.5 * x.square()
        if not self.whole and hidden.abs().max().item() > 100:
            hidden = hidden.clamp(-100, 100)
        result: Tensor = self.second(self.norm(hidden))
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--whole", action="store_true", help="do not read a value between the layers")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = Network(options.features, options.whole).to(device)
    x = torch.randn(options.batch, options.features, device=device)

    eager = rooftop.analyze(network, x, name="eager")
    compiled = rooftop.analyze(network, x, name="compiled", compile=True)
    print(compiled.table())
    comparison = compare_reports(eager, compiled)
    before, after = eager.gaps, compiled.gaps
    print(f"wall time      {eager.summary.wall_ms:.3f} -> {compiled.summary.wall_ms:.3f} ms")
    print(f"op roof        {eager.summary.op_roof_ms:.3f} -> {compiled.summary.op_roof_ms:.3f} ms")
    print(f"kernel gap     {before.kernel_gap_ms:.3f} -> {after.kernel_gap_ms:.3f} ms")
    print(f"launch gap     {before.launch_gap_ms:.3f} -> {after.launch_gap_ms:.3f} ms")
    print(f"launches       {eager.summary.kernels} -> {compiled.summary.kernels}")
    if comparison.significant:
        print(f"the compiled network takes {1 / comparison.speedup:.0%} of the time")
    else:
        print(f"no change beyond the noise of {comparison.noise:.0%}")


if __name__ == "__main__":
    main()
