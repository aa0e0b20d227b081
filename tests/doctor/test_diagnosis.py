"""The diagnosis is true for this machine, and names the remedy for a deliberately broken one."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rooftop.doctor import diagnosis, findings, gpu_findings, mending, requirements
from rooftop.doctor.diagnosis import PARTS, diagnose, install_kernel
from rooftop.doctor.findings import Finding, Part
from rooftop.doctor.gpu_findings import runs_on
from rooftop.doctor.requirements import asked_by, fits
from rooftop.errors import MissingExtraError


def look(name: str) -> Finding:
    """The findings about one part."""
    (finding,) = diagnose([part for part in PARTS if part.name == name])
    return finding


def nothing(name: str) -> bool:
    return diagnose([part for part in PARTS if part.name == name]) == []


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which torch says that it can use a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def on_ubuntu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's Ubuntu with pip, outside a container."""
    monkeypatch.setattr(mending, "container", lambda: "")
    monkeypatch.setattr("platform.freedesktop_os_release", lambda: {"ID": "ubuntu"})
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(mending, "has_pip", lambda: True)


class NVMLError(Exception):
    """A refusal of the driver."""

    def __init__(self, text: str, value: int) -> None:
        super().__init__(text)
        self.value = value


def driver(monkeypatch: pytest.MonkeyPatch, cuda: int = 13000, gpus: int = 1, error: NVMLError | None = None) -> None:
    """A driver that runs this CUDA, or refuses."""

    def init() -> None:
        if error is not None:
            raise error

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: b"570.86.15",
        nvmlSystemGetCudaDriverVersion_v2=lambda: cuda,
        nvmlDeviceGetCount=lambda: gpus,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


def machine(monkeypatch: pytest.MonkeyPatch, folder: Path, *devices: tuple[str, str]) -> None:
    """PCI devices (vendor, class), and no kernel module."""
    for number, (vendor, kind) in enumerate(devices):
        device = folder / "pci" / str(number)
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    monkeypatch.setattr(gpu_findings, "PCI_DEVICES", folder / "pci")
    monkeypatch.setattr(gpu_findings, "PROC_DRIVER", folder / "proc")


def packages(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], requires: dict[str, list[str]]) -> None:
    """Installed packages and their requirements; other packages stay unchanged."""
    true_version, true_requires = metadata.version, metadata.requires

    def version(name: str) -> str:
        if versions.get(name) == "":
            raise metadata.PackageNotFoundError(name)
        return versions.get(name) or true_version(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: requires[name] if name in requires else true_requires(name))


def failing_import(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    true_import = diagnosis.import_module

    def fake(wanted: str) -> Any:
        if wanted == name:
            raise error
        return true_import(wanted)

    monkeypatch.setattr(diagnosis, "import_module", fake)
    monkeypatch.setattr(findings, "import_module", fake)


# ---- this machine ------------------------------------------------------------------------------------------------


def test_every_line_is_true_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path / "not" / "made" / "yet"))
    found = {finding.part: finding for finding in diagnose()}
    assert list(found) == [part.name for part in PARTS if part.name in found]
    assert found["Python"].found == f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}"
    assert found["torch"].found.startswith(f"{torch.__version__}, ")
    assert (f"CUDA {torch.version.cuda} build" in found["torch"].found) == (torch.version.cuda is not None)
    for package in ("numpy", "click", "nvidia-ml-py") if asked_by("rooftop") else ():
        assert f"{package} {metadata.version(package)}" in found["Packages"].found
    for part, package in {
        "cuda.core": "cuda-core",
        "Charts": "plotly",
        "Warp": "warp-lang",
        "PyAV": "av",
        "pyarrow": "pyarrow",
    }.items():
        assert not found[part].needed
        version = requirements.version_of(package)
        assert (found[part].status, found[part].found) == (
            ("works", f"{package} {version}") if version else ("absent", "not installed")
        )
    assert found["Ceilings cache"] == Finding(
        "Ceilings cache", "works", str(tmp_path / "not" / "made" / "yet"), needed=False
    )
    assert list(tmp_path.iterdir()) == []
    assert ("GPUs" in found) == ("cuDNN" in found) == ("CUDA" in found) == torch.cuda.is_available()
    for finding in found.values():
        assert finding.problem or finding.status != "broken"


