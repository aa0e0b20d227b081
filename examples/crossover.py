"""From which size on is the GPU faster, and does that still hold if the data must first be copied to it?

    python examples/crossover.py [--operations add matmul] [--sizes 1000 1000000]

A launch costs microseconds whatever it computes, so a small operation is faster on the CPU. Larger operations are
faster on the GPU if their operands are already in its memory. If the operands come from the host's memory and the
result goes back, each byte crosses a bus that is slower than either memory. An addition does one flop for twelve bytes,
and may never be worth the trip. A larger matrix product does more work for each byte. The difference between the two
break-even sizes is why models keep their data on the GPU.

The CPU's times at large sizes say as much about memory as about arithmetic: they depend on the number of threads
(`torch.set_num_threads`) and on fresh pages for each result.

The script needs an NVIDIA GPU. `rooftop crossover` does the same, with a chart.
"""

from __future__ import annotations

import argparse

from rooftop.errors import MeasurementError
from rooftop.hardware import BreakEven, measure_crossover
from rooftop.hardware.crossovers import OPERATIONS


def words(found: BreakEven, unit: str) -> str:
    return f"from about {found.size:,.0f} {unit} on" if found.size is not None else found.verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", nargs="+", choices=list(OPERATIONS), default=["add", "matmul"])
    parser.add_argument("--sizes", nargs="+", type=int, help="sizes to measure (default: suited to each operation)")
    options = parser.parse_args()
    for operation in options.operations:
        try:
            found = measure_crossover(operation, sizes=options.sizes)
        except MeasurementError as error:
            raise SystemExit(f"error: {error}") from error
        print(f"{operation}: {found.host}, {found.threads} threads, against {found.device}")
        for point in found.points:
            cpu, gpu, trip = (timing.median_ms for timing in (point.cpu, point.gpu, point.gpu_with_transfers))
            print(f"  {point.size:>12,} {found.unit}: CPU {cpu:.4f} ms, GPU {gpu:.4f} ms, with transfers {trip:.4f} ms")
        print(f"  the GPU is faster: {words(found.break_even, found.unit)}")
        print(f"  with transfers:    {words(found.break_even_with_transfers, found.unit)}")


if __name__ == "__main__":
    main()
