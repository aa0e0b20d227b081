"""`ffmpeg_abilities` describes FFmpeg correctly: it distinguishes correct frames from wrong ones, and each reason is
FFmpeg's own.

The real FFmpeg's software simulates hardware: a script in between replaces `mpeg4_cuvid` by `mpeg4`, and can corrupt
the frames.
"""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from rooftop.errors import InputError, MissingExtraError
from rooftop.media import FFmpegReport, ffmpeg_abilities
from rooftop.media.ffmpeg_checks import _driver_library
from rooftop.media.ffmpeg_trials import (
    CODECS,
    FILTERS,
    FRAMES,
    Trials,
    levels,
    levels_of_picture,
    picture,
    reason_in,
    unlike,
)

FFMPEG = shutil.which("ffmpeg")
needs_ffmpeg = pytest.mark.skipif(FFMPEG is None, reason="needs ffmpeg: apt-get install ffmpeg")
Found = tuple[FFmpegReport, list[tuple[str, float]], Path]
MPEG4 = next(codec for codec in CODECS if codec.name == "mpeg4")


def has_cuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The abilities of the real FFmpeg, the reported progress, and the folder of temporary files."""
    folder, progress = tmp_path_factory.mktemp("temporary"), list[tuple[str, float]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setattr("rooftop.media.ffmpeg_checks.DEVICES", ("cuda", "vaapi", "drm"))
        found = ffmpeg_abilities(codecs=["mpeg4"], report=lambda what, fraction: progress.append((what, fraction)))
    return found, progress, folder


@needs_ffmpeg
def test_software_is_found_to_work_and_nothing_is_left_behind(report: Found) -> None:
    found, progress, folder = report
    rows = {(each.part, each.what, each.way): each.status for each in found.abilities}
    assert rows["encode", "mpeg4", "mpeg4"] == "works"
    assert rows["decode", "mpeg4", "mpeg4"] == "works"
    assert {part for part, _, _ in rows} == {"library", "device", "decode", "encode", "filter"}
    assert found.version
    assert [fraction for _, fraction in progress] == sorted(fraction for _, fraction in progress)
    assert progress[0] == ("cuda", 0.0)
    assert list(folder.iterdir()) == []


@needs_ffmpeg
@pytest.mark.skipif(has_cuda(), reason="there is a driver")
def test_without_a_driver_nothing_of_nvidia_works_and_each_failure_has_a_reason(report: Found) -> None:
    found, _, _ = report
    of_nvidia = [
        each
        for each in found.abilities
        if "cuda" in f"{each.what} {each.way}" or each.way.endswith("_cuvid") or each.what.startswith("libnv")
    ]
    assert len(of_nvidia) > 10
    assert {each.status for each in of_nvidia} <= {"fails", "not built in"}
    assert all(each.note for each in found.abilities if each.status == "fails")
    assert found.gpus == ()


@pytest.mark.gpu
def test_on_a_gpu_the_driver_is_found_and_its_absent_ffmpeg_is_named() -> None:
    if FFMPEG is None:
        with pytest.raises(MissingExtraError, match="ffmpeg was not found;"):
            ffmpeg_abilities()
        return
    found = ffmpeg_abilities(codecs=["h264", "hevc"])
    rows = {(each.part, each.what): each for each in found.abilities}
    assert found.gpus
    assert rows["library", "libcuda.so.1"].status == "works"
    assert rows["library", "libcuda.so.1"].note.startswith(found.driver)


# ---- right and wrong frames --------------------------------------------------------------------------------------

Played = Callable[..., Trials]


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Played]:
    """Trials of an FFmpeg whose arguments are changed: words are replaced, or omitted if replaced by None."""
    made: list[Trials] = []

    def play(**words: str) -> Trials:
        cases = "\n".join(f'    {name}) set -- "$@" {instead};;' for name, instead in words.items())
        script = tmp_path / f"ffmpeg-{len(made)}"
        script.write_text(
            "#!/bin/sh\ncount=$#\nwhile [ $count -gt 0 ]; do\n  word=$1; shift; count=$((count - 1))\n"
            f'  case "$word" in\n{cases}\n    *) set -- "$@" "$word";;\n  esac\ndone\nexec {FFMPEG} "$@"\n'
        )
        script.chmod(0o755)
        made.append(Trials(script, "5.1", timeout_s=120))
        made[-1].decoders += ("mpeg4_cuvid",)
        made[-1].encoders += ("mpeg4_nvenc",)
        return made[-1]

    yield play
    for each in made:
        each.close()


@needs_ffmpeg
def test_a_decoder_works_if_its_frames_are_right_in_value_number_and_order(played: Played) -> None:
    """Each key replaces the output `pipe:1`, so that arguments for the output come before it."""
    expected = {
        "pipe:1": "works",
        '-vf "lutyuv=y=val+5:u=val+5:v=val+5" pipe:1': "10 of 10 frames are wrong, by 5 of 255 levels on average",
        '-vf "lutyuv=y=val+1" pipe:1': "works",
        "-frames:v 9 pipe:1": "9 frames come out, not 10",
        "-vf reverse pipe:1": "10 of 10 frames are wrong, by",
        "-vf null,nonsense pipe:1": "No such filter: 'nonsense'",
    }
    real = played()
    clip, _ = real.make_clip(MPEG4)
    assert clip is not None
    right, software = real.decode_by_software(MPEG4, clip)
    assert software.status == "works"
    assert right is not None
    for output, outcome in expected.items():
        row = played(**{"mpeg4_cuvid": "mpeg4", "pipe:1": output}).decode_by_cuvid(MPEG4, clip, right)
        assert row.status == ("works" if outcome == "works" else "fails"), row
        assert row.note.startswith("" if outcome == "works" else outcome), row


@needs_ffmpeg
def test_a_silent_way_back_to_software_is_no_success(played: Played) -> None:
    """Without the arguments that request the device, FFmpeg decodes all frames correctly, but in software."""
    trials = played(**{"-hwaccel": "", "-hwaccel_output_format": "", "cuda": ""})
    clip, _ = trials.make_clip(MPEG4)
    assert clip is not None
    row = trials.decode_by_device(MPEG4, clip, "cuda", levels_of_picture(8))
    assert (row.status, row.note) == ("fails", "cuda does not decode this here: FFmpeg falls back to software")


@needs_ffmpeg
def test_an_encoder_works_if_what_it_made_is_still_like_the_picture(played: Played) -> None:
    assert played(mpeg4_nvenc="mpeg4 -q:v 2").encode_by_nvenc("mpeg4_nvenc", 8).status == "works"
    spoilt = played(mpeg4_nvenc="mpeg4 -q:v 2 -vf negate").encode_by_nvenc("mpeg4_nvenc", 8)
    assert spoilt.status == "fails"
    assert "10 of 10 frames are wrong" in spoilt.note


@needs_ffmpeg
def test_a_filter_works_if_it_does_what_its_twin_does(played: Played) -> None:
    trial = next(each for each in FILTERS if each.name == "scale_cuda")
    graph = "'format=yuv420p,hwupload,scale_cuda=160:120,hwdownload,format=yuv420p'"
    device = {"-init_hw_device": "", "cuda=d": "", "-filter_hw_device": "", "d": ""}
    for instead, status in (("scale=160:120:flags=bilinear", "works"), ("scale=160:120,vflip", "fails")):
        trials = played(**device, **{graph: instead})
        trials.filters += ("scale_cuda",)
        assert trials.filter_on_device(trial).status == status


@needs_ffmpeg
def test_where_ffmpeg_has_no_encoder_or_decoder_pyav_makes_and_reads_the_clip(played: Played) -> None:
    pytest.importorskip("av")
    trials = played(mpeg4_cuvid="mpeg4")
    trials.encoders = ()
    trials.decoders = ("mpeg4_cuvid",)
    clip, made = trials.make_clip(MPEG4)
    assert made.status == "not built in"
    assert made.note.endswith("the clip was made by PyAV's mpeg4")
    assert clip is not None
    right, software = trials.decode_by_software(MPEG4, clip)
    assert (software.status, software.note) == ("not built in", "mpeg4; the reference frames are PyAV's")
    assert right is not None
    assert trials.decode_by_cuvid(MPEG4, clip, right).status == "works"


def test_of_an_exact_codec_no_sample_may_be_far_off() -> None:
    """A single wrong sample hardly changes a frame's average."""
    right = levels_of_picture(8)
    got = right.copy()
    got[3, 17] += 3
    assert unlike(got, right, 2) == "1 of 10 frames are wrong, by 3 of 255 levels at most"
    assert unlike(got, right, 2, on_average=True) == ""
    assert [codec.title for codec in CODECS if codec.exact][:4] == ["h264", "h264, 10 bits", "hevc", "hevc, 10 bits"]