@pytest.mark.gpu
def test_on_a_gpu_nothing_needed_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path))
    found = {finding.part: finding for finding in diagnose()}
    assert [finding for finding in found.values() if finding.needed and finding.status == "broken"] == []
    for part in ("NVIDIA driver", "CUDA", "GPUs", "cuDNN", "C compiler", "Triton", "torch.compile"):
        assert found[part].status == "works", found[part]
    assert torch.cuda.get_device_name(0) in found["GPUs"].found
    assert str(torch.backends.cudnn.version()) in found["cuDNN"].found
    assert "a kernel ran" in found["Triton"].found
    assert ("NCCL" in found) == (torch.cuda.device_count() > 1)


@pytest.mark.gpu
def test_a_gpu_that_computes_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "arange", lambda n, **where: torch.ones(n, **where))
    finding = look("GPUs")
    assert finding.status == "broken"
    assert finding.problem.startswith("cuda:0: a sum is 2048.0, not 1047552")


# ---- parts that raise --------------------------------------------------------------------------------------------


def test_a_part_that_raises_is_broken_and_ends_no_other() -> None:
    def raises(part: str) -> Finding:
        raise RuntimeError("first line\nsecond line")

    first, second = diagnose([Part("bad", raises), Part("good", lambda part: Finding(part, "works", "fine"))])
    assert first == Finding("bad", "broken", "", "RuntimeError: first line")
    assert second == Finding("good", "works", "fine")
    assert not diagnose([Part("bad", raises, needed=False)])[0].needed


# ---- Python packages ---------------------------------------------------------------------------------------------


def test_a_library_of_torch_that_is_missing(monkeypatch: pytest.MonkeyPatch, on_ubuntu: None) -> None:
    packages(monkeypatch, {"torch": "2.11.0"}, {})
    text = "libcudart.so.13: cannot open shared object file: No such file or directory"
    failing_import(monkeypatch, "torch", OSError(text))
    found = {finding.part: finding for finding in diagnose()}
    command = 'pip install --force-reinstall "torch==2.11.0"'
    assert found["torch"] == Finding("torch", "broken", "2.11.0", f"OSError: {text}", command)
    assert found["Python"].status == "works"
    assert not {"CUDA", "GPUs", "torch.compile", "Ceilings cache"} & set(found)  # one fault has one line


def test_torch_without_the_drivers_library_needs_the_driver(monkeypatch: pytest.MonkeyPatch, on_ubuntu: None) -> None:
    failing_import(monkeypatch, "torch", ImportError("libcuda.so.1: cannot open shared object file"))
    assert "ubuntu-drivers install" in look("torch").command


def test_a_version_that_rooftop_does_not_run_with(monkeypatch: pytest.MonkeyPatch, on_ubuntu: None) -> None:
    packages(
        monkeypatch,
        {"torch": "2.10.1", "numpy": "1.26.4", "rich": ""},
        {"rooftop": ["torch>=2.11", "numpy>=2.0", "rich>=13.9", 'plotly>=6.0; extra == "report"']},
    )
    torch_line, packages_line = look("torch"), look("Packages")
    assert (torch_line.status, torch_line.command) == ("broken", 'pip install --upgrade "torch>=2.11"')
    assert packages_line.status == "broken"
    assert packages_line.problem == "numpy is 1.26.4, needed: >=2.0; rich is not installed, needed: >=13.9"
    assert packages_line.command == 'pip install "numpy>=2.0" "rich>=13.9"'


def test_an_optional_package_is_absent_or_broken_and_never_needed(
    monkeypatch: pytest.MonkeyPatch, on_ubuntu: None
) -> None:
    asked = {"rooftop": ['warp-lang>=1.19; extra == "sparse"', 'av>=18,<19; extra == "media"']}
    packages(monkeypatch, {"plotly": "", "warp-lang": "1.19.0", "av": "18.0"}, asked)
    failing_import(monkeypatch, "warp", OSError("warp.so: cannot open shared object file"))
    monkeypatch.setitem(sys.modules, "av", SimpleNamespace())
    assert look("Charts") == Finding(
        "Charts", "absent", "not installed", "", 'pip install "rooftop[report]"', needed=False
    )
    warp = look("Warp")
    assert (warp.status, warp.command) == ("broken", 'pip install --force-reinstall "warp-lang==1.19.0"')
    assert not warp.needed
    assert look("PyAV") == Finding("PyAV", "works", "av 18.0", needed=False)
    packages(monkeypatch, {"av": "15.0"}, asked)
    assert look("PyAV") == Finding(
        "PyAV", "broken", "av 15.0", "Rooftop asks for av>=18,<19", 'pip install "rooftop[media]"', needed=False
    )


