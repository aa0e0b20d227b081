"""`read_sound` returns FFmpeg's samples, each at its time, and the sound before a damaged position."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.errors import InputError
from rooftop.media import DamagedSoundError, DamagedVideoError, Sound, VideoReader, VideoWriter, read_sound

av = pytest.importorskip("av")

SAMPLES = 40_000
some = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MakeSound = Callable[..., Path]


def noise(channels: int = 2, samples: int = SAMPLES) -> Tensor:
    """(C, N) in -0.8..0.8: low enough for every codec, and without repetition."""
    white = torch.randn(channels, 1, samples, generator=torch.Generator().manual_seed(0))
    window = torch.hann_window(65)[None, None]
    found = torch.nn.functional.conv1d(white, window / window.sum(), padding=32)[:, 0]
    return found / found.abs().max() * 0.8


@pytest.fixture(scope="session")
def make_sound(tmp_path_factory: pytest.TempPathFactory) -> MakeSound:
    """A file with `noise`, under this name in a folder of the session."""
    folder = tmp_path_factory.mktemp("sounds")

    def make(name: str, codec: str, rate_hz: int = 48_000, *, gap_at: int | None = None, gap: int = 0) -> Path:
        path = folder / name
        with av.open(str(path), "w") as container:
            stream = container.add_stream(codec, rate=rate_hz)
            stream.layout, stream.bit_rate = "stereo", 256_000
            for at, part in zip(range(0, SAMPLES, 4000), noise().split(4000, 1), strict=True):
                frame = av.AudioFrame.from_ndarray(part.contiguous().numpy(), format="fltp", layout="stereo")
                frame.pts = at if gap_at is None or at < gap_at else at + gap
                frame.sample_rate, frame.time_base = rate_hz, Fraction(1, rate_hz)
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        return path

    return make


EXACT = {  # largest errors with 8, 16 and 24 bits, and without rounding
    "u8.wav": ("pcm_u8", 1 / 250),
    "s16.wav": ("pcm_s16le", 1 / 32768),
    "s16.flac": ("flac", 1 / 32768),
    "s32.mkv": ("pcm_s32le", 1e-7),
    "float.mkv": ("pcm_f32le", 0.0),
    "double.mov": ("pcm_f64le", 0.0),
}


@pytest.mark.parametrize("name", EXACT)
def test_samples_that_were_not_compressed_with_loss_come_back(make_sound: MakeSound, name: str) -> None:
    codec, error = EXACT[name]
    sound = read_sound(make_sound(name, codec))
    assert (sound.rate_hz, sound.start_s, sound.samples.dtype) == (48_000, 0.0, torch.float32)
    assert sound.samples.shape == (2, SAMPLES)
    assert float((sound.samples - noise()).abs().max()) <= error


PADDED = {"aac.mp4": "aac", "aac.mkv": "aac", "opus.webm": "libopus", "opus.ogg": "libopus", "layer3.mp3": "libmp3lame"}


@pytest.mark.parametrize("name", PADDED)
def test_what_an_encoder_put_in_front_is_left_out_and_the_rest_is_what_ffmpeg_gives(
    make_sound: MakeSound, name: str
) -> None:
    path = make_sound(name, PADDED[name])
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray() for frame in container.decode(audio=0)]
    by_ffmpeg = torch.cat([torch.from_numpy(each) for each in frames], 1)
    sound = read_sound(path.read_bytes())
    assert sound.start_s == 0.0
    assert torch.equal(sound.samples, by_ffmpeg)
    # Nothing is shifted: no other lag is as similar to the written sound.
    written, taken = (torch.fft.rfft(each[0, :SAMPLES], 2 * SAMPLES) for each in (noise(), sound.samples))
    assert int(torch.fft.irfft(taken * written.conj()).argmax()) == 0


@some
@given(data=st.data())
@pytest.mark.parametrize(
    ("name", "codec"), [("part.wav", "pcm_s16le"), ("part.mkv", "aac"), ("part.mp3", "libmp3lame")]
)
def test_a_part_is_cut_to_the_sample(make_sound: MakeSound, data: st.DataObject, name: str, codec: str) -> None:
    path = make_sound(name, codec)
    whole = read_sound(path).samples
    first = data.draw(st.integers(0, whole.shape[1] - 1))
    last = data.draw(st.integers(first + 1, whole.shape[1] + 100))
    part = read_sound(path, first / 48_000, last / 48_000)
    assert torch.equal(part.samples, whole[:, first:last])
    assert round(part.start_s * 48_000) == first


def test_a_gap_is_silence_and_later_samples_keep_their_time(make_sound: MakeSound) -> None:
    sound = read_sound(make_sound("gap.mkv", "pcm_f32le", gap_at=12_000, gap=4800))  # whole milliseconds
    assert torch.equal(sound.samples[:, :12_000], noise()[:, :12_000])
    assert not sound.samples[:, 12_000:16_800].any()
    assert torch.equal(sound.samples[:, 16_800:], noise()[:, 12_000:])


def test_sound_that_begins_later_says_so(tmp_path: Path) -> None:
    path = tmp_path / "late.mkv"
    with av.open(str(path), "w") as container:
        video, audio = container.add_stream("libx264", rate=25), container.add_stream("pcm_s16le", rate=8000)
        video.height, video.width, video.pix_fmt, audio.layout = 32, 48, "yuv420p", "mono"
        for number in range(50):
            frame = av.VideoFrame(48, 32, "yuv420p")
            frame.pts, frame.time_base = number, Fraction(1, 25)
            container.mux(video.encode(frame))
        tone = av.AudioFrame.from_ndarray(torch.full((1, 4000), 0.5).numpy(), format="fltp", layout="mono")
        tone.sample_rate, tone.pts, tone.time_base = 8000, 8000, Fraction(1, 8000)
        container.mux([*video.encode(None), *audio.encode(tone), *audio.encode(None)])
    assert float(VideoReader(path).times[0]) == 0.0
    sound = read_sound(path)
    assert (sound.start_s, sound.samples.shape[1]) == (1.0, 4000)
    part = read_sound(path, 0.5, 1.25)
    assert (part.start_s, part.samples.shape[1]) == (1.0, 2000)
    for start_s, end_s in ((0.25, 0.75), (1.75, None)):
        with pytest.raises(InputError, match=r"no sound of .* from"):
            read_sound(path, start_s, end_s)


@some
@given(share=st.floats(0.3, 0.85))
@example(share=0.5)
@pytest.mark.parametrize(("name", "codec"), [("cut.wav", "pcm_s16le"), ("cut.mkv", "aac"), ("cut.flac", "flac")])
def test_a_file_that_was_cut_off_gives_what_is_left(make_sound: MakeSound, name: str, codec: str, share: float) -> None:
    content = make_sound(name, codec).read_bytes()
    whole = read_sound(content).samples
    cut = content[: int(share * len(content))]
    with pytest.raises(DamagedSoundError) as raised:
        read_sound(cut)
    left = raised.value.sound
    count = left.samples.shape[1]
    if name != "cut.mkv" and count:  # in AAC, the last block has only half of the overlapping sum
        assert torch.equal(left.samples, whole[:, :count])
    assert (raised.value.last_good_time or 0.0) == pytest.approx(left.start_s + count / 48_000)
    assert isinstance(raised.value, DamagedVideoError)
    assert count > share * SAMPLES - 12_000  # FFmpeg joins FLAC's last whole block, of 4608 samples, with the next
    early = read_sound(cut, 0.0, 0.01) if count > 2000 else None  # reads only sound before the damage
    assert early is None or torch.equal(early.samples, whole[:, :480])


@some
@given(data=st.data())
@pytest.mark.parametrize(("name", "codec"), [*PADDED.items(), ("wrong.wav", "pcm_s16le"), ("wrong.flac", "flac")])
def test_wrong_bytes_give_one_clear_error_or_sound(
    make_sound: MakeSound, data: st.DataObject, name: str, codec: str
) -> None:
    content = bytearray(make_sound(name, codec).read_bytes())
    for _ in range(data.draw(st.integers(1, 20))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        sound: Sound = read_sound(bytes(content))
    except InputError:
        return
    except DamagedSoundError as error:
        sound = error.sound
    assert sound.samples.shape[1] < 100 * SAMPLES


@pytest.mark.parametrize("length", [0, 0xFFFFFFFF])
def test_a_wav_file_that_was_streamed_and_names_no_length_is_whole(make_sound: MakeSound, length: int) -> None:
    content = bytearray(make_sound("streamed.wav", "pcm_s16le").read_bytes())
    for name in (b"RIFF", b"data"):
        at = content.index(name) + 4
        content[at : at + 4] = length.to_bytes(4, "little")
    assert read_sound(bytes(content)).samples.shape == (2, SAMPLES)


def test_times_that_jump_far_take_no_memory(make_sound: MakeSound) -> None:
    path = make_sound("jump.mkv", "pcm_f32le", gap_at=8000, gap=48_000 * 3600)
    with pytest.raises(DamagedSoundError, match=r"times jump by 3600\.000 s; it is intact up to 0\.167 s") as raised:
        read_sound(path)
    assert torch.equal(raised.value.sound.samples, noise()[:, :8000])


def test_what_has_no_sound_is_named(make_sound: MakeSound, tmp_path: Path) -> None:
    silent = tmp_path / "silent.mp4"
    with VideoWriter(silent, 25) as writer:
        writer.write(torch.zeros(3, 32, 48))
    (tmp_path / "words.mp3").write_text("no sound at all\n" * 100)
    with pytest.raises(InputError, match="has no sound, only video"):
        read_sound(silent)
    with pytest.raises(InputError, match="is not a sound or video that FFmpeg can read"):
        read_sound(tmp_path / "words.mp3")
    with pytest.raises(InputError, match="does not exist"):
        read_sound(tmp_path / "missing.wav")
    path = make_sound("one.wav", "pcm_s16le")
    with pytest.raises(InputError, match=r"track 1 of .*: it has 1 audio tracks, 0 to 0"):
        read_sound(path, track=1)
    for start_s, end_s in ((-1.0, None), (2.0, 1.0), (float("nan"), None)):
        with pytest.raises(InputError, match="expected a start of 0 or later"):
            read_sound(path, start_s, end_s)
