"""Reading videos into tensors: frames a second of our reader, on NVDEC and on the CPU, compared with other libraries.

    python benchmarks/media.py [--out benchmarks/results/h200/media.json] [--only sizes streams access training]
    python benchmarks/media.py --cpu --only sizes --out benchmarks/results/cpu/media.json      cases without a GPU
    python benchmarks/media.py --quick --out quick.json        tiny, on the CPU, to test the script

Clips are generated first, with noise, so that there are bits to decode. Decoders are opened before a pass, which is
timed from the request of the first frame to the arrival of the last one. The better of two passes counts, and variants
are interleaved. The requested outputs are:

    nv12        the decoder's own format, on the GPU
    rgb         (3, H, W) uint8 on the GPU
    input       (3, 224, 224) float16 on the GPU, normalized as a network's input

`sizes` has one reader per video, and shows above which size NVDEC is faster than the CPU. `streams` has several readers
at once, each in a thread. `access` reads frames in any order. `training` runs steps of matrix products while clips for
the next steps are decoded. Each of these four cases runs in its own process. Libraries that are not installed are left
out with a message. torchcodec needs FFmpeg's shared libraries with their plain names (libavcodec.so.62) on
LD_LIBRARY_PATH. Links with these names to the libraries in PyAV's wheel suffice.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop.hardware import measure_ceilings
from rooftop.media import ClipDataset, ClipLoader, VideoReader
from rooftop.whole_files import write_json

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
INPUT: dict[str, Any] = {"resize": (224, 224), "dtype": torch.float16, "normalize": (MEAN, STD)}
FORMS: dict[str, dict[str, Any]] = {"nv12": {"output": "nv12"}, "rgb": {}, "input": INPUT}
PASSES = 2
WINDOW_S = 2.0
CASES = ("sizes", "streams", "access", "training")


class Video(NamedTuple):
    """A clip to generate."""

    name: str
    height: int
    width: int
    frames: int
    codec: str = "libx264"
    pixel_format: str = "yuv420p"


VIDEOS = (
    Video("h264-320x240", 240, 320, 300),
    Video("h264-640x360", 360, 640, 300),
    Video("h264-1280x720", 720, 1280, 300),
    Video("h264-1920x1080", 1080, 1920, 300),
    Video("h264-3840x2160", 2160, 3840, 60),
    Video("hevc-10-1920x1080", 1080, 1920, 120, "libx265", "yuv420p10le"),
)
LONG = Video("h264-1920x1080-long", 1080, 1920, 1800)
QUICK = (Video("h264-96x64", 64, 96, 12), Video("h264-64x48", 48, 64, 12))


def make(video: Video, folder: Path) -> Path:
    """Encode a moving pattern under noise, with two B-frames between other frames and a key frame every 60 frames."""
    import av

    path = folder / f"{video.name}.mp4"
    generator = np.random.default_rng(0)
    down, across = np.mgrid[: video.height, : video.width].astype(np.float32)
    pattern = 128 + 60 * np.sin(across / video.width * 9 + down / video.height * 5)
    pictures = [pattern + generator.normal(0, 6, pattern.shape) for _ in range(8)]
    pictures = [each.clip(0, 255).astype(np.uint8) for each in pictures]
    options = {"preset": "ultrafast", "crf": "28", "g": "60", "bf": "2"}
    if video.codec == "libx265":
        options = {"preset": "ultrafast", "x265-params": "log-level=none:crf=28:keyint=60"}
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(video.codec, rate=30, options=options)
        stream.height, stream.width, stream.pix_fmt = video.height, video.width, video.pixel_format
        planes = np.full((video.height * 3 // 2, video.width), 120, np.uint8)
        for number in range(video.frames):
            planes[: video.height] = np.roll(pictures[number % len(pictures)], number * 2, 1)
            frame = av.VideoFrame.from_ndarray(planes, format="yuv420p")
            container.mux(stream.encode(frame.reformat(format=video.pixel_format)))
        container.mux(stream.encode(None))
    return path


# ---- variants: each reads a video and yields numbers of frames as they arrive ----------------------------------

Pass = Callable[[], Iterator[int]]
Opened = Callable[[], Pass]  # a function that opens decoders and returns the pass


def ours(path: Path, form: str, device: str) -> Opened:
    """Our reader. Frames that the CPU decodes are copied to the GPU, if there is one."""

    def opened() -> Pass:
        reader = VideoReader(path, device, **FORMS[form])
        target = DEVICE if reader.device.type == "cpu" else None
        return lambda: (1 for frame in reader if target is None or frame.to(target) is not None)

    return opened


def bare_pyav(path: Path) -> Opened:
    """PyAV's frames in FFmpeg's own format, in host memory, without conversion."""

    def opened() -> Pass:
        import av

        container = av.open(str(path))
        container.streams.video[0].thread_type = "AUTO"
        return lambda: (1 for _ in container.decode(video=0))

    return opened


def pynvvideocodec(path: Path, form: str, threaded: bool) -> Opened:
    """PyNvVideoCodec's decoder, with or without its own thread. torch converts frames to a network's input, eight at a
    time."""
    import PyNvVideoCodec as nvc

    colours = {} if form == "nv12" else {"output_color_type": nvc.OutputColorType.RGBP}

    def opened() -> Pass:
        options: dict[str, Any] = {"gpu_id": 0, "use_device_memory": True, **colours}
        kind = nvc.ThreadedDecoder if threaded else nvc.SimpleDecoder
        decoder = kind(str(path), **({"buffer_size": 24} if threaded else {}), **options)

        def groups() -> Iterator[list[Tensor]]:
            if threaded:
                try:
                    while found := decoder.get_batch_frames(8):
                        yield [torch.from_dlpack(each) for each in found]
                finally:
                    decoder.end()
                return
            for start in range(0, len(decoder), 8):
                yield [torch.from_dlpack(decoder[each]) for each in range(start, min(start + 8, len(decoder)))]

        def through() -> Iterator[int]:
            for frames in groups():
                if form == "input":
                    as_input(torch.stack(frames))
                yield len(frames)

        return through

    return opened


def as_input(frames: Tensor) -> Tensor:
    """Convert (T, 3, H, W) uint8 to normalized (T, 3, 224, 224) float16 by torch."""
    small = F.interpolate(frames.half(), (224, 224), mode="bilinear", antialias=True).div_(255)
    mean, std = (torch.tensor(each, device=frames.device).half()[:, None, None] for each in (MEAN, STD))
    return small.sub_(mean).div_(std)


def torchcodec(path: Path, device: str) -> Opened:
    def opened() -> Pass:
        from torchcodec.decoders import VideoDecoder  # type: ignore[import-not-found]

        decoder = VideoDecoder(str(path), device=device, num_ffmpeg_threads=0)  # FFmpeg chooses the number
        return lambda: (1 for _ in decoder)

    return opened


def opencv(path: Path) -> Opened:
    def opened() -> Pass:
        import cv2

        capture = cv2.VideoCapture(str(path))

        def through() -> Iterator[int]:
            while capture.read()[0]:
                yield 1

        return through

    return opened


def variants_of(path: Path) -> dict[str, Opened]:
    """The variants, keyed by "library, requested output"."""
    found: dict[str, Opened] = {}
    for form in FORMS:
        if GPU:
            found[f"rooftop, NVDEC, {form}"] = ours(path, form, "cuda")
        if form != "nv12":
            found[f"rooftop, CPU, {form}"] = ours(path, form, "cpu")
    if GPU and installed("PyNvVideoCodec"):
        found["PyNvVideoCodec, rgb"] = pynvvideocodec(path, "rgb", threaded=False)
        for form in FORMS:
            found[f"PyNvVideoCodec threaded, {form}"] = pynvvideocodec(path, form, threaded=True)
    found["PyAV, frames in the host's memory"] = bare_pyav(path)
    if installed("torchcodec"):
        for device in ("cuda", "cpu") if GPU else ("cpu",):
            found[f"torchcodec, {device.upper()}, rgb"] = torchcodec(path, device)
    if installed("cv2"):
        found["OpenCV, bgr in the host's memory"] = opencv(path)
    return found


def installed(name: str) -> bool:
    """Whether a peer can be imported; if not, print a message once."""
    if name not in PEERS:
        try:
            __import__(name)
            PEERS[name] = True
        except Exception as error:
            print(f"{name} is left out: {type(error).__name__}: {str(error)[:120]}", file=sys.stderr)
            PEERS[name] = False
    return PEERS[name]


# ---- cases -----------------------------------------------------------------------------------------------------------


def rate_of(opened: Opened, frames: int) -> float:
    """Frames a second of one pass."""
    through = opened()
    settle()
    began = time.perf_counter()
    count = sum(through())
    settle()
    seconds = time.perf_counter() - began
    if count != frames:
        raise RuntimeError(f"{count} of {frames} frames")
    return frames / seconds


def settle() -> None:
    if GPU:
        torch.cuda.synchronize()


def sizes(paths: dict[Video, Path]) -> Iterator[dict[str, Any]]:
    for place, (video, path) in enumerate((video, path) for video, path in paths.items() if video != LONG):
        variants = variants_of(path)
        rates: dict[str, list[float]] = {name: [] for name in variants}
        # the smallest video has an additional pass 0, which compiles kernels
        for number in range(0 if place == 0 else 1, PASSES + 1):
            for name, opened in list(variants.items()):
                try:
                    rate = rate_of(opened, video.frames)
                except Exception as error:
                    print(f"{name} cannot read {video.name}: {error}", file=sys.stderr)
                    del variants[name], rates[name]
                    continue
                if number:
                    rates[name].append(rate)
        best = {name: max(each) for name, each in rates.items()}
        yield {"what": "sizes", **described(video, path), "frames_per_s": best}


def streams(paths: dict[Video, Path]) -> Iterator[dict[str, Any]]:
    """Frames a second of several streams, each in its own thread. NVDEC assigns each stream to one engine, so streams
    that share an engine end later."""
    video = next((each for each in paths if each.name == LONG.name), next(iter(paths)))
    path = paths[video]
    forms = ("rgb", "input")
    kinds = {f"rooftop, {form}": ours(path, form, "cuda" if GPU else "cpu") for form in forms}
    if GPU and installed("PyNvVideoCodec"):
        kinds |= {f"PyNvVideoCodec threaded, {form}": pynvvideocodec(path, form, threaded=True) for form in forms}
    for count in (1, 2) if not GPU else (1, 2, 4, 8, 16):
        rates = {name: at_once(opened, count) for name, opened in kinds.items()}
        yield {"what": "streams", **described(video, path), "streams": count, "frames_per_s": rates}


def at_once(opened: Opened, count: int) -> float:
    """Frames a second of all streams, counted once every stream has returned some frames. Streams that end start
    over."""
    passes = [opened() for _ in range(count)]
    given, over = [0] * count, threading.Event()

    def read(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()) if GPU else nullcontext():
            while not over.is_set():
                for frames in passes[number]():
                    given[number] += frames
                    if over.is_set():
                        break

    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(read, number) for number in range(count)]
        while min(given) < 24 and not any(each.done() for each in running):
            time.sleep(0.01)
        began, before = time.perf_counter(), sum(given)
        time.sleep(WINDOW_S if GPU else WINDOW_S / 4)
        found = (sum(given) - before) / (time.perf_counter() - began)
        over.set()
        for each in running:
            each.result()
    return found


def access(paths: dict[Video, Path]) -> Iterator[dict[str, Any]]:
    for video, path in paths.items():
        if video == LONG:
            continue
        places = np.random.default_rng(1).integers(0, video.frames, 12).tolist()
        took: dict[str, float] = {}
        for device in ("cuda", "cpu") if GPU else ("cpu",):
            reader = VideoReader(path, device, **INPUT)
            reader[0], len(reader)
            settle()
            began = time.perf_counter()
            for place in places:
                reader[place]
            settle()
            took[device] = 1e3 * (time.perf_counter() - began) / len(places)
        yield {"what": "access", **described(video, path), "ms_per_frame": took}


def training(paths: dict[Video, Path]) -> Iterator[dict[str, Any]]:
    """Time steps of about 30 ms that each use a batch of clips: steps alone, decoding alone, and both together. The
    steps run on a separate stream, and on the default stream, which FFmpeg uses, too."""
    video = next((each for each in paths if each.height == 1080), next(iter(paths)))
    clips = ClipDataset([paths[video]] * 4, frames=4, device="cuda" if GPU else "cpu", **INPUT)
    loader = ClipLoader(clips, batch=4, threads=7 if GPU else 2, ahead=4)
    size, products = (8192, 18) if GPU else (64, 2)
    x = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16 if GPU else torch.float32)
    wanted = min(len(loader), 40 if GPU else 2)

    def step() -> None:
        y = x
        for _ in range(products):
            y = F.normalize(y @ x)

    def timed(batches: bool, steps: bool, stream: Any = None) -> float:
        settle()
        began = time.perf_counter()
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            source = iter(loader) if batches else iter(range(wanted))
            for _ in range(wanted):
                next(source)
                if steps:
                    step()
        settle()
        return 1e3 * (time.perf_counter() - began) / wanted

    own = torch.cuda.Stream() if GPU else None
    timed(True, True)
    found = {"step_ms": timed(False, True), "clips_ms": timed(True, False), "both_ms": timed(True, True, own)}
    if GPU:
        found["both_on_default_stream_ms"] = timed(True, True)
    yield {"what": "training", **described(video, paths[video]), "frames_of_a_batch": 16, **found}


def apart(case: str, paths: dict[Video, Path]) -> Iterator[dict[str, Any]]:
    """Measure a case in a separate process. Threads that a library leaves running then cannot slow another case."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=send_rows, args=(case, paths, GPU, sending))
    process.start()
    sending.close()
    while True:
        try:
            yield receiving.recv()
        except EOFError:
            break
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{case}: its process ended with exit code {process.exitcode}")


