"""Join, cut and reorder transport streams at random. For each file, index, loop and FFmpeg must count the same frames,
or index and loop must report damage.

    python tests/media/joined_streams.py --files 1000 --seed 0

A frame by position must equal the loop's frame and have the same time; in a damaged file it may be reported as damaged.
The program prints violations; its exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent))

import av
import torch
from torch import Tensor

from conftest import write_video
from rooftop.media import DamagedVideoError, VideoReader

PIECE = 188  # bytes of a transport stream's packet
SETTINGS: list[dict[str, str]] = [{"bf": "0", "g": "5"}, {"bf": "2", "g": "8"}, {"bf": "3", "g": "30"}]


def made(folder: Path) -> list[bytes]:
    """Some streams, with and without frames out of order, whose clocks begin at different times."""
    found = []
    for number, options in enumerate(SETTINGS):
        for begin in (0, 7, 250):
            path = folder / f"{number}-{begin}.ts"
            ticks = [begin + n for n in range(18)]
            found.append(write_video(path, "libx264", frames=18, options=options, ticks=ticks).read_bytes())
    return found


def mixed(streams: list[bytes], seed: int) -> bytes:
    """Two to four streams: complete, cut off at a packet, with a few packets lost, or with two packets exchanged."""
    rng = random.Random(seed)
    parts = []
    for _ in range(rng.randint(2, 4)):
        stream = rng.choice(streams)
        pieces = [stream[at : at + PIECE] for at in range(0, len(stream), PIECE)]
        how = rng.choice(["whole", "whole", "whole", "begin", "end", "lost", "exchanged"])
        at = rng.randrange(3, len(pieces) - 1)
        if how == "begin":
            pieces = pieces[:3] + pieces[at:]
        elif how == "end":
            pieces = pieces[:at]
        elif how == "lost":
            del pieces[at : at + rng.randint(1, 4)]
        elif how == "exchanged":
            pieces[at], pieces[at + 1 - len(pieces)] = pieces[at + 1 - len(pieces)], pieces[at]
        parts.append(b"".join(pieces))
    return b"".join(parts)


def findings(content: bytes) -> list[str]:
    """The violations in a file."""
    frames: list[Tensor] = []
    times: list[float] = []
    told = None
    try:
        reader = VideoReader(content)
    except DamagedVideoError:
        return []  # not even one frame
    try:
        for frame in reader.timed():
            frames.append(frame.pixels)
            times.append(frame.time)
    except DamagedVideoError as error:
        told = error
    found = []
    if any(a >= b for a, b in pairwise(times)):
        found.append("times do not increase")
    if told is None:
        plain = by_ffmpeg(content)
        if reader.index.damage is not None:
            found.append(f"the loop is whole, the index says: {reader.index.damage}")
        elif not len(reader) == len(frames) == plain:
            found.append(f"the index has {len(reader)} frames, the loop {len(frames)}, FFmpeg {plain}")
    elif reader.index.damage is None:
        found.append(f"the loop says: {told}, the index nothing")
    for position in range(min(len(frames), len(reader))):
        try:
            pixels = reader[position]
        except DamagedVideoError:
            if told is None:
                found.append(f"frame {position} is damaged by position alone")
                break
            continue
        if not torch.equal(pixels, frames[position]):
            found.append(f"frame {position} is another by position")
            break
        if abs(float(reader.times[position]) - times[position]) > 1e-6:
            found.append(f"frame {position} has another time in the index")
            break
    return found


def by_ffmpeg(content: bytes) -> int:
    """The number of frames from the first key frame on."""
    count, started = 0, False
    with av.open(io.BytesIO(content)) as container:
        for packet in container.demux(video=0):
            started = started or packet.is_keyframe
            if started:
                count += len(packet.decode())
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        streams = made(Path(folder))
    wrong = 0
    for seed in range(options.seed, options.seed + options.files):
        for finding in findings(mixed(streams, seed)):
            wrong += 1
            print(f"{seed}: {finding}", flush=True)
    print(f"{options.files} files, {wrong} findings")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