def test_raw_frames_are_planes_in_levels() -> None:
    """NV12 alternates the two planes of chroma, and P010 stores its ten bits in the upper bits. Frames in either format
    contain the planes of the picture."""
    for bits, wide, shift in ((8, "nv12", 0), (10, "p010le", 6)):
        planes = picture(bits)
        luma = 320 * 240
        chroma = np.stack([planes[:, luma : luma * 5 // 4], planes[:, luma * 5 // 4 :]], axis=2).reshape(FRAMES, -1)
        data = (np.concatenate([planes[:, :luma], chroma], axis=1) << shift).tobytes()
        np.testing.assert_array_equal(levels(data, wide), levels_of_picture(bits))
        assert len(levels(data[:-1], wide)) == FRAMES - 1  # the incomplete rest is not a frame
    assert abs(levels_of_picture(8) - levels_of_picture(10)).max() <= 0.5
    assert all(abs(a - b).mean() > 10 for a, b in zip(levels_of_picture(8), levels_of_picture(8)[1:], strict=False))


# ---- reasons, time limits, wrong calls ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "[AVHWDeviceContext @ 0x5] [error] Cannot load libcuda.so.1\n[AVHWDeviceContext @ 0x5] [error] Could not\n"
            "[error] Device creation failed: -1.\n[h264 @ 0x5] [error] No device available for decoder\n",
            "Cannot load libcuda.so.1",
        ),
        (
            "[AVHWDeviceContext @ 0x5] [verbose] Cannot open DRM render node.\n[error] Device creation failed: -5.\n",
            "Cannot open DRM render node",
        ),
        (
            "[av1 @ 0x5] [error] Your platform has none\n[AVHWDeviceContext @ 0x5] [error] Cannot load libcuda.so.1\n",
            "Cannot load libcuda.so.1",
        ),
        ("[out#0 @ 0x5] [h264_nvenc @ 0x6] [error] No capable devices found\n", "No capable devices found"),
        ("[warning] never mind\nffmpeg: error while loading shared libraries: libnpp.so\n", "ffmpeg: error while load"),
        ("", "exit status 1"),
    ],
)
def test_the_reason_is_the_first_cause_that_ffmpeg_names(log: str, reason: str) -> None:
    assert reason_in(log, 1).startswith(reason)


