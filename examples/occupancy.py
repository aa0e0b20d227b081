"""Why a kernel fills only part of a GPU's warps, and the smallest change that would fill more.

    python examples/occupancy.py [--threads 256] [--registers 128] [--shared 49152] [--capability 9.0]

A multiprocessor hides the latency of memory by running other warps. The scarcest of four resources limits the number of
warps: warps, blocks, registers, shared memory. Occupancy is the share of the possible warps that are resident.

Registers and shared memory come from the compiler: `nvcc -Xptxas -v`, or for Triton `kernel.n_regs` and
`kernel.metadata.shared` of the object that a launch returns. No GPU is needed, because the script only computes with
the published limits of each compute capability. Higher occupancy is not always faster. A matrix product at 25% with its
tiles in registers may reach the roof, and a copy only needs enough bytes in flight. Measure the effect of a change
before you keep it.
"""

from __future__ import annotations

import argparse

from rooftop.hardware import occupancy
from rooftop.hardware.occupancies import MULTIPROCESSORS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=256, help="threads of a block")
    parser.add_argument("--registers", type=int, default=128, help="registers of a thread")
    parser.add_argument("--shared", type=int, default=48 << 10, help="bytes of shared memory of a block")
    parser.add_argument("--capability", default="9.0", help="compute capability")
    options = parser.parse_args()
    major, _, minor = options.capability.partition(".")
    launch = (options.threads, options.registers, options.shared)
    try:
        found = occupancy(*launch, capability=(int(major), int(minor or 0)))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error

    print(found.advice)
    for resource, blocks in found.limits.items():
        limits = "(limits)" if resource in found.limiters else ""
        print(f"  {resource:14} {'not used' if blocks is None else f'room for {blocks} blocks'} {limits}")
    for change in found.changes():
        print(f"  {change}")
    print("\nthe same launch elsewhere:")
    for capability, multiprocessor in MULTIPROCESSORS.items():
        name = ".".join(map(str, capability))
        if options.shared > multiprocessor.max_shared_bytes_per_block:
            print(f"  {name:5} cannot launch: more shared memory than a block can have there")
        else:
            elsewhere = occupancy(*launch, capability=capability)
            print(f"  {name:5} {elsewhere.fraction:4.0%}, limited by {' and '.join(elsewhere.limiters)}")


if __name__ == "__main__":
    main()