def send_rows(case: str, paths: dict[Video, Path], gpu: bool, to: Connection) -> None:
    import av  # noqa: F401  # before the peers: torchcodec uses the FFmpeg that is already loaded

    global GPU, DEVICE
    GPU, DEVICE = gpu, "cuda" if gpu else "cpu"
    for row in globals()[case](paths):
        to.send(row)


def described(video: Video, path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    return {**video._asdict(), "mbit_per_s": 8 * size * 30 / video.frames / 1e6}


def main() -> None:
    global GPU, DEVICE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200/media.json"))
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--quick", action="store_true", help="a tiny run on the CPU, to test the script")
    parser.add_argument("--cpu", action="store_true", help="time only readers that decode on the CPU")
    options = parser.parse_args()
    if options.cpu:
        GPU, DEVICE = False, "cpu"
    elif not options.quick and not GPU:
        parser.error("needs an NVIDIA GPU; without one, give --cpu or --quick")
    ceilings = measure_ceilings(DEVICE)
    found: dict[str, Any] = {
        "environment": {"device": ceilings.device, "versions": dict(ceilings.versions)},
        "threads": torch.get_num_threads(),
        "results": [],
    }
    with tempfile.TemporaryDirectory(prefix="rooftop-media-") as folder:
        videos = QUICK if options.quick else (*VIDEOS, LONG) if "streams" in options.only else VIDEOS
        paths = {video: make(video, Path(folder)) for video in videos}
        for name in options.only:
            for row in globals()[name](paths) if options.quick else apart(name, paths):
                print(json.dumps(row), flush=True)
                found["results"].append(row)
                write_json(options.out, found)


GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
PEERS: dict[str, bool] = {}

if __name__ == "__main__":
    main()