def test_requirements_apply_where_their_markers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [
        "numpy (>=2.0)",
        'here[some]==1.0; platform_system == "Linux" and platform_machine == "x86_64"',
        'elsewhere==1.0; platform_system == "Windows"',
        'either==1.0; platform_system == "Windows" or platform_system == "Linux"',
        "plain",
        'chart>=6; extra == "report"',
    ]
    packages(monkeypatch, {}, {"torch": asked})
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    expected = {"numpy": ">=2.0", "here": "==1.0", "either": "==1.0", "plain": ""}
    assert asked_by("torch") == expected
    assert asked_by("torch", extra="report") == {**expected, "chart": ">=6"}
    assert asked_by("no-such-package") == {}


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        ("2.13.0+cpu", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("3.6.0", "==3.6.0", True),
        ("3.6", "==3.6.0", True),
        ("3.6.1", "==3.6.0", False),
        ("3.6.1", "==3.6.*", True),
        ("4.0", ">=2.11,<4", False),
        ("1.0", "", True),
        ("", ">=1", False),
    ],
)
def test_versions_fit_by_their_release_numbers(version: str, specifier: str, expected: bool) -> None:
    assert fits(version, specifier) is expected


# ---- driver and CUDA ---------------------------------------------------------------------------------------------

NOT_FOUND = NVMLError("NVML Shared Library Not Found", 12)


def test_a_gpu_without_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_ubuntu: None, no_gpu: None) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    driver(monkeypatch, error=NOT_FOUND)
    machine(monkeypatch, tmp_path, ("0x8086", "0x030000"), ("0x10de", "0x030200"), ("0x10de", "0x040300"))
    finding = look("NVIDIA driver")
    assert finding.status == "broken"
    assert "1 NVIDIA GPU on PCI" in finding.problem
    assert "NVML Shared Library Not Found" in finding.problem
    assert finding.command.endswith("sudo ubuntu-drivers install && sudo reboot")
    monkeypatch.setattr(mending, "container", lambda: "docker")
    assert look("NVIDIA driver").command == "docker run --gpus all ..."


def test_a_container_that_was_not_given_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_gpu: None) -> None:
    driver(monkeypatch, error=NOT_FOUND)
    machine(monkeypatch, tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "version").write_text("NVRM version: ...")
    monkeypatch.setattr(mending, "container", lambda: "docker")
    finding = look("NVIDIA driver")
    assert (finding.status, finding.command) == ("broken", "docker run --gpus all ...")


def test_no_gpu_and_no_driver_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_ubuntu: None, no_gpu: None
) -> None:
    driver(monkeypatch, error=NOT_FOUND)
    machine(monkeypatch, tmp_path, ("0x8086", "0x030000"))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert look("NVIDIA driver") == Finding("NVIDIA driver", "absent", "neither a driver nor a GPU found")
    assert nothing("CUDA")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    finding = look("NVIDIA driver")
    assert finding.status == "absent"
    assert "torch is built for CUDA 13.0 and runs on the CPU" in finding.found
    assert finding.command == "", "a machine without a GPU needs no driver"


def test_a_driver_that_was_updated_under_its_kernel_module(monkeypatch: pytest.MonkeyPatch, on_ubuntu: None) -> None:
    driver(monkeypatch, error=NVMLError("Driver/library version mismatch", 18))
    finding = look("NVIDIA driver")
    assert (finding.status, finding.command) == ("broken", "sudo reboot")


def test_a_driver_too_old_for_torchs_cuda(monkeypatch: pytest.MonkeyPatch, on_ubuntu: None, no_gpu: None) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    driver(monkeypatch, cuda=12080)
    finding = look("NVIDIA driver")
    assert (finding.status, finding.found) == ("broken", "570.86.15, CUDA up to 12.8, 1 GPU")
    assert "torch is built for CUDA 13.0" in finding.problem
    assert "ubuntu-drivers install" in finding.command
    monkeypatch.setattr(torch.version, "cuda", "12.9")  # the same major version: compatible
    assert look("NVIDIA driver").status == "works"


