"""Packages built on torch are loaded in separate processes; incompatible ones are named with their remedy."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from rooftop.doctor import diagnosis, torch_extensions
from rooftop.doctor.diagnosis import diagnose
from rooftop.doctor.findings import Part
from rooftop.doctor.torch_extensions import extensions_part

LIBRARIES = Path(torch.__file__).parent / "lib"
RELEASE = torch.__version__.partition("+")[0]
LINE = Part("Built on torch", extensions_part)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages, the only one with packages built on torch."""
    true_distributions = metadata.distributions
    monkeypatch.setattr(metadata, "distributions", lambda: true_distributions(path=[str(tmp_path)]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    # The part of torch that compiled parts are linked against, because loading all of torch takes seconds.
    c10 = f"ctypes.CDLL({str(LIBRARIES / 'libc10.so')!r}, ctypes.RTLD_GLOBAL)"
    monkeypatch.setattr(torch_extensions, "CHILD", torch_extensions.CHILD.replace("import torch", c10))
    return tmp_path


def install(site: Path, name: str, init: str, source: str = "", asks: str = "torch", link: str = "-lc10") -> None:
    """A package with a compiled part that is linked as `link` says."""
    folder, info = site / name, site / f"{name}-1.0.dist-info"
    folder.mkdir()
    info.mkdir()
    (folder / "__init__.py").write_text(init)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {asks}\n")
    (site / "part.cpp").write_text(source)
    words = [
        "g++",
        "-shared",
        "-fPIC",
        str(site / "part.cpp"),
        "-o",
        str(folder / "_C.so"),
        f"-L{LIBRARIES}",
        f"-L{site}",
    ]
    subprocess.run([*words, "-Wl,--no-as-needed", *link.split()], check=True)
    (info / "RECORD").write_text(f"{name}/__init__.py,,\n{name}/_C.so,,\n")


def test_a_package_that_fits_works(site: Path) -> None:
    install(site, "fitting", "")
    install(site, "unrelated", "raise ImportError('not looked at')", link="-lm")
    (finding,) = diagnose([LINE])
    assert (finding.status, finding.found, finding.problem) == ("works", "fitting 1.0", "")


def test_nothing_is_said_where_nothing_is_built_on_torch(site: Path) -> None:
    assert diagnose([LINE]) == []


def test_a_build_for_cuda_beside_a_cpu_build(site: Path) -> None:
    subprocess.run(["g++", "-shared", "-o", str(site / "libtorch_cuda_gone.so"), "-x", "c++", "/dev/null"], check=True)
    install(
        site,
        "torchvision",
        "raise RuntimeError('operator torchvision::nms does not exist')",
        link="-lc10 -ltorch_cuda_gone",
    )
    (site / "libtorch_cuda_gone.so").unlink()
    install(site, "fitting", "")
    (finding,) = diagnose([LINE])
    assert (finding.status, finding.found) == ("broken", "fitting 1.0, torchvision 1.0")
    assert finding.problem.startswith(
        f"torchvision does not fit torch {torch.__version__}: _C.so does not load (libtorch_cuda_gone.so: cannot open"
    )
    assert '"torchvision==1.0"' in finding.command
    assert "--force-reinstall --no-deps" in finding.command


def test_symbols_of_another_torch(site: Path) -> None:
    source = "namespace c10 { void of_another_release(); }\nvoid go() { c10::of_another_release(); }\n"
    install(site, "xformers", "", source)
    (finding,) = diagnose([LINE])
    assert "xformers does not fit torch" in finding.problem
    assert "undefined symbol: _ZN3c1018of_another_releaseEv" in finding.problem


def test_a_part_for_something_else_is_not_torchs(site: Path) -> None:
    subprocess.run(["g++", "-shared", "-o", str(site / "libavutil_gone.so"), "-x", "c++", "/dev/null"], check=True)
    install(site, "torchaudio", "", link="-lc10 -lavutil_gone")
    (site / "libavutil_gone.so").unlink()
    (finding,) = diagnose([LINE])
    assert finding.status == "works"


def test_a_package_that_ends_its_process_does_not_end_the_doctor(site: Path) -> None:
    install(site, "crashing", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    install(site, "leaving", "raise SystemExit(3)")
    install(site, "quitting", "import os; os._exit(3)")
    (finding,) = diagnose([LINE])
    assert finding.problem == (
        "crashing ends the process that imports it (SIGSEGV); leaving cannot be imported (SystemExit: 3); "
        "quitting ends the process that imports it (exit status 3)"
    )
    assert "crashing" not in sys.modules
    assert "--no-build-isolation --no-binary crashing crashing && pip" in finding.command


def test_a_package_for_another_release_is_not_imported(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "torchvision", "", asks="torch==1.0.0")
    monkeypatch.setattr(torch_extensions.subprocess, "run", lambda *words, **options: pytest.fail("imported"))
    (finding,) = diagnose([LINE])
    assert finding.problem == f"torchvision asks for torch==1.0.0, and torch is {torch.__version__}"
    assert f'torchvision "torch=={RELEASE}"' in finding.command


def test_a_hanging_import_is_given_up(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "hanging", "import time; time.sleep(60)")
    monkeypatch.setattr(torch_extensions, "PATIENCE_S", 1)
    (finding,) = diagnose([LINE])
    assert finding.problem == "hanging was not imported within 1 s"


def test_triton_that_ends_its_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not diagnosis.version_of("triton"):
        pytest.skip("triton is not installed")
    (tmp_path / "triton.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    (finding,) = diagnose([part for part in diagnosis.PARTS if part.name == "Triton"])
    assert (finding.status, finding.problem) == ("broken", "importing it ends the process (SIGABRT)")
