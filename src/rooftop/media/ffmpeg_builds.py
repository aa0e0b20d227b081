"""Build FFmpeg from source for NVIDIA's video engines.

Object files, log and build state are in PREFIX.build, next to the install folder PREFIX, never in the source. The next
call continues an interrupted build; if its options, tools or source differ, the build starts from the beginning. When
everything is built and the new program has listed its decoders and encoders, the complete new folder is renamed to
PREFIX. If this is interrupted after an earlier PREFIX was moved away, the next call moves that PREFIX back.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO

from rooftop.errors import InputError
from rooftop.hardware.cpus import usable_cpus
from rooftop.media.errors import FFmpegBuildError
from rooftop.media.ffmpeg_checks import identity
from rooftop.media.ffmpeg_requirements import Requirements, build_environment, find_requirements, lines
from rooftop.media.ffmpeg_trials import Trials
from rooftop.user_paths import user_path

MARK = ".rooftop-ffmpeg.json"  # this file marks PREFIX as a build that may be replaced, and names its source
PLAIN_PATH = re.compile(r"[\w./@+-]+")  # characters that are safe in paths for FFmpeg's configure and for make
SHOWN_LINES = 15  # lines of the log shown if a build fails
UNSURE_S = 60.0  # files written within this time before a power failure may be incomplete
PRESENT = {"decoders": ("h264_cuvid", "hevc_cuvid"), "encoders": ("h264_nvenc", "hevc_nvenc"), "devices": ("cuda",)}
COMMON = ("--disable-doc", "--disable-debug", "--disable-ffplay")

# For `minimal`: only video (sound is copied), from files and pipes.
SOFTWARE = "rawvideo,mpeg1video,mpeg2video,mpeg4,mjpeg,ffv1,libvpx*,libaom*"
MINIMAL = {
    "decoder": f"{SOFTWARE},h264,hevc,vp8,vp9,av1,vc1,libdav1d,*_cuvid",
    "encoder": f"{SOFTWARE},wrapped_avframe,libx264,libx265,libsvtav1,*_nvenc",
    "hwaccel": "*_nvdec",
    "parser": "h264,hevc,vp8,vp9,av1,mpegvideo,mpeg4video,mjpeg,vc1,aac,ac3,mpegaudio,opus",
    "demuxer": "mov,matroska,avi,mpegts,mpegps,ivf,h264,hevc,m4v,mjpeg,rawvideo,image2",
    "muxer": "mov,mp4,matroska,webm,avi,mpegts,ivf,h264,hevc,rawvideo,image2,null",
    "protocol": "file,pipe",
    "filter": (
        "scale,format,null,crop,pad,split,overlay,transpose,trim,setpts,setparams,fps,select,yadif,bwdif,thumbnail,"
        "hwupload,hwdownload,*_cuda"
    ),
}


@dataclass(frozen=True)
class FFmpegBuild:
    """The result of `build_ffmpeg`.

    Attributes:
        ffmpeg: the program.
        version: the program's own version text.
        new: whether anything was built or installed; False if everything existed already.
        left_out: optional tools and libraries that are missing, each with its install command.
        log: log of configuring and building.
    """

    ffmpeg: Path
    version: str
    new: bool
    left_out: tuple[str, ...]
    log: Path


def build_ffmpeg(
    source: str | os.PathLike[str],
    prefix: str | os.PathLike[str],
    *,
    headers: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    minimal: bool = False,
    report: Callable[[str, float], None] = lambda what, fraction: None,
) -> FFmpegBuild:
    """Configure, build, check and install FFmpeg with cuvid, nvdec, nvenc, and every optional library on this machine.

    Args:
        source: FFmpeg's source, unpacked; nothing is written there.
        prefix: the install folder: new, empty, or from an earlier call. The folder PREFIX.build, next to the
            install folder, keeps the objects and the log, and may be deleted afterwards.
        headers: nv-codec-headers, unpacked or installed; None uses the headers that pkg-config finds.
        jobs: parallel processes; None for one per CPU that this process may use.
        minimal: whether to build only video, from files and pipes. The build then takes some minutes of one core
            instead of half an hour.
        report: called with (the current activity, fraction done).

    Raises:
        InputError: a folder does not have the expected content, or its path has spaces or other special characters.
        FFmpegBuildError: a tool or library is missing (`details` lists all of them), or a step fails (`details` has the
            end of the log). An earlier installation is unchanged.
    """
    source, prefix = _checked_source(Path(source)), _checked_prefix(Path(prefix))
    folder = prefix.with_name(f"{prefix.name}.build")
    _refuse_inside(source, prefix)
    if jobs is not None and jobs < 1:
        raise InputError(f"{jobs} jobs: expected at least 1")
    headers = None if headers is None else _plain(Path(headers), "nv-codec-headers")
    needs = find_requirements(source, headers)
    if needs.missing:
        names = "; ".join(each.what for each in needs.missing)
        raise FFmpegBuildError(
            f"{len(needs.missing)} tools or libraries for building FFmpeg are missing: {names}",
            lines(needs.missing),
        )
    arguments = (f"--prefix={prefix}", *COMMON, *needs.options, *(_minimal_options() if minimal else ()))
    with _Workshop(folder, source, prefix, headers) as shop:
        shop.configure(arguments, _key(source, arguments, needs))
        new = shop.make(jobs or usable_cpus(), report)
        if new or not shop.installed():
            report("installing", 0.97)
            shop.install()
            new = True
        ffmpeg = prefix / "bin" / "ffmpeg"
        return FFmpegBuild(ffmpeg, identity(ffmpeg)[0], new, tuple(lines(needs.left_out)), shop.log_path)


class _Workshop:
    """The folder in which one FFmpeg is built, by one process at a time, and the state of the build on disk."""

    def __init__(self, folder: Path, source: Path, prefix: Path, headers: Path | None) -> None:
        self.folder, self.source, self.prefix = folder, source, prefix
        self.tree, self.staged, self.replaced = folder / "tree", folder / "staged", folder / "replaced"
        self.log_path, self.state_path = folder / "build.log", folder / "state.json"
        if folder.exists() and not self.state_path.exists() and any(folder.iterdir()):
            raise InputError(f"{folder} is not the folder of an FFmpeg build: move it away, or choose another --prefix")
        folder.mkdir(parents=True, exist_ok=True)
        self.environment = build_environment(headers, folder / "pkgconfig")
        self.state: dict[str, Any] = {}

    def __enter__(self) -> _Workshop:
        import fcntl  # Windows lacks fcntl, but the rest of this package works there

        self._lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise FFmpegBuildError(f"another process is building in {self.folder}: wait until it ends") from error
        with suppress(OSError, ValueError):  # no state, or a truncated one: build everything again
            self.state = json.loads(self.state_path.read_text())
        self._save()
        self.log = _appended(self.log_path)
        if self.replaced.exists() and not self.prefix.exists():  # interrupted between the two renames of `install`
            self.replaced.rename(self.prefix)
        return self

    def __exit__(self, *_: object) -> None:
        self.log.close()
        self._lock.close()

    def configure(self, arguments: Sequence[str], key: str) -> None:
        """Run FFmpeg's `configure`, unless it has already run with the same arguments, tools and source."""
        if self.state.get("key") == key and self.state.get("configured"):
            self._drop_unsure()
            return
        self._save(key=key, arguments=list(arguments), configured=False, making=0.0)
        shutil.rmtree(self.tree, ignore_errors=True)
        self.tree.mkdir()
        self._step("configure", (str(self.source / "configure"), *arguments))
        self._save(configured=True)

    def make(self, jobs: int, report: Callable[[str, float], None]) -> bool:
        """Run make, to compile everything that is not compiled yet. Return whether there was anything to compile."""
        left = self._left_to_make()
        if left == 0:
            return False
        self._save(making=time.time())
        done = 0

        def count(line: str) -> None:
            nonlocal done
            if re.match(r"[A-Z0-9]+\t", line):  # CC	libavcodec/h264dec.o
                done += 1
                report(line.strip().replace("\t", " "), 0.05 + 0.9 * min(1.0, done / left))

        # without this, a later make would treat the incomplete output of a failed or killed compiler as complete
        delete = "--eval=.DELETE_ON_ERROR:"
        try:
            self._step("make", ("make", f"-j{jobs}", delete), count)
        finally:
            self._save(making=0.0)
        return True

    def install(self) -> None:
        """Install FFmpeg to a temporary folder, check that its program runs, and rename the folder to `prefix`."""
        shutil.rmtree(self.staged, ignore_errors=True)
        self._step("make install", ("make", "install", f"DESTDIR={self.staged}"))
        whole = self.staged / self.prefix.relative_to(self.prefix.anchor)
        self._check(whole / "bin" / "ffmpeg")
        (whole / MARK).write_text(
            json.dumps({"key": self.state["key"], "arguments": self.state["arguments"]}, indent=1)
        )
        shutil.rmtree(self.replaced, ignore_errors=True)
        if self.prefix.exists():
            self.prefix.rename(self.replaced)
        try:
            whole.rename(self.prefix)
        except OSError:
            if self.replaced.exists():
                self.replaced.rename(self.prefix)
            raise
        shutil.rmtree(self.replaced, ignore_errors=True)
        shutil.rmtree(self.staged, ignore_errors=True)

    def installed(self) -> bool:
        """Whether the prefix contains an FFmpeg that was built from the same source and configuration."""
        with suppress(OSError, ValueError):
            of = json.loads((self.prefix / MARK).read_text())["key"]
            return bool(of == self.state["key"]) and (self.prefix / "bin" / "ffmpeg").exists()
        return False

    def _check(self, ffmpeg: Path) -> None:
        try:
            version, _ = identity(ffmpeg)
            with closing(Trials(ffmpeg, version, timeout_s=60)) as trials:
                lists = {kind: getattr(trials, kind) for kind in PRESENT}
        except InputError as error:
            raise FFmpegBuildError(f"the built program does not run: {error}; the log is {self.log_path}") from error
        absent = [name for kind, names in PRESENT.items() for name in names if name not in lists[kind]]
        if absent:
            raise FFmpegBuildError(f"the built program has no {', '.join(absent)}; the log is {self.log_path}")

    def _left_to_make(self) -> int:
        """The number of files that `make` still has to make."""
        done = subprocess.run(
            ("make", "-n"), cwd=self.tree, env=self.environment, capture_output=True, text=True, errors="replace"
        )
        if done.returncode:
            return 1  # `make` will report the error
        return len(re.findall(r'^(?:@|\s)*printf "[A-Z0-9]+\\t', done.stdout, re.MULTILINE))

    def _drop_unsure(self) -> None:
        """After a power failure or kill -9, delete the files that `make` wrote less than `UNSURE_S` before the newest
        file. Some of them may be incomplete, and `make` would treat them as complete."""
        since = float(self.state.get("making", 0.0))
        if since == 0.0:
            return
        files = [(path.stat().st_mtime, path) for path in self.tree.rglob("*") if path.is_file()]
        newest = max((written for written, _ in files), default=0.0)
        for written, path in files:
            if written > max(since, newest - UNSURE_S):
                path.unlink()

    def _step(self, name: str, words: Sequence[str], each_line: Callable[[str], None] = lambda line: None) -> None:
        self.log.write(f"$ {' '.join(words)}\n")
        last: deque[str] = deque(maxlen=SHOWN_LINES)
        with _running(words, self.tree, self.environment, self._lock) as process:
            assert process.stdout is not None
            for line in process.stdout:
                self.log.write(line)
                last.append(line.rstrip())
                each_line(line)
        self.log.flush()
        if process.returncode:
            raise FFmpegBuildError(f"{name} failed with status {process.returncode}: the log is {self.log_path}", last)

    def _save(self, **news: object) -> None:
        self.state |= news
        partial = self.state_path.with_suffix(".partial")
        partial.write_text(json.dumps(self.state, indent=1))
        partial.replace(self.state_path)