def test_a_cpu_build_of_torch_beside_a_gpu(monkeypatch: pytest.MonkeyPatch, on_ubuntu: None, no_gpu: None) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    packages(monkeypatch, {}, {"rooftop": ["torch>=2.11"]})
    driver(monkeypatch, gpus=2)
    command = 'pip install --force-reinstall "torch>=2.11"'
    assert look("CUDA") == Finding("CUDA", "broken", "torch uses none of 2 GPUs", "torch is a CPU build", command)


def test_gpus_that_torch_cannot_reach(monkeypatch: pytest.MonkeyPatch, on_ubuntu: None, no_gpu: None) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    driver(monkeypatch)

    def init() -> None:
        raise RuntimeError(error)

    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    error = "Unexpected error. Error 802: system not yet initialized"
    finding = look("CUDA")
    assert (finding.status, finding.problem) == ("broken", f"RuntimeError: {error}")
    assert finding.command == "sudo systemctl start nvidia-fabricmanager"
    error = "No CUDA GPUs are available"
    assert look("CUDA").problem == f"RuntimeError: {error}"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")  # there is no such GPU
    finding = look("CUDA")
    assert (finding.status, finding.command) == ("broken", "unset CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # none, on purpose
    finding = look("CUDA")
    assert (finding.status, finding.command) == ("absent", "unset CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("capability", "built", "expected"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80"], True),  # a lower minor version
        ((8, 0), ["sm_89"], False),
        ((9, 0), ["sm_80"], False),
        ((12, 0), ["sm_90", "compute_90"], True),  # PTX
        ((12, 0), ["sm_90a", "compute_90a"], False),
        ((9, 0), ["sm_90a"], True),
        ((6, 1), ["sm_75", "compute_120"], False),
    ],
)
def test_machine_code_and_ptx_run_where_nvidia_says(
    capability: tuple[int, int], built: list[str], expected: bool
) -> None:
    assert runs_on(capability, built) is expected


def test_a_gpu_that_torch_is_not_built_for(monkeypatch: pytest.MonkeyPatch, gpu: None, on_ubuntu: None) -> None:
    def no_image(*args: Any, **keywords: Any) -> Any:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="New", major=14, minor=0)
    )
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    monkeypatch.setattr(torch, "arange", no_image)
    finding = look("GPUs")
    assert (finding.status, finding.found) == ("broken", "2 x New (sm_140)")
    assert finding.problem.startswith("cuda:0: torch is built for sm_80 sm_90, not for this GPU; cuda:1: ")
    assert finding.command == "pip install --upgrade torch"


def test_cudnn_hidden_by_another_one(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    def version() -> int:
        raise RuntimeError("cuDNN version incompatibility: ... one possibility is a conflict in LD_LIBRARY_PATH.")

    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/cuda/lib64")
    finding = look("cuDNN")
    assert (finding.status, finding.command) == ("broken", "unset LD_LIBRARY_PATH")


# ---- compilers ---------------------------------------------------------------------------------------------------


def test_triton_of_another_version_than_torch_asks_for(monkeypatch: pytest.MonkeyPatch, on_ubuntu: None) -> None:
    packages(monkeypatch, {"triton": "3.5.1"}, {"torch": ["filelock", "triton==3.6.0"]})
    command = 'pip install --force-reinstall "triton==3.6.0"'
    assert look("Triton") == Finding("Triton", "broken", "triton 3.5.1", "torch asks for triton==3.6.0", command)
    packages(monkeypatch, {"triton": ""}, {"torch": ["triton==3.6.0"]})
    finding = look("Triton")
    assert (finding.status, finding.command) == ("broken", 'pip install "triton==3.6.0"')


def test_triton_whose_kernel_fails(monkeypatch: pytest.MonkeyPatch, gpu: None, on_ubuntu: None) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(diagnosis, "_triton_kernel", lambda: 191.0)
    assert look("Triton").problem == "a kernel wrote 191.0, not 192"

    def no_libcuda() -> float:
        raise AssertionError("libcuda.so cannot found!\n")

    monkeypatch.setattr(diagnosis, "_triton_kernel", no_libcuda)
    finding = look("Triton")
    assert (finding.status, finding.command) == ("broken", "sudo ldconfig")
    monkeypatch.setattr(diagnosis, "_triton_kernel", lambda: 192.0)
    assert look("Triton").status == "works"


def test_no_c_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu: None, on_ubuntu: None) -> None:
    (tmp_path / "apt-get").write_text("#!/bin/sh\n")
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    finding = look("C compiler")
    assert (finding.status, finding.needed) == ("broken", True)
    assert finding.command == "sudo apt-get update && sudo apt-get install -y gcc"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert look("C compiler").status == "absent"  # without a GPU, nothing needs this part
    finding = look("torch.compile")
    assert (finding.status, finding.needed) == ("absent", False)
    assert finding.command == "sudo apt-get update && sudo apt-get install -y g++"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_c_compiler_that_does_not_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu: None) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    finding = look("C compiler")
    assert (finding.status, finding.found, finding.command) == ("broken", "no-such-compiler", "unset CC")
    monkeypatch.delenv("CC")
    assert look("C compiler").status == "works"
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))  # no headers there
    monkeypatch.delenv("CPATH", raising=False)
    finding = look("C compiler")
    assert finding.status == "broken"
    assert f"Python's headers in {tmp_path}" in finding.problem


