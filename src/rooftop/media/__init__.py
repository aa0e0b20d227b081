"""Video and photographs as tensors, and tensors as video.

    from rooftop.media import VideoReader, VideoWriter, read_images

    reader = VideoReader("walk.mp4", resize=(224, 224))
    for frame in reader: ...          # (3, 224, 224) uint8, one after another
    reader[100], reader[10:50:4]      # exact, even with B-frames and a variable frame rate

    for path, pixels in read_images(["holiday/"]): ...  # (3, H, W) uint8, decoded ahead

Video needs PyAV: `pip install "rooftop[media]"`. PyAV is imported when a file is first opened.
"""

from rooftop.media.clip_datasets import Clip, ClipBatch, ClipDataset, ClipLoader
from rooftop.media.colours import Colours
from rooftop.media.errors import (
    DamagedSoundError,
    DamagedVideoError,
    FFmpegBuildError,
    NoVideoDecoderError,
    VideoWriteError,
)
from rooftop.media.ffmpeg_builds import FFmpegBuild, build_ffmpeg
from rooftop.media.ffmpeg_checks import FFmpegReport, ffmpeg_abilities
from rooftop.media.ffmpeg_trials import FFmpegAbility
from rooftop.media.images import ImageDecoder, NamedImage, find_images, read_image, read_images
from rooftop.media.nvdec_decoders import release_decoders
from rooftop.media.nvjpeg import NoImageDecoderError
from rooftop.media.probing import AudioInfo, VideoInfo, probe
from rooftop.media.reading import TimedFrame, VideoReader
from rooftop.media.sounds import Sound, read_sound
from rooftop.media.writing import VideoWriter

__all__ = [
    "AudioInfo",
    "Clip",
    "ClipBatch",
    "ClipDataset",
    "ClipLoader",
    "Colours",
    "DamagedSoundError",
    "DamagedVideoError",
    "FFmpegAbility",
    "FFmpegBuild",
    "FFmpegBuildError",
    "FFmpegReport",
    "ImageDecoder",
    "NamedImage",
    "NoImageDecoderError",
    "NoVideoDecoderError",
    "Sound",
    "TimedFrame",
    "VideoInfo",
    "VideoReader",
    "VideoWriteError",
    "VideoWriter",
    "build_ffmpeg",
    "ffmpeg_abilities",
    "find_images",
    "probe",
    "read_image",
    "read_images",
    "read_sound",
    "release_decoders",
]