@contextmanager
def _running(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], lock: IO[str]
) -> Iterator[subprocess.Popen[str]]:
    """Start a process. If the block is left early, end the process and all its child processes; the program `make` then
    deletes incomplete files.

    The child processes inherit the lock. So if only this process is killed, no second build starts while the child
    processes still run.
    """
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        pass_fds=(lock.fileno(),),
    )
    try:
        yield process
        process.wait()
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        raise
    finally:
        if process.stdout is not None:
            process.stdout.close()


def _minimal_options() -> Iterator[str]:
    yield from ("--disable-everything", "--disable-autodetect", "--disable-network", "--enable-bsfs")
    for kind, names in MINIMAL.items():
        yield f"--enable-{kind}={names}"


def _key(source: Path, arguments: Sequence[str], needs: Requirements) -> str:
    """A hash of the source's path, release and configure script, the arguments of configure, the versions of libraries,
    and the compiler flags. If the hash changes, a build must start from the beginning."""
    release = [path.read_text(errors="replace") for name in ("RELEASE", "VERSION") if (path := source / name).is_file()]
    flags = [os.environ.get(name, "") for name in ("CFLAGS", "LDFLAGS", "PKG_CONFIG_PATH")]
    script = hashlib.sha256((source / "configure").read_bytes()).hexdigest()
    parts = [str(source), script, release, list(arguments), list(needs.versions), flags]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# ---- folders ---------------------------------------------------------------------------------------------------------


