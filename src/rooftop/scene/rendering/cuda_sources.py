"""Functions shared by the stages in CUDA C++: test whether CUDA C++ can run, join and compile sources, and size
grids."""

from __future__ import annotations

from pathlib import Path

import torch

from rooftop.errors import MissingExtraError
from rooftop.launch import cuda, nvrtc


def with_pieces(module_file: str, *more: str) -> str:
    """Join the CUDA C++ sources of a module: `pieces.cu`, which all modules use, then the files `more`, which some
    modules share, then the module's own file."""
    path = Path(module_file)
    files = (path.with_name("pieces.cu"), *(path.with_name(name) for name in more), path.with_suffix(".cu"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def compiled(source: str, name: str, device: torch.device) -> cuda.Kernel:
    """Compile a kernel of a source from `with_pieces`, without fused multiply-add: pixels must have the same bits as
    Warp's."""
    return cuda.compile(source, name, device=device, fused_multiply_add=False)


def blocks_on(device: torch.device, of_a_multiprocessor: int) -> int:
    """Number of blocks of a launch whose blocks share the items of a list: `of_a_multiprocessor` for each
    multiprocessor of the GPU, or one block on the CPU, where tests run kernels."""
    if device.type != "cuda":
        return 1
    return of_a_multiprocessor * torch.cuda.get_device_properties(device).multi_processor_count


def require(device: torch.device) -> None:
    """Raise, before anything is launched, if CUDA C++ cannot run.

    Raises:
        ValueError: the device is not a GPU.
        MissingExtraError: the package that compiles and launches CUDA C++ is not installed.
    """
    if not cuda.runs_on(torch.empty(0, device=device)):
        raise ValueError(f"kernels='cuda' needs a GPU, but the device is {device}; kernels='warp' runs everywhere")
    if device.type == "cuda":
        nvrtc.require_cuda_core()
        nvrtc.version()


def is_there(device: torch.device) -> bool:
    """Whether CUDA C++ can run on the device."""
    try:
        require(device)
    except (ValueError, MissingExtraError):
        return False
    return True
