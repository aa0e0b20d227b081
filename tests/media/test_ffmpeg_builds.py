"""`build_ffmpeg` with a small source tree like FFmpeg's: a configure script, a Makefile, six objects and a program.

The arguments of configure and the compiled files are recorded outside of the tree, which shows repeated work.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rooftop.errors import InputError
from rooftop.media import FFmpegBuildError, build_ffmpeg, ffmpeg_builds
from rooftop.media.ffmpeg_requirements import _asked, find_requirements

TOOLS = ("gcc", "make", "pkg-config", "sh")
pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, TOOLS)), reason="needs gcc, make and pkg-config: apt-get install gcc make pkg-config"
)

CONFIGURE = """#!/bin/sh
# nasm
# check_pkg_config ffnvcodec "ffnvcodec >= 9.1.23.1" "$headers" "" || check_pkg_config ffnvcodec "ffnvcodec < 9.1"
# enabled libx264 && require_pkg_config libx264 x264 "stdint.h x264.h" x264_encoder_encode
for word; do case $word in --prefix=*) prefix=${word#--prefix=};; esac; done
echo "$*" >> "$RECORD/configured"
[ -z "$NO_CONFIGURE" ] || { echo "ERROR: $NO_CONFIGURE not found"; exit 1; }
sed -e "s#@PREFIX@#$prefix#" -e "s#@SOURCE@#${0%/configure}#" "${0%/configure}/Makefile.in" > Makefile
"""
MAKEFILE = """
OBJECTS = 1.o 2.o 3.o 4.o 5.o 6.o
ffmpeg: $(OBJECTS)
	@printf "LD\\t%s\\n" $@; cat $(OBJECTS) > /dev/null; cp @SOURCE@/fftools/ffmpeg.sh $@
%.o:
	@printf "CC\\t%s\\n" $@; echo begun > $@; [ "$$SLOW" != $@ ] || sleep 300; \
	[ "$$BROKEN" != $@ ] && echo $@ >> $$RECORD/compiled && echo whole > $@
install: ffmpeg
	mkdir -p $(DESTDIR)@PREFIX@/bin
	cp ffmpeg $(DESTDIR)@PREFIX@/bin/
	[ -z "$$NO_INSTALL" ]
"""
PROGRAM = """#!/bin/sh
for word; do case "$word" in
  -version) echo "ffmpeg version 7.1-small Copyright"; exit;;
  -decoders) echo " V..... h264_cuvid x"; echo " V..... hevc_cuvid x"; exit;;
  -encoders) echo " V..... h264_nvenc x"; echo " V..... hevc_nvenc x"; exit;;
  -hwaccels) echo "Hardware acceleration methods:"; echo cuda; exit;;
