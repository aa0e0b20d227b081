"""Kill two ranks at random times while they save at every step, and check that the last checkpoint is complete.

    python benchmarks/checkpoint_kills.py [--kills 100] [--seed 0] [--out kills.json]

Each round continues from the checkpoint of the previous round, in another layout. The layouts are tensor parallel
ranks, data ranks that share the model, and data ranks that each have the whole model. SIGKILL hits both ranks at once,
or one a little before the other. Then the script verifies the checksums of the whole checkpoint that `latest` names.
All its tensors must be of the same step, and that step must not be earlier than the previous round's. The exit status
is 1 if a check fails in any round.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rooftop.models import GptConfig
from rooftop.parallel import Layout, join
from rooftop.train import GptTrainer, GptTraining, Tokens, find_training, load_training, nothing_saved, run_steps
from rooftop.train.checkpoints.saved_tensors import SavedTensors, whole_tensor
from rooftop.train.checkpoints.training_records import read_record
from rooftop.train.checkpoints.trainings import open_tensors
from rooftop.whole_files import write_json

CONFIG = GptConfig(vocabulary=31, layers=2, width=256, heads=4, kv_heads=4, hidden=1024, positions=8)
TRAINING = GptTraining(config=CONFIG, length=8, global_batch=2, micro_batch=1, learning_rate=0.01)
LAYOUTS = {"tp=2": (Layout(tp=2), False), "dp=2 shared": (Layout(dp=2), True), "dp=2": (Layout(dp=2), False)}
RANKS = 2
LONGEST_S = 1.0  # the kill comes within these seconds after the first step, long enough to save several checkpoints


def trains(rank: int, port: int, name: str, folder: Path, ready: Any) -> None:
    """Train as one rank until the process is killed."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port))
    torch.set_num_threads(1)
    layout, shared = LAYOUTS[name]
    with join(layout, device="cpu") as world:
        tokens = Tokens([np.arange(500) % CONFIG.vocabulary], "counting")
        groups = layout.process_groups()
        trainer = GptTrainer(TRAINING, tokens, layout, groups, world.device, fully_shard=shared)
        if not nothing_saved(folder):
            load_training(find_training(folder, TRAINING)[0], trainer)
        for _ in run_steps(trainer, 10**9, save=folder, save_interval=1, keep_last=2):
            ready.set()


def killed(number: int, draw: random.Random, folder: Path, context: Any) -> dict[str, Any]:
    """Run a round. Return the state at the kill, and the fault in the last checkpoint, if any."""
    name = [*LAYOUTS][number % len(LAYOUTS)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ready = context.Event()
    processes = [context.Process(target=trains, args=(rank, port, name, folder, ready)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    if not ready.wait(120):
        raise RuntimeError(f"round {number}, {name}: the ranks completed no step; see their output")
    time.sleep(draw.uniform(0.0, LONGEST_S))
    saving = any(folder.glob(".step-*.unfinished"))
    draw.shuffle(processes)
    apart_s = draw.choice([0.0, 0.0, 0.05])
    for process in processes:
        process.kill()
        time.sleep(apart_s)
    for process in processes:
        process.join()
    return {"layout": name, "apart_s": apart_s, "while_saving": saving}


def step_in(folder: Path) -> int:
    """Check that the last checkpoint is complete, and return its step; 0 if there is no checkpoint yet.

    Raises:
        ValueError: the checkpoint is incomplete.
    """
    if nothing_saved(folder):
        return 0
    record = read_record(folder)
    saved = open_tensors(record)
    assert isinstance(saved, SavedTensors)
    saved.verify()
    steps = {float(whole_tensor(saved, name)) for name in saved.entries if name.startswith("optimizer.step.")}
    if steps != {float(record.step)}:
        raise ValueError(f"{record.folder} mixes tensors of the steps {steps}")
    return record.step


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "rooftop.train", "torch.distributed.fsdp"])
    draw = random.Random(options.seed)
    rounds: list[dict[str, Any]] = []
    before = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        for number in range(options.kills):
            found = killed(number, draw, folder, context)
            try:
                step = step_in(folder)
                found |= {"step": step, "wrong": "" if step >= before else f"step {step} follows {before}"}
                before = step
            except ValueError as error:
                found |= {"step": None, "wrong": str(error)}
            rounds.append(found)
            print(number, found, flush=True)
    wrong = [found["wrong"] for found in rounds if found["wrong"]]
    summary = {
        "kills": len(rounds),
        "while_saving": sum(found["while_saving"] for found in rounds),
        "last_step": before,
        "wrong": wrong,
    }
    print(json.dumps(summary))
    if options.out is not None:
        write_json(options.out, {**summary, "seed": options.seed, "rounds": rounds})
    return 1 if wrong or not summary["while_saving"] else 0


if __name__ == "__main__":
    sys.exit(main())
