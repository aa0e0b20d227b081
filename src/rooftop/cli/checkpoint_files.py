"""`rooftop checkpoint inspect`, `convert` and `export-hf`: the implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from rooftop.cli.consoles import output_console
from rooftop.cli.outputs import write_json
from rooftop.cli.progress import progress_bar
from rooftop.errors import InputError
from rooftop.models.gpt.configs import hugging_face_config
from rooftop.models.gpt.weights import save_gpt
from rooftop.models.weights.safetensors_files import safetensors_library
from rooftop.train.checkpoints.conversions import check_new, convert
from rooftop.train.checkpoints.saved_tensors import Entry, Readable, SavedTensors
from rooftop.train.checkpoints.trained_models import load_trained_gpt, saved_training
from rooftop.train.checkpoints.trainer_tensors import OPTIMIZER
from rooftop.train.checkpoints.training_records import TrainingRecord, read_record
from rooftop.train.checkpoints.trainings import open_tensors
from rooftop.train.gpt.training import DTYPES


def run_inspect(folder: Path, verify: bool, json_path: Path | None) -> None:
    """Run the command that `rooftop.cli.commands.checkpoint_files:inspect_command` describes."""
    record = read_record(folder)
    saved = open_tensors(record)
    if isinstance(saved, SavedTensors):
        saved.check_files()
    if verify:
        if not isinstance(saved, SavedTensors):
            raise InputError(
                f"{record.folder} has format {record.format}, which has no checksums; to add them: rooftop checkpoint "
                f"convert {folder} -o OUT"
            )
        with progress_bar() as progress:
            saved.verify(progress)
    if write_json(json_path, _found(record, saved, verify)):
        return
    console = output_console()
    head = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    head.add_column(no_wrap=True)
    head.add_column(overflow="fold")
    for name, value in _lines(record, saved, verify):
        head.add_row(name, value)
    console.print(head, markup=False, highlight=False)
    console.print()
    console.print(_table(saved), highlight=False)


def run_convert(folder: Path, out: Path, tensor_parallel_size: int) -> None:
    """Run the command that `rooftop.cli.commands.checkpoint_files:convert_command` describes."""
    record = read_record(folder)
    with progress_bar() as progress:
        written = convert(record, out, tensor_ranks=tensor_parallel_size, progress=progress)
    click.echo(f"step {record.step:,} of {record.folder}: {written}")


def run_export(folder: Path, out: Path, dtype: str) -> None:
    """Run the command that `rooftop.cli.commands.checkpoint_files:export_command` describes."""
    saved = saved_training(folder)
    check_new(out)
    safetensors_library()
    try:
        hugging_face_config(saved.config)
    except ValueError as error:
        raise InputError(str(error)) from error
    with progress_bar() as progress:
        progress(f"reading {saved.folder}", 0.0)
        model = load_trained_gpt(saved.folder, dtype=DTYPES[dtype])
        progress(f"writing {out}", 0.5)
        save_gpt(model, out)
    click.echo(f"{saved.config.parameters:,} parameters of step {saved.step:,}, {dtype}: {out}")


# ---- printed words --------------------------------------------------------------------------------------------------


def _lines(record: TrainingRecord, saved: Readable, verified: bool) -> list[tuple[str, str]]:
    config, training, data = record.config, record.training, record.data
    shared = ", weights divided among the data parallel ranks" if record.layout.get("fully_shard") else ""
    lines = [
        ("checkpoint", f"{record.folder} (format {record.format})"),
        ("step", f"{record.step:,}"),
        ("layout", f"{record.layout.get('words', '')}{shared}"),
        (
            "model",
            f"{config.parameters:,} parameters: {config.layers} layers, width {config.width}, {config.heads} heads, "
            f"{config.kv_heads} of keys and values, vocabulary {config.vocabulary:,}{', tied' if config.tied else ''}",
        ),
        (
            "training",
            f"{training['dtype']}, seed {training['seed']}, {training['global_batch']} sequences of "
            f"{training['length']} tokens a step",
        ),
        ("data", f"{data['source']}, {data['tokens']:,} tokens" if "source" in data else "not recorded"),
    ]
    size = sum(entry.bytes for entry in saved.entries.values())
    if isinstance(saved, SavedTensors):
        lines.append(("files", f"{len(saved.files)}, {sum(count for count, _ in saved.files.values()):,} bytes"))
        checked = "all bytes are as they were written" if verified else "not compared; --verify compares them"
        lines.append(("checksums", checked))
    lines.append(("tensors", f"{len(saved.entries)}, {size:,} bytes"))
    return lines


def _table(saved: Readable) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("weight", "dtype", "shape"):
        table.add_column(name, overflow="fold")
    for name in ("pieces", "bytes", "optimizer bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, entry in saved.entries.items():
        if name.startswith(f"{OPTIMIZER}."):
            continue
        moments = [other for key, other in saved.entries.items() if _is_of(key, name)]
        cells = (" x ".join(map(str, entry.shape)), str(len(entry.pieces) or "-"), f"{entry.bytes:,}")
        table.add_row(name, _dtype(entry), *cells, f"{sum(other.bytes for other in moments):,}")
    return table


def _is_of(key: str, weight: str) -> bool:
    return key.startswith(f"{OPTIMIZER}.") and key.split(".", 2)[2] == weight


def _dtype(entry: Entry) -> str:
    return str(entry.dtype).removeprefix("torch.")


def _found(record: TrainingRecord, saved: Readable, verified: bool) -> dict[str, Any]:
    """All that `inspect` found in a checkpoint, as plain data for JSON: record, files and tensors."""
    files = {}
    if isinstance(saved, SavedTensors):
        files = {name: count for name, (count, _) in saved.files.items()}
    return {
        "folder": str(record.folder),
        **record.plain,
        "verified": verified,
        "files": files,
        "tensors": {
            name: {
                "dtype": _dtype(entry),
                "shape": entry.shape,
                "bytes": entry.bytes,
                "pieces": [
                    {
                        "file": piece.file,
                        "offset": piece.offset,
                        "start": piece.start,
                        "size": piece.size,
                        "crc32": piece.checksums,
                    }
                    for piece in entry.pieces
                ],
            }
            for name, entry in saved.entries.items()
        },
    }
