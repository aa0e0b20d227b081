"""Video as tensors, and tensors as video.

    from rooftop.media import VideoReader, VideoWriter

    reader = VideoReader("walk.mp4", resize=(224, 224))
    for frame in reader: ...          # (3, 224, 224) uint8, one after another
    reader[100], reader[10:50:4]      # exact, also with B-frames and a variable frame rate

Needs PyAV: `pip install "rooftop[media]"`. It is imported when a file is opened, not before.
"""

from rooftop.media.colours import Colours
from rooftop.media.errors import DamagedVideoError, FFmpegBuildError, NoVideoDecoderError, VideoWriteError
from rooftop.media.ffmpeg_builds import FFmpegBuild, build_ffmpeg
from rooftop.media.ffmpeg_checks import FFmpegReport, ffmpeg_abilities
from rooftop.media.ffmpeg_trials import FFmpegAbility
from rooftop.media.probing import AudioInfo, VideoInfo, probe
from rooftop.media.reading import TimedFrame, VideoReader
from rooftop.media.writing import VideoWriter

__all__ = [
    "AudioInfo",
    "Colours",
    "DamagedVideoError",
    "FFmpegAbility",
    "FFmpegBuild",
    "FFmpegBuildError",
    "FFmpegReport",
    "NoVideoDecoderError",
    "TimedFrame",
    "VideoInfo",
    "VideoReader",
    "VideoWriteError",
    "VideoWriter",
    "build_ffmpeg",
    "ffmpeg_abilities",
    "probe",
]
