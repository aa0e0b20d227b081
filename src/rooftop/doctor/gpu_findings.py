"""Findings about NVIDIA's driver, the GPUs, and the libraries that run on them."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from rooftop.doctor import mending
from rooftop.doctor.findings import (
    Finding,
    build_of,
    gpu_usable,
    reinstall,
    torch_cuda,
    torch_here,
)
from rooftop.doctor.requirements import asked_by
from rooftop.words import counted, in_a_line

# this folder exists if the driver's kernel module is loaded, even in containers
PROC_DRIVER = Path("/proc/driver/nvidia")
PCI_DEVICES = Path("/sys/bus/pci/devices")
NVIDIA, DISPLAY = "0x10de", "0x03"  # PCI vendor, and PCI class of display and 3D controllers
LIBRARIES_DIFFER = 18  # NVML_ERROR_LIB_RM_VERSION_MISMATCH


class DriverAnswer(NamedTuple):
    """The answer of NVML: the driver's version, the newest CUDA version that the driver supports, and the number of
    GPUs. If NVML reports an error, only the error's text and NVML's error code are set."""

    version: str = ""
    cuda: tuple[int, int] = (0, 0)
    gpus: int = 0
    error: str = ""
    code: int = 0


def ask_driver() -> DriverAnswer:
    """Ask NVML about the driver.

    Raises:
        ImportError: nvidia-ml-py is not installed.
    """
    nvml: Any = import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return DriverAnswer(error=str(error), code=getattr(error, "value", 0))
    try:
        version, cuda = nvml.nvmlSystemGetDriverVersion(), nvml.nvmlSystemGetCudaDriverVersion_v2()
        text = version.decode() if isinstance(version, bytes) else str(version)
        return DriverAnswer(text, (cuda // 1000, cuda % 1000 // 10), nvml.nvmlDeviceGetCount())
    finally:
        nvml.nvmlShutdown()


def driver_part(part: str) -> Finding:
    """Check that NVML finds a driver that is new enough for torch's CUDA version."""
    try:
        driver = ask_driver()
    except ImportError as error:
        return Finding(part, "broken", "", in_a_line(error), mending.pip("nvidia-ml-py"))
    built = torch_cuda()
    if driver.error:
        return _no_driver(part, driver, built)
    found = f"{driver.version}, CUDA up to {_dotted(driver.cuda)}, {counted(driver.gpus, 'GPU')}"
    if built and int(built.split(".")[0]) > driver.cuda[0] and not gpu_usable():
        problem = f"torch is built for CUDA {built}, which needs a newer driver"
        # In a container the driver belongs to the host, and no command in the container replaces it.
        return Finding(part, "broken", found, problem, "" if mending.container() else mending.driver())
    return Finding(part, "works", found)


def _no_driver(part: str, driver: DriverAnswer, built: str) -> Finding:
    if driver.code == LIBRARIES_DIFFER:  # the driver was updated, but its old kernel module is still loaded
        return Finding(
            part, "broken", driver.error, "the driver's libraries and kernel module differ in version", _restart()
        )
    seen = _gpus_in_machine()
    if seen:
        problem = f"{seen}, but the driver does not answer ({driver.error})"
        return Finding(part, "broken", "not found", problem, mending.driver())
    if built:
        found = f"neither a driver nor a GPU found: torch is built for CUDA {built} and runs on the CPU"
        return Finding(part, "absent", found)
    return Finding(part, "absent", "neither a driver nor a GPU found")


def _gpus_in_machine() -> str:
    """The GPUs that the operating system lists, even without a working driver; "" if it lists none."""
    if (PROC_DRIVER / "version").exists():
        return "NVIDIA's kernel module is loaded"
    count = 0
    for device in PCI_DEVICES.glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        count += vendor == NVIDIA and kind.startswith(DISPLAY)
    return f"{counted(count, 'NVIDIA GPU')} on PCI" if count else ""


def cuda_part(part: str) -> Finding | None:
    """Check that torch can use the driver's GPUs. If torch can use no GPU, find the reason."""
    torch = torch_here()
    if torch.cuda.is_available():
        return Finding(part, "works", f"torch uses {counted(torch.cuda.device_count(), 'GPU')}, {build_of(torch)}")
    try:
        gpus = ask_driver().gpus
    except ImportError:  # the finding about packages reports that nvidia-ml-py is missing
        gpus = 0
    if not gpus:
        return None  # the finding about the driver reports missing GPUs
    found = f"torch uses none of {counted(gpus, 'GPU')}"
    if torch.version.cuda is None:
        command = ""
        # on Linux with x86_64, torch's default build has CUDA
        if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
            command = mending.pip("torch" + asked_by("rooftop").get("torch", ""), options="--force-reinstall")
        return Finding(part, "broken", found, f"torch is a {build_of(torch)}", command)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):  # the user has hidden all GPUs on purpose
        return Finding(
            part, "absent", f'{found}: CUDA_VISIBLE_DEVICES="{visible}" hides them', "", "unset CUDA_VISIBLE_DEVICES"
        )
    try:
        torch.cuda.init()
        problem = "torch.cuda.is_available() is False"
    except Exception as error:
        problem = in_a_line(error)
    if visible is not None:
        return Finding(
            part, "broken", f'{found}, CUDA_VISIBLE_DEVICES="{visible}"', problem, "unset CUDA_VISIBLE_DEVICES"
        )
    # GPUs on NVSwitch cannot be used until the fabric manager has set up the fabric
    if "system not yet initialized" in problem and not mending.container():
        return Finding(part, "broken", found, problem, mending.as_root("systemctl start nvidia-fabricmanager"))
    return Finding(part, "broken", found, problem)


