"""`rooftop media ffmpeg-check` and `ffmpeg-build`: what they print, their exit status, and the files they write."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from rooftop.cli.main import main
from rooftop.media import FFmpegAbility, FFmpegBuild, FFmpegBuildError, FFmpegReport

FOUND = FFmpegReport(
    path="/opt/ffmpeg/bin/ffmpeg",
    version="7.1",
    configuration=("--enable-nvdec", "--enable-nvenc"),
    driver="580.65",
    gpus=("NVIDIA H200", "NVIDIA H200"),
    abilities=(
        FFmpegAbility("library", "libcuda.so.1", "", "works", "580.65, CUDA up to 13.0"),
        FFmpegAbility("decode", "h264", "h264", "works"),
        FFmpegAbility("decode", "h264, 10 bits", "h264_cuvid", "fails", "Codec h264_cuvid is not supported"),
        FFmpegAbility("decode", "av1", "av1_cuvid", "not built in"),
        FFmpegAbility("filter", "sobel_cuda", "", "not tried", "its expected output is unknown"),
    ),
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The ffmpeg that was checked; the result is `FOUND`."""
    asked: list[object] = []

    def abilities(ffmpeg: object, report: object) -> FFmpegReport:
        asked.append(ffmpeg)
        return FOUND

    monkeypatch.setattr("rooftop.cli.media_ffmpeg.ffmpeg_abilities", abilities)
    return asked


def test_each_trial_is_a_row(asked: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["media", "ffmpeg-check", "--ffmpeg", "/opt/ffmpeg/bin/ffmpeg"]) == 0
    assert asked == [Path("/opt/ffmpeg/bin/ffmpeg")]
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "/opt/ffmpeg/bin/ffmpeg, FFmpeg 7.1",
        "GPUs: NVIDIA H200, NVIDIA H200 (driver 580.65)",
        "configuration: --enable-nvdec --enable-nvenc",
        "library  ✓  libcuda.so.1               works: 580.65, CUDA up to 13.0",
        "decode   ✓  h264           h264        works",
        "         ✗  h264, 10 bits  h264_cuvid  fails: Codec h264_cuvid is not supported",
        "         -  av1            av1_cuvid   not built in",
        "filter   ?  sobel_cuda                 not tried: its expected output is unknown",
    ]


def test_json_says_the_same(asked: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ffmpeg.json"
    path.write_text("older")
    assert main(["media", "ffmpeg-check", "--json", str(path)]) == 0
    assert "✓  h264" in capsys.readouterr().out
    assert json.loads(path.read_text()) == json.loads(json.dumps(asdict(FOUND)))
    assert list(tmp_path.iterdir()) == [path]
    assert main(["media", "ffmpeg-check", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text())
    assert main(["media", "ffmpeg-check", "--json", str(tmp_path / "nowhere" / "ffmpeg.json")]) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_without_ffmpeg_the_exit_status_is_1_and_of_a_wrong_path_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["media", "ffmpeg-check"]) == 1
    assert "rooftop: error: ffmpeg was not found; install it with" in capsys.readouterr().err
    assert main(["media", "ffmpeg-check", "--ffmpeg", str(tmp_path / "ffmpeg")]) == 2
    assert "is not a program" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="needs ffmpeg: apt-get install ffmpeg")
def test_the_ffmpeg_of_this_machine_is_reported_with_or_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for trials in ("CODECS", "FILTERS", "DEVICES"):
        monkeypatch.setattr(f"rooftop.media.ffmpeg_checks.{trials}", ())
    assert main(["media", "ffmpeg-check"]) == 0
    assert "device   " in capsys.readouterr().out


def test_a_build_is_reported_with_what_was_left_out(
    asked: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[tuple[tuple[object, ...], dict[str, object]]] = []
    left_out = ("a software encoder of HEVC: apt-get install -y libx265-dev",)

    def build(*arguments: object, report: object, **options: object) -> FFmpegBuild:
        called.append((arguments, options))
        return FFmpegBuild(Path("/opt/ffmpeg/bin/ffmpeg"), "7.1", True, left_out, Path("/opt/ffmpeg.build/build.log"))

    monkeypatch.setattr("rooftop.cli.media_ffmpeg.build_ffmpeg", build)
    words = ["--source", "src", "--prefix", "/opt/ffmpeg", "--headers", "nv", "--jobs", "3", "--minimal"]
    assert main(["media", "ffmpeg-build", *words]) == 0
    assert called == [((Path("src"), Path("/opt/ffmpeg")), {"headers": Path("nv"), "jobs": 3, "minimal": True})]
    printed = capsys.readouterr()
    assert printed.out.startswith("built /opt/ffmpeg/bin/ffmpeg, FFmpeg 7.1; log: /opt/ffmpeg.build/build.log\n")
    assert "✗  h264, 10 bits  h264_cuvid" in printed.out
    assert printed.err == "left out: a software encoder of HEVC: apt-get install -y libx265-dev\n"
    assert asked == [Path("/opt/ffmpeg/bin/ffmpeg")]


def test_a_failed_build_shows_the_end_of_its_log_and_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(*_: object, **__: object) -> FFmpegBuild:
        raise FFmpegBuildError("make failed with status 2: the log is build.log", ["CC x.o", "x.c:1: error: no"])

    monkeypatch.setattr("rooftop.cli.media_ffmpeg.build_ffmpeg", build)
    assert main(["media", "ffmpeg-build", "--source", "src", "--prefix", "out"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "CC x.o",
        "x.c:1: error: no",
        "rooftop: error: make failed with status 2: the log is build.log",
    ]


def test_a_folder_that_is_no_source_is_a_wrong_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["media", "ffmpeg-build", "--source", str(tmp_path), "--prefix", str(tmp_path / "out")]) == 2
    assert f"{tmp_path} is not FFmpeg's source:" in capsys.readouterr().err
    assert main(["media", "ffmpeg-build", "--source", str(tmp_path)]) == 2
    assert list(tmp_path.iterdir()) == []