def _plain(path: Path, what: str) -> Path:
    """Return the absolute path. Raise `InputError` if a shell or make would not read the path as one word."""
    path = user_path(path).resolve()
    if not PLAIN_PATH.fullmatch(str(path)):
        raise InputError(
            f"{what} in {str(path)!r}: FFmpeg cannot be built with spaces or special characters in a path; expected "
            "only letters, digits and . _ - + @ /"
        )
    return path


def _appended(path: Path) -> TextIO:
    """Open a log to append on a new line, because a killed process may have left an incomplete line."""
    with path.open("a+b") as log:
        log.seek(-min(1, log.tell()), os.SEEK_END)
        if log.read(1) not in (b"", b"\n"):
            log.write(b"\n")
    return path.open("a", encoding="utf-8")


def _checked_source(path: Path) -> Path:
    source = _plain(path, "source")
    if source.is_file():
        raise InputError(f"{source} is a file: unpack it, and pass the folder that has FFmpeg's configure")
    if not source.is_dir():
        raise InputError(f"{source} is not a folder: expected the source of FFmpeg")
    if not _is_ffmpeg(source):
        below = next((each for each in sorted(source.iterdir()) if each.is_dir() and _is_ffmpeg(each)), None)
        hint = f"; {below} is one" if below else ""
        raise InputError(f"{source} is not FFmpeg's source: expected its configure and libavcodec/{hint}")
    if (source / "config.h").exists() or (source / "ffbuild" / "config.mak").exists():
        raise InputError(
            f"{source} was configured in place, so it cannot be built in another folder: make -C {source} distclean"
        )
    return source


def _is_ffmpeg(folder: Path) -> bool:
    return (folder / "configure").is_file() and (folder / "libavcodec").is_dir()


def _checked_prefix(path: Path) -> Path:
    prefix = _plain(path, "prefix")
    if prefix.parent == prefix:
        raise InputError(f"{prefix} is the root of the file system: expected a new folder")
    if prefix.exists() and not prefix.is_dir():
        raise InputError(f"{prefix} is a file: expected a new folder")
    if prefix.is_dir() and any(prefix.iterdir()) and not (prefix / MARK).exists():
        raise InputError(
            f"{prefix} has other files, which the installation would delete: expected a new folder, such as "
            f"{prefix}/ffmpeg"
        )
    return prefix


def _refuse_inside(source: Path, prefix: Path) -> None:
    if prefix.is_relative_to(source) or source.is_relative_to(prefix):
        raise InputError(
            f"the prefix {prefix} and the source {source} must not contain one another: choose a prefix elsewhere"
        )