# ---- folders and the rest ----------------------------------------------------------------------------------------


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path / "file" / "cache"))
    finding = look("Ceilings cache")
    assert finding.status == "broken"
    assert "measured again each time" in finding.problem
    assert finding.command.startswith("export ROOFTOP_CACHE=")


def test_small_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_ubuntu: None) -> None:
    monkeypatch.setattr(diagnosis, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=64 << 20))
    finding = look("Shared memory")
    assert (finding.status, finding.needed) == ("broken", False)
    assert finding.found.startswith("64 MiB")
    assert finding.command == f"sudo mount -o remount,size=8G {tmp_path}"
    monkeypatch.setattr(mending, "container", lambda: "docker")
    assert look("Shared memory").command == "docker run --shm-size=8g ..."
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=8 << 30))
    assert look("Shared memory").status == "works"


class Jupyter:
    """The queries to ipykernel and jupyter_client."""

    class NoSuchKernel(KeyError):
        """There is no kernel with that name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.python = ""
        packages(monkeypatch, {"ipykernel": "7.0"}, {})
        for name in ("ipykernel", "ipykernel.kernelspec", "jupyter_client", "jupyter_client.kernelspec"):
            monkeypatch.setitem(sys.modules, name, self)  # type: ignore[arg-type]

    def install(self, user: bool, kernel_name: str, display_name: str) -> str:
        assert user
        assert kernel_name == "rooftop"
        self.python = sys.executable
        return "/home/me/kernels/rooftop"

    def KernelSpecManager(self) -> Any:
        return self

    def get_kernel_spec(self, name: str) -> Any:
        if name != "rooftop" or not self.python:
            raise self.NoSuchKernel(name)
        return SimpleNamespace(argv=[self.python, "-m", "ipykernel_launcher"], resource_dir="/home/me/kernels/rooftop")


def test_a_jupyter_kernel_is_installed_and_found(monkeypatch: pytest.MonkeyPatch) -> None:
    jupyter = Jupyter(monkeypatch)
    finding = look("Jupyter kernel")
    assert (finding.status, finding.command) == ("absent", "rooftop doctor --install-kernel")
    assert install_kernel() == "/home/me/kernels/rooftop"
    assert look("Jupyter kernel").status == "works"
    jupyter.python = "/another/python"
    assert "/another/python, not this Python" in look("Jupyter kernel").found


def test_without_ipykernel_the_command_is_said(monkeypatch: pytest.MonkeyPatch, on_ubuntu: None) -> None:
    packages(monkeypatch, {"ipykernel": ""}, {})
    monkeypatch.setitem(sys.modules, "ipykernel.kernelspec", None)
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    finding = look("Jupyter kernel")
    assert (finding.status, finding.needed) == ("absent", False)
    assert finding.command == "pip install ipykernel && rooftop doctor --install-kernel"
    with pytest.raises(MissingExtraError, match="pip install ipykernel"):
        install_kernel()


def test_setuptools_can_be_imported_after_a_diagnosis(forked: Callable[[str], tuple[int, str, str]]) -> None:
    """setuptools mistakes a search for pip for a run of pip, and torch.compile imports setuptools."""
    pytest.importorskip("setuptools")
    program = """
for name in [name for name in sys.modules if name.partition(".")[0] in ("distutils", "setuptools")]:
    del sys.modules[name]
from rooftop.hardware import diagnose
diagnose()
import setuptools
"""
    status, _, errors = forked(program)
    assert status == 0, errors
