"""Data parallelism on two GPUs: Rooftop's and torch's `DataParallel` in one process, compared with DDP.

    python benchmarks/parallel_data.py [--out benchmarks/results/h200/parallel_data.json] [--only resnet50-256 mlp-1024]

The script times a training step (forward, cross entropy, backward, SGD with momentum) of two networks. One is ResNet-50
in bfloat16, channels last. The other is a small MLP in float32, which computes little between its copies. Batches come
from pinned host memory. Figures are medians. Variants that run in one process are interleaved. DDP's processes are
timed together, and the slowest counts.

Each row also has `share_ms`, the time of one GPU with only its share of the batch, as if splitting cost nothing.
`collective_ms` is the roof of communication: an all-reduce of the gradients (for DataParallel, a reduction of the
gradients and a broadcast of the parameters) at the bus bandwidth measured in the same run.

`--limits 0 65536 16777216` also measures Rooftop with other limits, in bytes, up to which tensors are copied together.
`--peers none` leaves out torch's variants. `--quick` tests the script on a CPU, with gloo.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from programs import Results
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rooftop.hardware import Timing, ceilings_of, collectives, compare, measure_ceilings
from rooftop.hardware.sequences import synchronize
from rooftop.hardware.timing import timing_of
from rooftop.models import resnet50
from rooftop.models.vision.resnet import Bottleneck, ResNet
from rooftop.parallel import device_copies
from rooftop.parallel.data_parallel import DataParallel

COUNT = 2
OURS = "rooftop DataParallel"
SAMPLES = 9  # number of samples that DDP's processes measure
COLLECTIVE_STEP = 4 * COUNT  # bytes: `collective_rates` splits its float32 messages evenly over the devices


@dataclass(frozen=True)
class Case:
    """A network, and the total batch of all devices. `model` is resnet50 or mlp, or a small network for a CPU."""

    model: str
    batch: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.batch}"

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        if self.model == "resnet50":
            return resnet50().to(torch.bfloat16, memory_format=torch.channels_last)
        if self.model == "resnet14":
            return ResNet(Bottleneck, (1, 1, 1, 1), num_classes=10)
        width = 1024 if self.model == "mlp" else 32
        return nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )

    def samples(self, count: int) -> tuple[Tensor, Tensor]:
        """Inputs (count, ...) and labels (count,), in pinned memory if there are GPUs."""
        labels = torch.randint(10, (count,))
        if self.model == "resnet50":
            x = torch.randn(count, 3, 224, 224).to(torch.bfloat16, memory_format=torch.channels_last)
        elif self.model == "resnet14":
            x = torch.randn(count, 3, 32, 32)
        else:
            x = torch.randn(count, 1024 if self.model == "mlp" else 32)
        return (x.pin_memory(), labels.pin_memory()) if torch.cuda.is_available() else (x, labels)


CASES = (Case("resnet50", 64), Case("resnet50", 256), Case("mlp", 1024))
QUICK = (Case("resnet14", 4), Case("small_mlp", 8))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in (*CASES, *QUICK)]
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200/parallel_data.json"))
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--peers", choices=("none", "all"), default="all", help="peers to compare with")
    parser.add_argument(
        "--limits",
        nargs="+",
        type=int,
        default=[],
        metavar="BYTES",
        help="other limits in bytes up to which tensors are copied together",
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds to measure each variant")
    parser.add_argument("--quick", action="store_true", help="a small run on the CPU, to test the script")
    options = parser.parse_args()
    if not options.quick and torch.cuda.device_count() < COUNT:
        parser.error(f"needs {COUNT} NVIDIA GPUs; --quick tests the script on a CPU")
    devices = ["cpu"] * COUNT if options.quick else [f"cuda:{index}" for index in range(COUNT)]
    results = Results(options.out, ceilings_of("h200") if options.quick else measure_ceilings("cuda"))
    for case in QUICK if options.quick else CASES:
        if case.name in options.only:
            for row in measured(case, devices, options.seconds, options.peers == "all", options.limits):
                results.add(row)
    return 0


def measured(case: Case, devices: list[str], seconds: float, peers: bool, limits: list[int]) -> list[dict[str, Any]]:
    gradients_bytes = sum(p.numel() * p.element_size() for p in case.network().parameters())
    message = math.ceil(gradients_bytes / COLLECTIVE_STEP) * COLLECTIVE_STEP
    rate = collectives.collective_rates(devices, [message])["all_reduce"][message]
    collective_ms = 1e3 * 2 * (COUNT - 1) / COUNT * message / rate
    timings = in_one_process(case, devices, seconds, peers, limits)
    if peers:
        timings["DistributedDataParallel"] = in_processes(case, devices, seconds)
    share_ms = timings["one device, its share"].median_ms
    return [
        {
            "case": case.name,
            "variant": variant,
            "batch": case.batch // COUNT if "share" in variant else case.batch,
            "ms": timing.median_ms,
            "images_per_s": 1e3 * (case.batch // COUNT if "share" in variant else case.batch) / timing.median_ms,
            "spread": timing.spread,
            "share_ms": share_ms,
            "collective_ms": collective_ms,
            "gradients_bytes": gradients_bytes,
        }
        for variant, timing in timings.items()
    ]


def in_one_process(case: Case, devices: list[str], seconds: float, peers: bool, limits: list[int]) -> dict[str, Timing]:
    first = devices[0]

    def ours() -> Callable[[], None]:
        return step(DataParallel(case.network(), devices), case.samples(case.batch), first)

    variants: dict[str, Callable[[], None]] = {
        OURS: limited(ours(), device_copies.COALESCED_BYTES),
        "one device": step(case.network().to(first), case.samples(case.batch), first),
        "one device, its share": step(case.network().to(first), case.samples(case.batch // COUNT), first),
    }
    variants |= {f"{OURS}, up to {limit} bytes together": limited(ours(), limit) for limit in limits}
    if peers and first != "cpu":  # torch's DataParallel makes no replicas on a CPU
        theirs = nn.DataParallel(case.network().to(first), list(range(COUNT)))
        variants["torch.nn.DataParallel"] = step(theirs, case.samples(case.batch), first)
    return compare(variants, device=first, seconds=seconds)


def limited(run: Callable[[], None], limit: int) -> Callable[[], None]:
    """The step, where tensors of up to this many bytes are copied together."""

    def call() -> None:
        device_copies.COALESCED_BYTES = limit
        run()

    return call


def step(model: nn.Module, batch: tuple[Tensor, Tensor], device: str) -> Callable[[], None]:
    """A training step. DataParallel copies the batch to its devices itself; for other variants, the step copies it
    first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    splits = isinstance(model, DataParallel | nn.DataParallel)

    def run() -> None:
        x, labels = batch
        optimizer.zero_grad()
        out = model(x if splits else x.to(device, non_blocking=True))
        cross_entropy(out.float(), labels.to(device, non_blocking=True)).backward()
        optimizer.step()

    return run