def gpus_part(part: str) -> Finding | None:
    """Run a tiny kernel on each GPU, and check its result."""
    if not gpu_usable():
        return None
    torch = torch_here()
    names, problems, command = [], [], ""
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        names.append(f"{p.name} (sm_{p.major}{p.minor})")
        try:
            x = torch.arange(1024, device=f"cuda:{index}", dtype=torch.float64)
            total = float((2 * x).sum())
            problem = "" if total == 1023 * 1024 else f"a sum is {total}, not {1023 * 1024}"
        except Exception as error:
            problem = in_a_line(error)
            built = torch.cuda.get_arch_list()
            if not runs_on((p.major, p.minor), built):
                problem = f"torch is built for {' '.join(built)}, not for this GPU"
                newest = max((_capability(each) for each in built), default=(0, 0))
                command = mending.pip("torch", options="--upgrade") if (p.major, p.minor) > newest else ""
        if problem:
            problems.append(f"cuda:{index}: {problem}")
    found = "; ".join(f"{_times(names.count(name))}{name}" for name in dict.fromkeys(names))
    return Finding(part, "broken" if problems else "works", found, "; ".join(problems), command)


def runs_on(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether code built for these targets ("sm_80", "sm_90a", "compute_90") runs on a GPU of this compute capability.

    Machine code for version x.y runs on GPUs of the versions x.z with z >= y. PTX ("compute_") runs on its own version
    and all later versions; with the suffix "f", only on the versions on which machine code of its version runs. With
    the suffix "a", machine code and PTX run only on their own version (CUDA C++ Programming Guide, "Binary
    compatibility" and the following sections).
    """
    for architecture in architectures:
        code = _capability(architecture)
        if architecture.endswith("a"):
            fits = capability == code
        elif architecture.startswith("compute_") and not architecture.endswith("f"):
            fits = capability >= code
        else:
            fits = capability[0] == code[0] and capability >= code
        if fits:
            return True
    return False


def _capability(architecture: str) -> tuple[int, int]:
    digits = re.sub(r"\D", "", architecture)
    return int(digits[:-1] or 0), int(digits[-1:] or 0)


def cudnn_part(part: str) -> Finding | None:
    """Run a tiny convolution, and check its result."""
    if not gpu_usable():
        return None
    torch = torch_here()
    try:
        version = torch.backends.cudnn.version()
        x = torch.ones(1, 4, 3, 3, device="cuda")
        if not torch.backends.cudnn.is_acceptable(x):
            return Finding(part, "broken", str(version or "none"), "torch does not use cuDNN here", reinstall("torch"))
        total = float(torch.nn.functional.conv2d(x, x))  # (1, 1, 1, 1), the sum of 36 ones
    except Exception as error:
        reason = in_a_line(error)
        shadowed = "LD_LIBRARY_PATH" in str(error) and "LD_LIBRARY_PATH" in os.environ
        return Finding(part, "broken", "", reason, "unset LD_LIBRARY_PATH" if shadowed else reinstall("torch"))
    if total != 36:
        return Finding(part, "broken", str(version), f"a convolution gave {total}, not 36", reinstall("torch"))
    return Finding(part, "works", f"{version}, a convolution ran")


def nccl_part(part: str) -> Finding | None:
    """Check that torch is built with NCCL, if there are at least two GPUs."""
    if not gpu_usable() or torch_here().cuda.device_count() < 2:
        return None
    torch = torch_here()
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return Finding(part, "broken", "none", "this torch is built without NCCL", reinstall("torch"))
    return Finding(part, "works", ".".join(map(str, torch.cuda.nccl.version())))


def library_part(part: str, name: str) -> Finding | None:
    """Check that a library of the driver can be loaded."""
    if not gpu_usable():
        return None
    try:
        ctypes.CDLL(name)
    except OSError as error:
        # outside a container the fix is the driver's package for video, whose name depends on the distribution
        command = ""
        if mending.container():
            command = f"{mending.driver().removesuffix(' ...')} -e NVIDIA_DRIVER_CAPABILITIES=compute,utility,video ..."
        return Finding(part, "absent", in_a_line(error), command=command)
    return Finding(part, "works", f"{name} loads")


def _restart() -> str:
    return "" if mending.container() else mending.as_root("reboot")


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _times(number: int) -> str:
    return f"{number} x " if number > 1 else ""
