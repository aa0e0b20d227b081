"""Damage videos in many ways and read each in a separate process. Only the documented errors may occur.

    python tests/media/fuzz.py --files 2000 --seed 0 --keep findings

Each file is one of the kinds of `conftest.py`. The same number and seed always damage it in the same way, and `--only
17` repeats one file. These count as findings:

- a process killed by the system or by its limits: 10 s of work, 4 GiB of address space more than at its start - 1 GiB
of memory more than at the start - an exception other than InputError, DamagedVideoError and (for a position) IndexError
- a frame, or samples of sound, from before the first wrong byte that differs from the whole file's at the same time

The program prints a report as JSON; its exit status is 1 if there are findings. The report also counts files with
missing frames from before the first wrong byte, such as frames that the decoder still held and dropped at the error.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import pickle
import random
import resource
import select
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import av
import numpy as np
import torch

import rooftop.media
from conftest import H264, KINDS, picture, write_video
from rooftop.errors import InputError
from rooftop.launch.numba_loops import numba_works
from rooftop.media import DamagedVideoError, VideoReader, VideoWriter, probe, read_sound
from rooftop.media.colours import Colours
from rooftop.media.decoding import Decoder
from rooftop.media.opening import Source

WORK_S, WAIT_S = 10, 300  # processor time, and wall-clock time on a machine with other users
MEMORY_BYTES = 1 << 30
ADDRESSES_BYTES = 4 << 30  # threads' stacks and heaps reserve address space, not memory
MOST_FRAMES = 400
LATE = 4  # frames that may wait for other frames, if packets have no times
NEXT_START_BYTES = {".ts": 188, ".h264": 8}  # bytes of the next packet, which mark the end of this one
Ranges = list[tuple[int, int]]


@dataclass
class Whole:
    """An undamaged file: its frames, and for each packet its end in the file and the time from which it is shown."""

    path: Path
    content: bytes
    frames: dict[int, str] = field(default_factory=dict)  # microseconds -> digest
    packets: list[tuple[int, float]] = field(default_factory=list)  # end in the file, seconds
    header: Ranges = field(default_factory=list)

    def fault_s(self, spoilt: Ranges) -> float:
        """All frames before this time are undamaged."""
        if any(
            start < end and first < last
            for first, last in spoilt
            for start, end in self.header
            if max(first, start) < min(last, end)
        ):
            return float("-inf")
        first = min(start for start, _ in spoilt)
        return min((at for end, at in self.packets if end > first), default=float("inf"))


# Mutations: functions from content and a random generator to other content and the ranges in which it differs.
Mutation = Callable[[bytes, random.Random], tuple[bytes, Ranges]]


def flip(content: bytes, chance: random.Random) -> tuple[bytes, Ranges]:
    """Flip single bits or bytes anywhere; in half of the cases near the beginning, which contains headers."""
    found, spoilt = bytearray(content), []
    reach = len(content) if chance.random() < 0.5 else min(len(content), 1024)
    for _ in range(chance.choice([1, 2, 5, 20, 100])):
        place = chance.randrange(reach)
        found[place] ^= chance.choice([1 << chance.randrange(8), chance.randrange(1, 256)])
        spoilt.append((place, place + 1))
    return bytes(found), spoilt


def cut(content: bytes, chance: random.Random) -> tuple[bytes, Ranges]:
    """Remove the end, or a part inside."""
    start = chance.randrange(len(content))
    end = len(content) if chance.random() < 0.5 else min(len(content), start + chance.choice([1, 13, 188, 1000]))
    return content[:start] + content[end:], [(start, len(content))]


def blank(content: bytes, chance: random.Random) -> tuple[bytes, Ranges]:
    start = chance.randrange(len(content))
    end = min(len(content), start + chance.choice([4, 64, 512, 4096]))
    return content[:start] + chance.choice([b"\0", b"\xff"]) * (end - start) + content[end:], [(start, end)]


def swap(content: bytes, chance: random.Random) -> tuple[bytes, Ranges]:
    size = min(chance.choice([16, 188, 512, 2048]), len(content) // 3)
    first = chance.randrange(len(content) - 2 * size)
    second = chance.randrange(first + size, len(content) - size)
    found = bytearray(content)
    found[first : first + size], found[second : second + size] = (
        content[second : second + size],
        content[first : first + size],
    )
    return bytes(found), [(first, first + size), (second, second + size)]


def repeat(content: bytes, chance: random.Random) -> tuple[bytes, Ranges]:
    """Repeat a part twice, or many times."""
    start = chance.randrange(len(content))
    part = content[start : start + chance.choice([32, 188, 1000])]
    return content[:start] + part * chance.choice([2, 3, 200]) + content[start:], [(start, len(content))]


NAMES = """
moov trak mdia minf stbl stsd stts ctts stss stsz stsc stco co64 mdat avc1 avcC hvc1 hvcC mp4v esds mp4a tkhd mdhd mvhd
elst edts sgpd sbgp moof traf trun tfhd mfra ftyp udta meta dref smhd
"""
BOXES = [name.encode() for name in NAMES.split()]  # boxes of MP4
IDS = """
1A45DFA3 18538067 114D9B74 1549A966 1654AE6B AE 63A2 E0 B0 BA 1F43B675 A3 A0 1C53BB6B BB 86 2AD7B1 4489 23E383 E1
1254C367 6D80 E7 9F 56AA 536E
"""
ELEMENTS = [bytes.fromhex(name) for name in IDS.split()]  # elements of Matroska
CHUNKS = [
    name.encode()
    for name in [
        "RIFF",
        "LIST",
        "hdrl",
        "avih",
        "strl",
        "strh",
        "strf",
        "movi",
        "idx1",
        "00dc",
        "00db",
        "vprp",
        "01wb",
        "JUNK",
    ]
]
LENGTHS = [
    bytes.fromhex(each)
    for each in ["FF", "01FFFFFFFFFFFFFF", "0100007FFFFFFFFF", "087FFFFFFF", "80", "84FFFFFFFF", "4000", "1FFFFFFF"]
]
HUGE = (0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0x40000000, 0x10000000, 0x00FFFFFF, 0xFFFF, 1, 0)


def declare(content: bytes, chance: random.Random) -> tuple[bytes, Ranges]:
    """Change a size, a count or a dimension in a header, mostly to far too large values."""
    found = bytearray(content)
    if content[4:8] == b"ftyp":
        places = _places(content, BOXES)
        at = chance.choice(places)
        place = chance.choice([at - 4, at - 4, *range(at + 4, at + 36, 4)])
        new = struct.pack(">I", chance.choice(HUGE))
    elif content[:4] == ELEMENTS[0]:
        names = [each for each in ELEMENTS if each in content]
        name = chance.choice(names)
        place = chance.choice(_places(content, [name])) + len(name)
        new = chance.choice(LENGTHS)
    elif content[:4] == b"RIFF":
        place = chance.choice(_places(content, CHUNKS)) + chance.choice([4, 4, *range(8, 56, 4)])
        new = struct.pack("<I", chance.choice(HUGE))
    else:  # the only sizes are within the packets
        place = chance.randrange(min(len(content), 600))
        new = struct.pack(">I", chance.choice(HUGE))
    place = max(0, min(place, len(content) - len(new)))
    found[place : place + len(new)] = new
    return bytes(found), [(place, place + len(new))]


def _places(content: bytes, names: list[bytes]) -> list[int]:
    """The positions of these names in the content."""
    places = []
    for name in names:
        at = content.find(name)
        while at >= 0 and len(places) < 10_000:
            places.append(at)
            at = content.find(name, at + 1)
    return places


MUTATIONS: tuple[Mutation, ...] = (flip, flip, cut, blank, swap, repeat, declare, declare)


def spoil(content: bytes, chance: random.Random) -> tuple[str, bytes, Ranges]:
    mutation = chance.choice(MUTATIONS)
    return (mutation.__name__, *mutation(content, chance))


def make_files(folder: Path) -> list[Path]:
    """The kinds of `conftest.py`, and MP4 files with their index in front and in fragments."""
    files = [write_video(folder / name, codec, **settings) for name, (codec, settings) in KINDS.items()]
    plain = write_video(folder / "plain.mp4", "libx264", options=H264)
    for name, flags in (("front.mp4", "faststart"), ("fragments.mp4", "frag_keyframe+empty_moov")):
        with av.open(str(plain)) as given, av.open(str(folder / name), "w", options={"movflags": flags}) as taken:
            stream = taken.add_stream_from_template(given.streams.video[0])
            for packet in given.demux(video=0):
                if packet.dts is not None:
                    packet.stream = stream
                    taken.mux(packet)
        files.append(folder / name)
    for name in ("sound.mp4", "sound.webm", "sound.avi"):
        codec = {".webm": "libvpx-vp9", ".avi": "mpeg4"}.get(Path(name).suffix, "libx264")
        with VideoWriter(folder / name, 25, codec) as writer:
            writer.write_sound(torch.sin(torch.arange(48_000.0) / 30).expand(2, -1), 48_000)
            for number in range(20):
                writer.write(torch.from_numpy(picture(number, 32, 48)).permute(2, 0, 1))
        files.append(folder / name)
    return files


def digest(pixels: torch.Tensor) -> str:
    return hashlib.blake2b(pixels.numpy().tobytes(), digest_size=12).hexdigest()


def describe(path: Path) -> Whole:
    """The description of an undamaged file, made in a child process, because the parent must have no threads."""
    content = path.read_bytes()
    whole = Whole(path, content)
    for pixels, at, _ in VideoReader(content).timed():
        whole.frames[round(at * 1e6)] = digest(pixels)
    times = sorted(whole.frames)
    next_start = NEXT_START_BYTES.get(path.suffix, 0)
    decoder = Decoder(Source(content))
    packets = [(each.pos, each.size, each.pts) for each in decoder.packets()]
    ends = [pos for pos, _, _ in packets[1:] if pos is not None] + [len(content)]
    if any(pos is None or pos < 0 for pos, _, _ in packets) or sorted(ends) != ends:  # consists only of packets
        ends, at = [], 0
        for _, size, _ in packets:
            at += size
            ends.append(at)
    for number, (end, (_, _, pts)) in enumerate(zip(ends, packets, strict=True)):
        if pts is None or not decoder.clocked:
            shown = times[min(max(0, number - LATE), len(times) - 1)] / 1e6
        else:
            shown = decoder.seconds(pts)
        whole.packets.append((end + next_start, shown))
    decoder.close()
    whole.header = _header(content)
    return whole


def _header(content: bytes) -> Ranges:
    """The place of the data on which all packets of an MP4 or an AVI file depend, if it is not in front of them."""
    found, at = [], 0
    if content[4:8] == b"ftyp":
        while at + 8 <= len(content):
            (size,) = struct.unpack(">I", content[at : at + 4])
            found.append((at, at + 16 if content[at + 4 : at + 8] == b"mdat" else at + size))
            at += max(size, 8)
    if content[:4] == b"RIFF":
        found.append((content.rfind(b"idx1"), len(content)))
    return found


def read_video(content: bytes) -> dict[str, Any]:
    """Run all kinds of reads on a file; return the errors by kind."""
    frames: dict[int, str] = {}
    errors: dict[str, tuple[str, str]] = {}
    last_good: float | None = None
    try:
        for number, (pixels, at, _) in enumerate(VideoReader(content).timed()):
            frames.setdefault(round(at * 1e6), digest(pixels))
            if number >= MOST_FRAMES:
                break
    except DamagedVideoError as error:
        errors["loop"] = (type(error).__name__, str(error))
        last_good = error.last_good_time
    except InputError as error:
        errors["loop"] = (type(error).__name__, str(error))
    try:
        reader = VideoReader(content)
        count = len(reader)
        for position in (count // 2, 0, -1):
            try:
                reader[position]
            except (DamagedVideoError, IndexError, InputError) as error:
                errors["position"] = (type(error).__name__, str(error))
        _ = reader.duration, reader.key_frames, reader.times
        probe(content)
    except (DamagedVideoError, InputError) as error:
        errors["index"] = (type(error).__name__, str(error))
    try:
        read_sound(content)
    except DamagedVideoError as error:
        errors["sound"] = (type(error).__name__, str(error))
    except InputError as error:
        if "has no sound" not in str(error):
            errors["sound"] = (type(error).__name__, str(error))
    return {"frames": frames, "errors": errors, "last_good_s": last_good}


@dataclass
class Outcome:
    """The outcome of one file."""

    result: Any = None
    failure: str | None = None
    wall_s: float = 0.0
    memory_bytes: int = 0  # growth since the start, or the total if the process died


def in_child(work: Callable[[], Any]) -> Outcome:
    """Run in a separate process with limits. An exception or the death of the process is a failure."""
    reading, writing = os.pipe()
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(work, writing)
    os.close(writing)
    received, ended = bytearray(), False
    while not ended and (left := began + WAIT_S - time.perf_counter()) > 0:
        if select.select([reading], [], [], left)[0]:
            part = os.read(reading, 1 << 16)
            received += part
            ended = not part
    os.close(reading)
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    outcome = Outcome(wall_s=time.perf_counter() - began, memory_bytes=usage.ru_maxrss * 1024)
    if not ended:
        outcome.failure = f"hangs: killed after {WAIT_S} s"
    elif os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        outcome.failure = f"dies of {name}" + (f" after {WORK_S} s of work" if name == "SIGXCPU" else "")
    else:
        outcome.result, outcome.failure, base = pickle.loads(received)
        outcome.memory_bytes -= base
    return outcome


def _child(work: Callable[[], Any], writing: int) -> None:
    """The child process; this function does not return."""
    status = 1
    try:
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        pages = Path("/proc/self/statm").read_text().split()  # address space, resident memory, ...
        there, base = (int(each) * resource.getpagesize() for each in pages[:2])
        resource.setrlimit(resource.RLIMIT_AS, (there + ADDRESSES_BYTES, most))
        resource.setrlimit(resource.RLIMIT_CPU, (WORK_S, WORK_S + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.enable()
        result: Any = None
        failure = None
        try:
            result = work()
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            failure = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
        message = pickle.dumps((result, failure, base))
        while message:
            message = message[os.write(writing, message) :]
        status = 0
    finally:
        os._exit(status)


def judge(whole: Whole, spoilt: Ranges, outcome: Outcome) -> list[str]:
    """The findings in an outcome."""
    if outcome.failure is not None:
        return [outcome.failure]
    findings = []
    if outcome.memory_bytes > MEMORY_BYTES:
        findings.append(f"{outcome.memory_bytes / 2**20:.0f} MiB of memory")
    frames, errors = outcome.result["frames"], outcome.result["errors"]
    fault = whole.fault_s(spoilt)
    before = {at: name for at, name in whole.frames.items() if at / 1e6 < fault - 1e-5}
    wrong = [at for at, name in before.items() if frames.get(at, name) != name]
    if wrong:
        findings.append(f"{len(wrong)} frames differ before the fault at {fault:.3f} s, first at {wrong[0] / 1e6:.3f}")
    last_good = outcome.result["last_good_s"]
    if last_good is not None and frames and abs(last_good - max(frames) / 1e6) > 1e-3:
        findings.append(f"the last good frame is said to be at {last_good:.3f} s, it is at {max(frames) / 1e6:.3f} s")
    if "loop" in errors and "cannot be decoded" in errors["loop"][1] and "\n" in errors["loop"][1]:
        findings.append("an error of more than one line")
    return findings


def lost(whole: Whole, spoilt: Ranges, outcome: Outcome) -> int:
    """The number of missing frames from before the fault, for a file that returned any."""
    frames, fault = {} if outcome.result is None else outcome.result["frames"], whole.fault_s(spoilt)
    return sum(at not in frames for at in whole.frames if at / 1e6 < fault - 1e-5) if frames else 0


def load_loops() -> None:
    """Load the loops that compute colours, for 8 bits and more, once for all forked processes."""
    if not numba_works():
        return
    from rooftop.media.plane_loops import Plane, planes_to_rgb

    for bits, dtype in ((8, np.uint8), (10, np.dtype("<u2"))):
        rows = np.frombuffer(bytearray(16), dtype)
        plane = Plane(rows, 2, 2, 2)
        planes_to_rgb(plane, plane, plane, Colours("bt709", False), bits, torch.uint8)


def main() -> int:
    parser = argparse.ArgumentParser(description="Damage videos and read them.")
    parser.add_argument("--files", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of one file")
    parser.add_argument("--keep", type=Path, help="folder for files with findings")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the process must have no other threads when it forks
    rooftop.media.pyav.load_av()
    load_loops()
    with tempfile.TemporaryDirectory() as name:
        wholes: list[Whole] = []
        made = in_child(lambda: make_files(Path(name)))
        for path in made.result or []:
            described = in_child(lambda path=path: describe(path))
            if described.failure is not None:
                raise RuntimeError(f"{path.name}, undamaged: {described.failure}")
            wholes.append(described.result)
        if made.failure is not None:
            raise RuntimeError(f"no files: {made.failure}")
        report = run(wholes, arguments)
    print(json.dumps(report, indent=1))
    return 1 if report["findings"] else 0


def run(wholes: list[Whole], arguments: argparse.Namespace) -> dict[str, Any]:
    whole_files = 0
    errors: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    findings: list[dict[str, Any]] = []
    losses: list[dict[str, Any]] = []
    slowest: tuple[float, int] = (0.0, -1)
    largest: tuple[int, int] = (0, -1)
    numbers = range(arguments.files) if arguments.only is None else [arguments.only]
    for number in numbers:
        chance = random.Random(f"{arguments.seed}-{number}")
        whole = wholes[number % len(wholes)]
        kind, content, spoilt = spoil(whole.content, chance)
        outcome = in_child(lambda content=content: read_video(content))
        kinds[kind] += 1
        slowest = max(slowest, (outcome.wall_s, number))
        largest = max(largest, (outcome.memory_bytes, number))
        said = {} if outcome.result is None else outcome.result["errors"]
        whole_files += outcome.failure is None and not said
        for stage, (name, _) in said.items():
            errors[f"{stage}: {name}"] += 1
        if missing := lost(whole, spoilt, outcome):
            losses.append({"number": number, "file": whole.path.name, "by": kind, "frames": missing})
        found = judge(whole, spoilt, outcome)
        if found:
            findings.append(
                {
                    "number": number,
                    "file": whole.path.name,
                    "by": kind,
                    "what": found,
                    "said": [text for _, text in said.values()],
                }
            )
            if arguments.keep is not None:
                arguments.keep.mkdir(parents=True, exist_ok=True)
                (arguments.keep / f"{number}-{kind}-{whole.path.name}").write_bytes(content)
    return {
        "files": len(numbers),
        "read without an error": whole_files,
        "with errors": len(numbers) - whole_files,
        "errors": dict(errors.most_common()),
        "spoilt by": dict(kinds.most_common()),
        "slowest": {"s": round(slowest[0], 3), "number": slowest[1]},
        "largest": {"MiB": round(largest[0] / 2**20, 1), "number": largest[1]},
        "frames not given before the fault": losses,
        "findings": findings,
    }


if __name__ == "__main__":
    sys.exit(main())
