"""C++ extensions, compiled in the background when they are first needed, and stored in the cache.

Installing Rooftop compiles nothing. Each extension has an equivalent in Python, which runs until the extension is
compiled, and on machines without a C++ compiler. `ROOFTOP_COMPILED_CALLS=0` disables all extensions. With
`ROOFTOP_COMPILED_CALLS=wait`, the first call that needs an extension waits until it is compiled.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from rooftop.torch_versions import torch_at_least

# maximum wait for another process that compiles the same module; compiling takes less than a minute on most machines
PATIENCE_S = 600

# Code of a separate process, which may outlive this process. The code compiles to a temporary file, and then renames
# the file to the module's path.
_BUILDER = """
import json, os, subprocess, sys
command, partial, path, failed, building = json.loads(sys.argv[1])
os.nice(10)
try:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    said = None if done.returncode == 0 else done.stdout
except OSError as error:  # the compiler cannot be run
    said = f"error: {error}".encode()
try:
    if said is None:
        os.replace(partial, path)
    else:
        with open(failed, "wb") as file:
            file.write(said)
finally:
    if os.path.exists(building):
        os.unlink(building)
"""


def asked() -> str:
    """The value of $ROOFTOP_COMPILED_CALLS. "0": use no extension; "1": compile in the background; "wait": wait for the
    compilation. If the variable is not set or empty, the value is "1". Any other value causes a warning and counts as
    "1", because a wrong setting must not make a call of an operator fail.
    """
    found = os.environ.get("ROOFTOP_COMPILED_CALLS") or "1"
    if found not in ("0", "1", "wait"):
        warnings.warn(f"ROOFTOP_COMPILED_CALLS={found} is ignored: expected 0, 1 or wait", stacklevel=3)
        return "1"
    return found


@cache
def compiler() -> tuple[str, ...] | None:
    """The command of the C++ compiler: $CXX, which may have options or a prefix as in `ccache g++`, or else g++, c++ or
    clang++. Return None if none of these compilers is installed.
    """
    for command in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        try:
            words = shlex.split(command)
        except ValueError:  # an unclosed quotation mark
            continue
        if words and (found := shutil.which(words[0])):
            return found, *words[1:]
    return None


class Extension:
    """A Python extension module in one C++ file with the headers in its folder. The file may use PyTorch.

    Args:
        name: name of the module. The C++ file gets this name as the macro ROOFTOP_MODULE.
        source: path of the C++ file.
    """

    def __init__(self, name: str, source: Path) -> None:
        self.name, self.source = name, source
        self._thread: threading.Thread | None = None

    @cached_property
    def path(self) -> Path:
        """The path of the compiled file, which differs for each version of the source, PyTorch and Python."""
        from rooftop.hardware.measuring import cache_folder

        sources = [each.read_text() for each in (self.source, *sorted(self.source.parent.glob("*.h")))]
        versions = (*sources, torch.__version__, sys.version, sysconfig.get_platform())
        key = hashlib.sha256(json.dumps(versions).encode()).hexdigest()[:24]
        suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
        return cache_folder() / "extensions" / f"{self.name}-{key}{suffix}"

    @property
    def failed(self) -> Path:
        """The path of the compiler's messages, a file that exists if the compilation failed."""
        return self.path.with_name(f"{self.path.name}.failed")

    def state(self) -> tuple[bool, str]:
        """Return whether the module can be used (now or after its compilation), and the reason as one line of text."""
        if asked() == "0":
            return False, "left out by ROOFTOP_COMPILED_CALLS=0"
        if self.path.exists():
            return True, f"compiled, {self.path}"
        if self.failed.exists():
            lines = self.failed.read_text(errors="replace").splitlines()
            first = next((line.strip() for line in lines if "error" in line), "the compiler failed")
            return False, f"{first}: see {self.failed}, and delete it to try again"
        command = compiler()
        if command is None:
            return False, "no C++ compiler"
        return True, f"to be compiled when it is first needed, by {shlex.join(command)}"

    def build(self) -> Any:
        """Compile the module unless the cache has it, and return it.

        Raises:
            RuntimeError: there is no C++ compiler, the compiler failed, or the cache cannot be written.
        """
        if (module := self._stored()) is not None:
            return module
        if compiler() is None:
            raise RuntimeError(f"{self.source.name} needs a C++ compiler: install g++, or set CXX to yours")
        try:
            self.failed.unlink(missing_ok=True)
            self._compile_once()
        except OSError as error:
            raise RuntimeError(f"{self.source.name} was not compiled: {error}") from error
        if not self.path.exists():
            raise RuntimeError(f"{self.source.name} was not compiled: {self.state()[1]}")
        return self._load()

    def ask(self, then: Callable[[Any], None], twin: str) -> None:
        """Call `then` with the module: now if the cache contains the module, else from a thread after the compilation.
        With `ROOFTOP_COMPILED_CALLS=wait`, compile the module before this method returns. If extensions are disabled or
        the compilation fails, `then` is not called.

        Args:
            twin: a clause for the warning about a failed compilation, which says what runs instead, such as "Python
                makes all calls".
        """
        how = asked()
        if how == "wait":
            try:
                then(self.build())
            except RuntimeError as error:  # a failed compilation must not make the user's call fail
                warnings.warn(f"ROOFTOP_COMPILED_CALLS=wait: {twin}, because {error}", stacklevel=3)
        elif how == "0":
            return
        elif (module := self._stored()) is not None:
            then(module)
        elif compiler() is not None and not self.failed.exists():
            name = f"rooftop-{self.name}"
            thread = threading.Thread(target=self._await, args=(then,), name=name, daemon=True)
            thread.start()
            self._thread = thread

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for the background compilation. Return True if the compilation has ended or never
        began.
        """
        if self._thread is not None:
            self._thread.join(min(max(0.0, seconds), threading.TIMEOUT_MAX))
        return self._thread is None or not self._thread.is_alive()

    def _await(self, then: Callable[[Any], None]) -> None:
        with suppress(OSError):  # the cache may be read-only, which `rooftop doctor` reports
            self._compile_once()
            if (module := self._stored(keep_error=True)) is not None:
                then(module)

    def _compile_once(self) -> None:
        """Compile the module, or wait until another process has compiled it."""
        end = time.monotonic() + PATIENCE_S
        while self._compiles_elsewhere() and time.monotonic() < end:
            time.sleep(0.5)
        if not self.path.exists() and not self.failed.exists():
            self._compile().wait()

    def _compiles_elsewhere(self) -> bool:
        """Whether another process is compiling the module. The method deletes the files of processes that
        were killed.
        """
        for building in self.path.parent.glob(f"{self.path.name}.*.building"):
            with suppress(FileNotFoundError), building.open("r+") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
                building.with_suffix(".partial").unlink(missing_ok=True)
                building.unlink()
        return False

    def _stored(self, keep_error: bool = False) -> Any:
        """The module from the cache, or None. A file that cannot be loaded, for example after a full disk, is
        deleted.
        """
        if not self.path.exists():
            return None
        try:
            return self._load()
        except ImportError as error:
            with suppress(OSError):
                self.path.unlink()
                if keep_error:  # the module was just compiled, so compiling it again would not help
                    self.failed.write_text(f"error: {error}")
            return None

    def _compile(self) -> subprocess.Popen[bytes]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial, building = (
            self.path.with_name(f"{self.path.name}.{os.getpid()}.{kind}") for kind in ("partial", "building")
        )
        text = json.dumps([self._command(partial), *map(str, (partial, self.path, self.failed, building))])
        quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        with building.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the new process inherits the lock, until it ends or is killed
            command, held = [sys.executable, "-c", _BUILDER, text], (lock.fileno(),)
            return subprocess.Popen(command, start_new_session=True, pass_fds=held, **quiet)

    def _command(self, made: Path) -> list[str]:
        root = Path(torch.__file__).parent
        include = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
        standard = "c++20" if torch_at_least(2, 12) else "c++17"
        libraries = [f"-L{root / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10", "-ldl"]
        return [
            *(compiler() or ()), "-shared", "-fPIC", "-fvisibility=hidden", "-O2", f"-std={standard}",
            f"-DROOFTOP_MODULE={self.name}", *(f"-I{each}" for each in include), str(self.source),
            "-o", str(made), *libraries,
        ]  # fmt: skip

    def _load(self) -> Any:
        spec = importlib.util.spec_from_file_location(self.name, self.path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