esac; done
"""


class Place:
    """A source, headers and a prefix in a separate folder, with a record of what was done there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source, self.prefix = folder, folder / "small-7.1", folder / "installed"
        self.headers, self.build = folder / "headers", folder / "installed.build"
        for part in ("libavcodec", "fftools"):
            (self.source / part).mkdir(parents=True)
        self.write("small-7.1/configure", CONFIGURE)
        self.write("small-7.1/Makefile.in", MAKEFILE)
        self.write("small-7.1/fftools/ffmpeg.sh", PROGRAM)
        (self.headers / "include" / "ffnvcodec").mkdir(parents=True)
        self.write("headers/ffnvcodec.pc.in", "prefix=@@PREFIX@@\nName: ffnvcodec\nVersion: 12.1.14.0\n")
        self.write("tools/nasm", "#!/bin/sh\n")

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def record(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def files(self, folder: Path) -> dict[str, str]:
        return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    place = Place(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(tmp_path))
    for name in ("SLOW", "BROKEN", "NO_CONFIGURE", "NO_INSTALL"):
        monkeypatch.setenv(name, "")
    return place


def interrupt_at(name: str) -> Callable[[str, float], None]:
    def report(what: str, fraction: float) -> None:
        assert 0 <= fraction <= 1
        if what.endswith(name):
            raise KeyboardInterrupt

    return report


def test_a_build_is_installed_whole_and_the_source_stays_as_it_is(place: Place) -> None:
    before, seen = place.files(place.source), list[tuple[str, float]]()
    built = build_ffmpeg(
        place.source, place.prefix, headers=place.headers, jobs=1, report=lambda *said: seen.append(said)
    )
    assert built.new
    assert (built.ffmpeg, built.version) == (place.prefix / "bin" / "ffmpeg", "7.1-small")
    assert built.ffmpeg.read_text() == PROGRAM
    assert place.files(place.source) == before
    assert f"--prefix={place.prefix}" in place.record("configured")[0].split()
    assert {"--enable-cuvid", "--enable-nvdec", "--enable-nvenc"} <= set(place.record("configured")[0].split())
    assert [what for what, _ in seen] == [*(f"CC {n}.o" for n in range(1, 7)), "LD ffmpeg", "installing"]
    assert [fraction for _, fraction in seen] == sorted(fraction for _, fraction in seen)
    assert "CC\t3.o" in built.log.read_text()
    assert not (place.build / "staged").exists()


def test_a_second_run_has_nothing_to_do(place: Place) -> None:
    for new in (True, False):
        assert build_ffmpeg(place.source, place.prefix, headers=place.headers).new is new
    assert len(place.record("configured")) == 1
    assert len(place.record("compiled")) == 6
    shutil.rmtree(place.prefix)
    assert build_ffmpeg(place.source, place.prefix, headers=place.headers).new  # installed again, but not built again
    assert len(place.record("compiled")) == 6


def test_an_interrupted_build_goes_on_where_it_was(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was being compiled at the interruption is compiled again, whatever its state."""
    monkeypatch.setenv("SLOW", "4.o")
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        build_ffmpeg(place.source, place.prefix, headers=place.headers, jobs=1, report=interrupt_at("4.o"))
    assert time.monotonic() - started < 120
    assert place.record("compiled") == ["1.o", "2.o", "3.o"]
    assert not place.prefix.exists()
    monkeypatch.setenv("SLOW", "")
    build_ffmpeg(place.source, place.prefix, headers=place.headers, jobs=1)
    assert place.record("compiled") == [f"{number}.o" for number in range(1, 7)]
    assert len(place.record("configured")) == 1
    assert {path.read_text() for path in (place.build / "tree").glob("*.o")} == {"whole\n"}


def test_after_an_end_without_a_word_the_last_files_are_made_again(place: Place) -> None:
    """The state after a power failure: a truncated object that is newer than its source, and a state of "making"."""
    build_ffmpeg(place.source, place.prefix, headers=place.headers, jobs=1)
    old = time.time() - 3600
    for path in (place.build / "tree").iterdir():
        os.utime(path, (old, old))
    (place.build / "tree" / "5.o").write_text("who")
    state = json.loads((place.build / "state.json").read_text())
    (place.build / "state.json").write_text(json.dumps({**state, "making": old - 60}))
    build_ffmpeg(place.source, place.prefix, headers=place.headers, jobs=1)
    assert place.record("compiled")[6:] == ["5.o"]
    assert (place.build / "tree" / "5.o").read_text() == "whole\n"


def test_other_options_or_another_source_begin_anew(place: Place) -> None:
    build_ffmpeg(place.source, place.prefix, headers=place.headers)
    build_ffmpeg(place.source, place.prefix, headers=place.headers, minimal=True)
    assert [("--disable-everything" in line) for line in place.record("configured")] == [False, True]
    assert len(place.record("compiled")) == 12
    place.write("small-7.1/configure", CONFIGURE + "# 7.1.1\n")
    build_ffmpeg(place.source, place.prefix, headers=place.headers, minimal=True)
    assert len(place.record("compiled")) == 18


@pytest.mark.parametrize("where", ["NO_CONFIGURE", "BROKEN", "NO_INSTALL"])
def test_a_failure_leaves_what_was_installed_as_it_was(
    place: Place, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    build_ffmpeg(place.source, place.prefix, headers=place.headers)
    before = place.files(place.prefix)
    place.write("small-7.1/fftools/ffmpeg.sh", PROGRAM.replace("small", "newer"))
    monkeypatch.setenv(where, "4.o")
    with pytest.raises(FFmpegBuildError, match=r"failed with status \d+: the log is .*build\.log") as raised:
        build_ffmpeg(place.source, place.prefix, headers=place.headers, minimal=True, jobs=1)
    assert place.files(place.prefix) == before
    shown = {"NO_CONFIGURE": "ERROR: 4.o not found", "BROKEN": "CC\t4.o", "NO_INSTALL": "Error 1"}[where]
    assert any(shown in line for line in raised.value.details)
    assert raised.value.details[-1] in (place.build / "build.log").read_text()
    monkeypatch.setenv(where, "")
    assert build_ffmpeg(place.source, place.prefix, headers=place.headers, minimal=True).version == "7.1-newer"


def test_a_program_without_nvenc_is_not_installed(place: Place) -> None:
    place.write("small-7.1/fftools/ffmpeg.sh", PROGRAM.replace("hevc_nvenc", "libx265"))
    with pytest.raises(FFmpegBuildError, match="the built program has no hevc_nvenc"):
        build_ffmpeg(place.source, place.prefix, headers=place.headers)
    assert not place.prefix.exists()


def test_all_that_is_missing_is_named_at_once_with_what_installs_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place.folder / "tools" / "nasm").unlink()
    place.write("tools/apt-get", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(place.folder / "tools"))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    message = "5 tools or libraries for building FFmpeg are missing: a C compiler"
    with pytest.raises(FFmpegBuildError, match=message) as raised:
        build_ffmpeg(place.source, place.prefix)
    *lines, together = raised.value.details
    commands = [line.rpartition("install -y ")[2] for line in lines]
    assert commands == ["gcc libc6-dev", "make", "nasm", "pkg-config", "libffmpeg-nvenc-dev"]
    assert together == (
        "all at once: sudo apt-get update && "
        "sudo apt-get install -y gcc libc6-dev make nasm pkg-config libffmpeg-nvenc-dev"
    )
    assert not place.build.exists()


def test_headers_are_of_a_version_that_this_ffmpeg_takes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ffnvcodec 12.1.14.0" in find_requirements(place.source, place.headers).versions
    script = CONFIGURE.replace(">= 9.1.23.1", ">= 13.0").replace("< 9.1", ">= 12.9 ffnvcodec < 13")
    place.write("small-7.1/configure", script)
    (missing,) = find_requirements(place.source, place.headers).missing
    assert "version 12.1.14.0 is there" in missing.what
    with pytest.raises(InputError, match="has no nv-codec-headers"):
        find_requirements(place.source, place.source)


def test_libraries_are_used_where_they_are_there_and_named_where_not(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PKG_CONFIG_LIBDIR", str(place.folder / "pc"))
    found = find_requirements(place.source, place.headers)
    assert "--enable-libx264" not in found.options
    assert [lacking.thing for lacking in found.left_out] == ["libx264"]
    place.write("pc/x264.pc", "Name: x264\nDescription: x264\nVersion: 0.164\n")
    found = find_requirements(place.source, place.headers)
    assert {"--enable-libx264", "--enable-gpl"} <= set(found.options)
    assert found.left_out == ()


def test_the_version_of_a_library_is_what_the_source_asks_for() -> None:
    script = (
        'enabled libdav1d && require_pkg_config libdav1d "dav1d >= 0.5.0" "dav1d/dav1d.h" dav1d_version\n'
        'check_pkg_config libvpx_vp8_decoder "vpx >= 1.4.0" "vpx/vpx_decoder.h" vpx_codec_vp8_dx\n'
    )
    assert _asked("libdav1d", script) == ("dav1d >= 0.5.0",)
    assert _asked("libvpx", script) == ("vpx >= 1.4.0",)
    assert _asked("libx264", CONFIGURE) == ("x264",)
    assert _asked("libaom", script) == ()


def test_wrong_folders_are_refused_before_anything_is_done(place: Place) -> None:
    spaced = place.folder / "with space"
    shutil.copytree(place.source, spaced)
    other = place.write("other/letter.txt", "dear").parent
    configured = place.folder / "configured-in-place"
    shutil.copytree(place.source, configured)
    (configured / "config.h").write_text("")
    for source, prefix, said in (
        (spaced, place.prefix, "spaces or special characters"),
        (place.source, place.folder / "in stalled", "spaces or special characters"),
        (place.folder, place.prefix, "is not FFmpeg's source.*; .* is one"),
        (other, place.prefix, "is not FFmpeg's source:"),
        (other / "letter.txt", place.prefix, "is a file: unpack it"),
        (place.folder / "nowhere", place.prefix, "is not a folder"),
        (configured, place.prefix, "make -C .* distclean"),
        (place.source, other, "has other files"),
        (place.source, other / "letter.txt", "is a file: expected a new folder"),
        (place.source, place.source / "installed", "must not contain one another"),
    ):
        with pytest.raises(InputError, match=said):
            build_ffmpeg(source, prefix, headers=place.headers)
    with pytest.raises(InputError, match="0 jobs"):
        build_ffmpeg(place.source, place.prefix, headers=place.headers, jobs=0)
    assert not place.build.exists()
    assert place.record("configured") == []
    assert place.files(other) == {"letter.txt": "dear"}
    place.write("installed.build/letter.txt", "dear")
    with pytest.raises(InputError, match="is not the folder of an FFmpeg build"):
        build_ffmpeg(place.source, place.prefix, headers=place.headers)


def test_two_builds_of_one_prefix_do_not_meet(place: Place) -> None:
    build_ffmpeg(place.source, place.prefix, headers=place.headers)
    with (place.build / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(FFmpegBuildError, match="another process is building"):
            build_ffmpeg(place.source, place.prefix, headers=place.headers)
    assert not build_ffmpeg(place.source, place.prefix, headers=place.headers).new


def test_an_installation_that_was_ended_between_two_names_is_mended(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_ffmpeg(place.source, place.prefix, headers=place.headers)
    place.prefix.rename(place.build / "replaced")
    monkeypatch.setenv("NO_CONFIGURE", "anything")
    with pytest.raises(FFmpegBuildError):
        build_ffmpeg(place.source, place.prefix, headers=place.headers, minimal=True)
    assert (place.prefix / "bin" / "ffmpeg").read_text() == PROGRAM


@pytest.mark.parametrize(
    ("before", "expected"), [(None, "$ make\n"), ("a\n", "a\n$ make\n"), ("a\nhal", "a\nhal\n$ make\n")]
)
def test_a_log_goes_on_in_a_line_of_its_own(before: str | None, expected: str, tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    if before is not None:
        log.write_text(before)
    with ffmpeg_builds._appended(log) as file:
        file.write("$ make\n")
    assert log.read_text() == expected
