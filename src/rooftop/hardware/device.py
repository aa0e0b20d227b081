"""Describe the GPUs and the CPU of this machine, from the drivers and the operating system.

A field that the driver does not report (in a container, in a virtual machine, in an old version) is None, never a
guess.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from rooftop.hardware.nvml import Nvml, nvml_session
from rooftop.hardware.topology import NvLink, Peer, nv_links, peers
from rooftop.words import counted


@dataclass(frozen=True)
class Gpu:
    """A GPU. Memory and caches are in bytes, registers are counted, clocks are in MHz, power is in W.

    `links` lists the active NVLink links (None if the driver does not report them). `topology` is the path to each
    other GPU, by name ("cuda:1"). `pcie_generation` and `pcie_width` are the highest that the GPU and its slot support.
    """

    index: int
    name: str
    uuid: str | None
    compute_capability: tuple[int, int]
    sm_count: int
    memory_bytes: int
    free_bytes: int | None
    l2_bytes: int
    shared_memory_per_sm_bytes: int | None
    shared_memory_per_block_bytes: int | None
    registers_per_sm: int | None
    warp_size: int
    max_threads_per_sm: int | None
    max_threads_per_block: int | None
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    max_memory_clock_mhz: int | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    links: tuple[NvLink, ...] | None = None
    topology: dict[str, Peer] = field(default_factory=dict)
    has_nvdec: bool | None = None
    has_nvenc: bool | None = None
    power_limit_w: float | None = None
    kind: str = "cuda"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "compute_capability": list(self.compute_capability)}


@dataclass(frozen=True)
class Cpu:
    """The CPU: its cores, caches (bytes by level), memory in bytes, and the instruction sets that matter to kernels."""

    name: str
    physical_cores: int | None
    logical_cores: int
    threads: int
    caches: dict[str, int]
    memory_bytes: int
    free_bytes: int
    instruction_sets: tuple[str, ...]
    kind: str = "cpu"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "instruction_sets": list(self.instruction_sets)}


Device = Gpu | Cpu


def devices() -> list[Device]:
    """All GPUs that torch can use, then the CPU."""
    count = torch.cuda.device_count()
    with nvml_session() as nvml:
        links = _links(nvml, count)
        return [*(_gpu(nvml, index, links) for index in range(count)), cpu()]


def gpu(index: int) -> Gpu:
    """Describe one GPU.

    Raises:
        ValueError: there is no such GPU.
    """
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise ValueError(f"no GPU {index}: torch can use {counted(count, 'GPU')} on this machine")
    with nvml_session() as nvml:
        return _gpu(nvml, index, _links(nvml, count))


def gpu_uuid(index: int) -> str | None:
    """A GPU's UUID as the driver writes it; None if torch does not report it."""
    p = torch.cuda.get_device_properties(index)
    return f"GPU-{p.uuid}" if hasattr(p, "uuid") else None


def _links(nvml: Nvml, count: int) -> list[tuple[NvLink, ...] | None]:
    return [nv_links(nvml, gpu_uuid(index)) for index in range(count)]


def _gpu(nvml: Nvml, index: int, links: list[tuple[NvLink, ...] | None]) -> Gpu:
    """Describe one GPU. `links` has the NVLink links of all GPUs."""
    p = torch.cuda.get_device_properties(index)
    uuid = gpu_uuid(index)
    ask = partial(nvml.gpu, uuid)
    others = [other for other in range(len(links)) if other != index]
    access = {other: torch.cuda.can_device_access_peer(index, other) for other in others}
    uuids = [gpu_uuid(each) for each in range(len(links))]
    return Gpu(
        index=index,
        name=p.name,
        uuid=uuid,
        compute_capability=(p.major, p.minor),
        sm_count=p.multi_processor_count,
        memory_bytes=p.total_memory,
        free_bytes=ask(lambda nvml, h: nvml.nvmlDeviceGetMemoryInfo(h).free),
        l2_bytes=p.L2_cache_size,
        shared_memory_per_sm_bytes=getattr(p, "shared_memory_per_multiprocessor", None),
        shared_memory_per_block_bytes=getattr(p, "shared_memory_per_block_optin", None),
        registers_per_sm=getattr(p, "regs_per_multiprocessor", None),
        warp_size=p.warp_size,
        max_threads_per_sm=getattr(p, "max_threads_per_multi_processor", None),
        max_threads_per_block=getattr(p, "max_threads_per_block", None),
        sm_clock_mhz=ask(lambda nvml, h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM)),
        max_sm_clock_mhz=ask(lambda nvml, h: nvml.nvmlDeviceGetMaxClockInfo(h, nvml.NVML_CLOCK_SM)),
        memory_clock_mhz=ask(lambda nvml, h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_MEM)),
        max_memory_clock_mhz=ask(lambda nvml, h: nvml.nvmlDeviceGetMaxClockInfo(h, nvml.NVML_CLOCK_MEM)),
        pcie_generation=ask(lambda nvml, h: nvml.nvmlDeviceGetMaxPcieLinkGeneration(h)),
        pcie_width=ask(lambda nvml, h: nvml.nvmlDeviceGetMaxPcieLinkWidth(h)),
        links=links[index],
        topology=peers(nvml, index, uuids, links, access),
        has_nvdec=ask(lambda nvml, h: nvml.nvmlDeviceGetDecoderUtilization(h) is not None),
        has_nvenc=ask(lambda nvml, h: nvml.nvmlDeviceGetEncoderUtilization(h) is not None),
        power_limit_w=ask(lambda nvml, h: nvml.nvmlDeviceGetPowerManagementLimit(h) / 1000),
    )


def cpu() -> Cpu:
    """The CPU that this process runs on."""
    info = _cpuinfo()
    memory = psutil.virtual_memory()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return Cpu(
        name=info.get("model name") or platform.processor() or platform.machine(),
        physical_cores=psutil.cpu_count(logical=False),
        logical_cores=psutil.cpu_count() or os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        caches=_caches(),
        memory_bytes=memory.total,
        free_bytes=memory.available,
        instruction_sets=tuple(name for name in INSTRUCTION_SETS if name in flags),
    )


INSTRUCTION_SETS = (
    *("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "asimd", "fphp", "bf16", "i8mm", "sve", "sve2", "sme"),
)
"""Flags of /proc/cpuinfo (x86 and Arm) that decide which kernels a math library chooses."""


@cache
def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty if there is none (not Linux)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


@cache
def _caches() -> dict[str, int]:
    """Bytes by level ("L1d", "L2", "L3") of the caches that core 0 uses; a cache that cores share counts in full. Empty
    if the kernel does not report them."""
    found = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind = (folder / "level").read_text().strip(), (folder / "type").read_text().strip()
            size = (folder / "size").read_text().strip()
        except OSError:
            continue
        scale = {"K": 1 << 10, "M": 1 << 20}.get(size[-1:], 1)
        if kind != "Instruction":
            found[f"L{level}" + ("d" if kind == "Data" else "")] = int(size.rstrip("KM")) * scale
    return found


def versions() -> dict[str, str]:
    """Versions of the software on which the speed of programs depends."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "system": platform.platform()}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
        if torch.backends.cudnn.is_available():
            found["cudnn"] = str(torch.backends.cudnn.version())
    for package in ("triton", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    driver = _driver_version()
    return {**found, "driver": driver} if driver else found


def _driver_version() -> str | None:
    with nvml_session() as nvml:
        version = nvml.system(lambda module: module.nvmlSystemGetDriverVersion())
    return None if version is None else str(version)
