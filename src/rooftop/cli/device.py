"""`rooftop device`: describe the GPUs and the CPU of this machine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from rich.table import Table

from rooftop.cli.consoles import output_console
from rooftop.cli.outputs import write_json
from rooftop.hardware import Device, Peer, devices
from rooftop.hardware.device import versions


def run(json_path: Path | None) -> None:
    """Run the command that `rooftop.cli.commands.device:command` describes."""
    found = devices()
    if write_json(json_path, {"devices": [d.to_dict() for d in found], "versions": versions()}):
        return
    console = output_console()
    for device in found:
        console.print(_table(device))
    if all(device.kind == "cpu" for device in found):
        console.print(
            "No GPU that torch can use. Analysis, ceilings and models work on the CPU; with an NVIDIA GPU in the "
            "machine, check its driver (nvidia-smi) and that torch is a CUDA build."
        )
    console.print(", ".join(f"{name} {version}" for name, version in versions().items()), style="dim")


def _table(device: Device) -> Table:
    title = f"{device.name}" + (f" (cuda:{device.index})" if device.kind == "cuda" else "")  # type: ignore[union-attr]
    table = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in device.to_dict().items():
        if name not in ("name", "kind", "index"):
            table.add_row(_label(name), _value(name, value))
    return table


def _label(name: str) -> str:
    for unit in ("_bytes", "_mhz", "_w"):
        name = name.removesuffix(unit)
    return name.replace("_", " ")


def _value(name: str, value: Any) -> str:
    if value is None or value in ({}, [], ()):
        return "-"
    if name.endswith("_bytes"):
        return _bytes(value)
    if name == "links":
        return _links(value)
    if name == "topology":
        return ", ".join(f"{other}: {Peer(**peer)}" for other, peer in value.items())
    if name == "caches":
        return ", ".join(f"{level} {_bytes(size)}" for level, size in value.items())
    if name == "compute_capability":
        return ".".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}: {item}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    unit = {"_mhz": " MHz", "_w": " W"}.get("_" + name.rsplit("_", 1)[-1], "")
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else f"{value:,}{unit}" if unit else str(value)


def _links(links: list[dict[str, Any]]) -> str:
    """Describe links of the same kind in one phrase: "18 x NVLink 4.0 to a switch, 26.6 GB/s each way"."""
    kinds = Counter((link["version"], link["remote"], link["rate"]) for link in links)
    return "; ".join(
        f"{count} x NVLink{f' {version}' if version else ''}"
        + (f" to a {remote}" if remote in ("gpu", "switch") else "")
        + (f", {rate / 1e9:.4g} GB/s each way" if rate else "")
        for (version, remote, rate), count in kinds.items()
    )


def _bytes(size: int) -> str:
    for limit, prefix in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= limit:
            return f"{size / limit:,.4g} {prefix}"
    return f"{size} B"
