"""The cost of saving checkpoints during training: step times, the host's waits, and the disk's rate.

    python benchmarks/checkpoints.py --folder /scratch/run [--out benchmarks/results/h200/checkpoints.json]
    torchrun --nproc-per-node 8 benchmarks/checkpoints.py --folder /scratch/run       data ranks that share the model
    python benchmarks/checkpoints.py --small --folder /tmp/run                        on a CPU, to test the script

A Llama of 1 B parameters in bfloat16 is trained on random tokens. Weights and moments take 12 bytes a parameter. Each
round first runs some steps without a save. Then it starts a save, and runs steps until the save is complete. The host
waits for each step. The figures are:

    plain_ms, saving_ms    median time of a step without a save, and during a save; the first step of a save includes
                           the copy
    slower_percent         by how much the steps during a save take longer than as many plain steps
    blocked_s              how long the host waited for a save: until the save began, and until the optimizer's state
                           was copied
    write_s                from the copy until the file is on the disk, on the slowest rank
    percent_of_disk        bytes / write_s, relative to the disk's rate in the same round: as many bytes, in one file
                           per rank, written and synchronized, as by dd with conv=fsync

The folder must be on the disk that is to be measured, with room for three checkpoints. Its files are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rooftop.models import GptConfig
from rooftop.models.gpt.configs import gpt_config
from rooftop.parallel import Layout, join, launched
from rooftop.train import GptTrainer, GptTraining, Saver, Tokens
from rooftop.whole_files import write_json

CHUNK_BYTES = 16 << 20
SMALL = GptConfig(vocabulary=256, layers=4, width=512, heads=8, kv_heads=8, hidden=2048, positions=64)


def training_of(small: bool, ranks: int) -> GptTraining:
    if small:
        return GptTraining(config=SMALL, length=64, global_batch=2 * ranks, micro_batch=2)
    config = replace(gpt_config("llama-1b"), positions=4096)
    return GptTraining(
        config=config, length=4096, global_batch=2 * ranks, micro_batch=2, dtype=torch.bfloat16, recompute=False
    )


def stepped(trainer: GptTrainer) -> float:
    """The seconds of a step, including the wait for the device."""
    began = time.perf_counter()
    trainer.advance()
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
    return time.perf_counter() - began


def slowest(value: float) -> float:
    """The largest value over all ranks."""
    if not dist.is_initialized():
        return value
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return max(found)


def disk_s(folder: Path, count: int) -> float:
    """The seconds until each rank has written this many random bytes to the disk."""
    chunk = memoryview(os.urandom(CHUNK_BYTES))
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began = time.perf_counter()
        for at in range(0, count, CHUNK_BYTES):
            file.write(chunk[: min(CHUNK_BYTES, count - at)])
        os.fsync(file.fileno())
        return slowest(time.perf_counter() - began)


def one_round(trainer: GptTrainer, saver: Saver, folder: Path, steps: int) -> dict[str, float]:
    plain = []
    for _ in range(steps):
        plain.append(stepped(trainer))
        saver.after_step()
    before = saver.blocked_s
    saver.begin()
    saving = []
    while saver.saving:
        saving.append(stepped(trainer))
        saver.after_step()
    blocked = slowest(saver.blocked_s - before)
    write_s = slowest(saver.written_s)
    on_disk_s = disk_s(folder, saver.bytes)
    plain_ms, saving_ms = (1e3 * slowest(statistics.median(each)) for each in (plain, saving))
    return {
        "plain_ms": plain_ms,
        "saving_ms": saving_ms,
        "steps_beside": len(saving),
        "slower_percent": 100 * (slowest(statistics.mean(saving)) / slowest(statistics.mean(plain)) - 1),
        "blocked_s": blocked,
        "write_s": write_s,
        "bytes_per_s": saver.bytes / write_s,
        "disk_bytes_per_s": saver.bytes / on_disk_s,
        "percent_of_disk": 100 * on_disk_s / write_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="folder for the checkpoints")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="number of steps without a save in each round")
    parser.add_argument("--small", action="store_true", help="train a small model on the CPU, to test the script")
    options = parser.parse_args()
    if not options.small and not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU; --small tests the script on a CPU")
    ranks = launched().size
    training, layout = training_of(options.small, ranks), Layout(dp=ranks)
    numbers = np.random.default_rng(0).integers(training.config.vocabulary, size=100_000).astype(np.uint16)
    with join(layout, device="cpu" if options.small else "cuda") as world:
        options.folder.mkdir(parents=True, exist_ok=True)
        trainer = GptTrainer(
            training,
            Tokens([numbers], "random"),
            layout,
            layout.process_groups(),
            world.device,
            fully_shard=ranks > 1,
        )
        for _ in range(3):
            stepped(trainer)
        with tempfile.TemporaryDirectory(dir=options.folder) if world.rank == 0 else nullcontext("") as own:
            saver = Saver(Path(of_first(own)) / "run", trainer, keep_last=1)
            try:
                began = time.perf_counter()
                saver.prepare()
                prepare_s = time.perf_counter() - began
                rounds = [one_round(trainer, saver, options.folder, options.steps) for _ in range(options.rounds)]
            finally:
                saver.close()
        found = {
            "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "ranks": ranks,
            "parameters": training.config.parameters,
            "bytes_of_rank": saver.bytes,
            "prepare_s": prepare_s,
            **{name: statistics.median(each[name] for each in rounds) for name in rounds[0]},
            "rounds": rounds,
        }
        if world.rank == 0:
            print(json.dumps(found, indent=1))
            if options.out is not None:
                write_json(options.out, found)
    return 0


def of_first(folder: str) -> str:
    """The value of `folder` on rank 0."""
    found = [folder]
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    return found[0]


if __name__ == "__main__":
    sys.exit(main())
