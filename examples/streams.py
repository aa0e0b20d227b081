"""Two pieces of work at the same time on one GPU, right and wrong.

    python examples/streams.py [--size 512] [--steps 20]

Kernels that are launched on one stream run one after another. Kernels on two streams may run at the same time, in any
order. Two things are easily forgotten:

1. A stream must *wait* for the other one before it uses that stream's results, otherwise it reads data that are not yet
   written.
2. The allocator must *know* that a second stream uses a tensor (`record_stream`), otherwise it reuses the memory as
   soon as the tensor is freed, while the other stream still reads it.

`on_stream` and `join` do both, waiting and recording, in both directions. `check_streams` watches operators and waits,
and names the missing call and the lines of both uses. `check_streams` finds the mistake even if the result happened to
be right.

Only NVIDIA GPUs have streams. On the CPU the same code runs in order (`side_stream()` is None), so there is no mistake
to find.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from rooftop.hardware import check_streams, join, measure, on_stream, side_stream


def chain(x: Tensor, weight: Tensor, steps: int) -> Tensor:
    """Products that depend on each other; small ones leave most of a GPU idle."""
    for _ in range(steps):
        x = torch.tanh(x @ weight)
    return x


def one_after_another(x: Tensor, weight: Tensor, steps: int) -> Tensor:
    return chain(x, weight, steps) + chain(-x, weight, steps)


def overlapped(x: Tensor, weight: Tensor, steps: int, side: torch.cuda.Stream | None) -> Tensor:
    with on_stream(side, x, weight):  # side waits for the work launched so far, and x and weight live until it is done
        left = chain(x, weight, steps)
    right = chain(-x, weight, steps)  # at the same time
    join(side, left)  # the current stream waits for side, and left lives until the sum is done
    return left + right


def wrong() -> Tensor:
    """The classic mistake: the sum may run before the random numbers are written, or during the write."""
    values = torch.empty(1 << 20, device="cuda")
    values.normal_()
    with torch.cuda.stream(torch.cuda.Stream()):
        return values.sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(options.size, options.size, device=device)
    weight = torch.randn(options.size, options.size, device=device) / options.size**0.5
    side = side_stream()

    with check_streams():  # raises StreamRaceError if one stream uses data that another has not finished
        result = overlapped(x, weight, options.steps, side)
    torch.testing.assert_close(result, one_after_another(x, weight, options.steps))
    print("overlapped: the same result, and no stream used a tensor too early")
    if device.type == "cpu":
        print("Streams, and mistakes with them, need an NVIDIA GPU; here everything ran in order.")
        return

    serial = measure(lambda: one_after_another(x, weight, options.steps), device=device)
    parallel = measure(lambda: overlapped(x, weight, options.steps, side), device=device)
    print(f"one after another {serial.median_ms:.3f} ms, on two streams {parallel.median_ms:.3f} ms")
    with check_streams(raises=False) as check:
        wrong()
    for race in check.races:
        print(f"\n{race.message}")


if __name__ == "__main__":
    main()