def fake(folder: Path, script: str) -> Path:
    path = folder / "ffmpeg"
    path.write_text(f"#!/bin/sh\n{script}")
    path.chmod(0o755)
    return path


LISTS = """
for word; do case "$word" in
  -version) echo "ffmpeg version 7.1 Copyright"; exit;;
  -encoders) echo " V..... mpeg4 MPEG-4"; exit;;
  -decoders|-filters) exit;;
  -hwaccels) echo "Hardware acceleration methods:"; echo cuda; exit;;
esac; done
"""


def test_a_trial_that_does_not_end_is_ended(tmp_path: Path) -> None:
    with closing(Trials(fake(tmp_path, LISTS + "exec sleep 60"), "7.1", timeout_s=60)) as trials:
        assert (trials.devices, trials.encoders) == (("cuda",), ("mpeg4",))
        trials.timeout_s = 0.3
        assert trials.open_device("cuda").note == "it did not finish within 0.3 s"
        clip, made = trials.make_clip(MPEG4)
    assert clip is None
    assert (made.status, made.note) == ("fails", "it did not finish within 0.3 s")


def test_a_crash_is_a_failure_of_that_trial_alone(tmp_path: Path) -> None:
    found = ffmpeg_abilities(fake(tmp_path, LISTS + "kill -SEGV $$"), codecs=["mpeg4"])
    rows = {(each.part, each.what): each for each in found.abilities}
    assert rows["device", "cuda"].note == "it was ended by signal 11"
    assert rows["decode", "mpeg4"].note == "no clip in this codec could be made: it was ended by signal 11"
    assert rows["filter", "scale_cuda"].status == "not built in"


def test_no_ffmpeg_is_said_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "apt-get").write_text("#!/bin/sh\n")
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingExtraError, match=r"ffmpeg was not found; install it: .*apt-get install -y ffmpeg"):
        ffmpeg_abilities()


def test_what_is_no_ffmpeg_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a program"):
        ffmpeg_abilities(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"is not an ffmpeg: it says 'no libnpp.so'"):
        ffmpeg_abilities(fake(tmp_path, "echo no libnpp.so >&2; exit 127"))
    with pytest.raises(InputError, match="codec 'h266' is not known: expected some of h264, hevc"):
        ffmpeg_abilities(fake(tmp_path, LISTS), codecs=["h266"])


def test_a_library_that_loads_is_told_from_one_that_does_not() -> None:
    assert _driver_library("libm.so.6").status == "works"
    absent = _driver_library("libnothing.so.1")
    assert (absent.status, absent.note) == ("fails", "cannot open shared object file: No such file or directory")