def in_processes(case: Case, devices: Sequence[str], seconds: float) -> Timing:
    with tempfile.TemporaryDirectory(prefix="rooftop-parallel-data-") as folder:
        mp.spawn(rank_main, (case, devices, seconds, folder), nprocs=len(devices))
        return timing_of(json.loads(Path(folder, "samples.json").read_text()))


def rank_main(rank: int, case: Case, devices: Sequence[str], seconds: float, folder: str) -> None:
    """Run one of DDP's processes. Rank 0 writes the samples."""
    device = torch.device(devices[rank])
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast does not work everywhere
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=len(devices))
    ids = [device.index] if device.type == "cuda" else None
    model = nn.parallel.DistributedDataParallel(case.network().to(device), device_ids=ids, gradient_as_bucket_view=True)
    samples = timed(step(model, case.samples(case.batch // len(devices)), devices[rank]), device, seconds)
    if rank == 0:
        Path(folder, "samples.json").write_text(json.dumps(samples))
    meet(device)
    dist.destroy_process_group()


def timed(run: Callable[[], None], device: torch.device, seconds: float) -> list[float]:
    """ms of a step on the slowest rank, for each sample. Every rank makes as many steps as rank 0 chooses.

    The host's clock measures between two synchronizations, since one GPU's events say nothing about the other GPU.
    """
    for _ in range(3):
        run()
    calls = torch.tensor(max(1, int(seconds / SAMPLES / (several(run, device, 3) / 1e3))), device=device)
    dist.broadcast(calls, 0)
    several(run, device, int(calls))  # warm up
    samples = torch.tensor([several(run, device, int(calls)) for _ in range(SAMPLES)], device=device)
    dist.all_reduce(samples, dist.ReduceOp.MAX)
    return [float(sample) for sample in samples]


def several(run: Callable[[], None], device: torch.device, calls: int) -> float:
    """Mean ms of a call, over this many calls."""
    synchronize(device)
    meet(device)
    began = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(device)
    return 1e3 * (time.perf_counter() - began) / calls


def meet(device: torch.device) -> None:
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


if __name__ == "__main__":
    sys.exit(main())
