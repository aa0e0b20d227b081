"""Builds of virtual geometry: seconds, memory and bytes on disk, for several numbers of workers and triangles.

    python benchmarks/scene_build.py [--out benchmarks/results/h200/scene_build.json] [--triangles 1000000]

The hills of `scene.py` are built plain, and with normals and uv. Each build runs in a separate process, with 1, 2 and
as many workers as there are cores. Each row has the seconds of the build, and the CPU seconds of all its processes.
The row also has the peak memory of these processes together, in bytes per triangle, including the input arrays. (The
memory is Linux's PSS, which counts shared memory once, sampled 20 times a second.) The row has the bytes per triangle
on disk, by kind, and says whether all builds wrote equal files. `ratio` is the time with one worker over the row's
time. All rows of a mesh are from one run. Each build runs `--rounds` times, and the fastest counts.

`--stages` prints the stages of each fastest build. A stage has the seconds that the calling process computed alone
before it, its own seconds, the CPU seconds of its workers, and the share of the time in which the workers computed.

`--quick` tests the script.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rooftop import scene
from rooftop.scene import layouts
from rooftop.scene.building import workers as pool
from rooftop.whole_files import write_json

LOOK_S = 0.05
KINDS = {"plain": (), "normals and uv": ("normals", "uv")}


def hills(triangles: int) -> tuple[np.ndarray, np.ndarray]:
    """A square terrain of about this many triangles, rough at all scales. It equals the terrain of `scene.py`, but
    needs less memory to create."""
    side = round((triangles / 2) ** 0.5)
    random = np.random.default_rng(0)
    line = np.linspace(0, 1, side + 1)
    z = np.zeros((side + 1, side + 1))
    for octave in range(10):
        for _ in range(3):
            a, b, shift = 3 * 1.9**octave * random.normal(), 3 * 1.9**octave * random.normal(), random.uniform(0, 6.28)
            across = b * line + shift
            height = 0.03 * 0.55**octave
            z += np.outer(height * np.sin(a * line), np.cos(across))
            z += np.outer(height * np.cos(a * line), np.sin(across))
    vertices = np.empty((side + 1, side + 1, 3))
    vertices[..., 0], vertices[..., 1], vertices[..., 2] = line[:, None], line, z
    corner = (np.arange(side)[:, None] * (side + 1) + np.arange(side)).ravel()
    faces = np.stack([corner, corner + side + 1, corner + 1, corner + 1, corner + side + 1, corner + side + 2], 1)
    return vertices.reshape(-1, 3), faces.reshape(-1, 3)


def build_once(triangles: int, kind: str, workers: int, path: Path) -> dict[str, Any]:
    """Run one build in this process, and print its measurements."""
    vertices, faces = hills(triangles)
    options: dict[str, Any] = {}
    if "uv" in KINDS[kind]:
        options["uv"] = vertices[:, :2].copy()
    if "normals" in KINDS[kind]:
        options["normals"] = "smooth"
    peak = Peak()
    before = cpu_seconds()
    stages = Stages()
    report = scene.build(vertices, faces, path, workers=workers, **options)
    return {
        "stages": stages.table(),
        "triangles": len(faces),
        "seconds": round(report.seconds, 3),
        "cpu_seconds": round(cpu_seconds() - before, 3),
        "memory_bytes_per_triangle": round(peak.end() / len(faces), 1),
        "bytes_per_triangle": round(report.bytes_per_triangle, 3),
        "fill": round(report.fill, 4),
        "levels": len(report.levels),
        "roots": report.roots,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    } | parts_of_file(path)


class Stages:
    """Records the stages of a build, and the seconds between stages, in which only the calling process computes."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.ended = time.perf_counter()
        run, threads, fork = pool._Processes.stage, pool.Workers.threads, pool._Processes.__init__

        def stage(team: Any, call: int, number: int, items: Any, what: str, found: Any) -> None:
            work = team.calls[call]
            name = getattr(work, "work", work).__qualname__.replace(".<locals>", "").replace(".<lambda>", "")
            processes = [worker.process for worker in team.workers.values()]
            before = sum(map(run_seconds, processes))
            with self.timed(name, len(items), team.count) as row:
                run(team, call, number, items, what, found)
                row["cpu_seconds"] += sum(map(run_seconds, processes)) - before

        def in_threads(workers: Any, work: Any, items: Any) -> Any:
            with self.timed(f"threads {work.__qualname__.replace('.<locals>', '')}", len(items), workers.count) as row:
                before = time.process_time()
                done = threads(workers, work, items)
                row["cpu_seconds"] += time.process_time() - before
            return done

        def forked(team: Any, calls: Any, count: int, inherited: Any) -> None:
            with self.timed("forking", count, count):
                fork(team, calls, count, inherited)

        pool._Processes.stage = stage  # type: ignore[method-assign]
        pool.Workers.threads = in_threads  # type: ignore[method-assign,assignment]
        pool._Processes.__init__ = forked  # type: ignore[method-assign]

    @contextmanager
    def timed(self, name: str, items: int, workers: int) -> Iterator[dict[str, Any]]:
        row = self.rows.setdefault(name, dict.fromkeys(("calls", "items", "alone_before", "seconds", "cpu_seconds"), 0))
        began = time.perf_counter()
        row["alone_before"] += began - self.ended
        yield row
        self.ended = time.perf_counter()
        row["seconds"] += self.ended - began
        row["calls"] += 1
        row["items"] += items
        row["workers"] = workers

    def table(self) -> list[dict[str, Any]]:
        """A row for each stage, and one for the time after the last stage."""
        with self.timed("end", 0, 1):
            pass
        rows = []
        for name, row in self.rows.items():
            busy = row["cpu_seconds"] / (row["workers"] * row["seconds"]) if row["seconds"] else 0.0
            rounded = {key: round(value, 3) for key, value in row.items() if key != "workers"}
            rows.append({"stage": name} | rounded | {"busy": round(busy, 2)})
        return rows


def run_seconds(process: int) -> float:
    """CPU seconds of a running process; 0 if the system does not report them."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return 0.0


def print_stages(rows: list[dict[str, Any]]) -> None:
    print(f"{'stage':44s} calls items  alone  seconds  cpu s  busy")
    for row in rows:
        print(
            f"{row['stage'][-44:]:44s} {row['calls']:5d} {row['items']:5d} {row['alone_before']:6.3f} "
            f"{row['seconds']:8.3f} {row['cpu_seconds']:6.2f} {row['busy']:5.2f}"
        )
    alone, working = sum(row["alone_before"] for row in rows), sum(row["seconds"] for row in rows)
    print(f"{'together':56s} {alone:6.3f} {working:8.3f} {sum(row['cpu_seconds'] for row in rows):6.2f}", flush=True)


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


class Peak:
    """Measures the peak memory of this process and its children together, in bytes."""

    def __init__(self) -> None:
        self.most = 0
        self.over = threading.Event()
        self.looking = threading.Thread(target=self._look)
        self.looking.start()

    def end(self) -> int:
        self.over.set()
        self.looking.join()
        return self.most

    def _look(self) -> None:
        own = os.getpid()
        while not self.over.wait(LOOK_S):
            children = Path(f"/proc/{own}/task/{own}/children")
            each = [own, *map(int, children.read_text().split())] if children.exists() else [own]
            self.most = max(self.most, sum(map(memory, each)))


def memory(process: int) -> int:
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:  # the process has ended
        return 0
    return 1024 * next((int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")), 0)


def parts_of_file(path: Path) -> dict[str, Any]:
    """Bytes per triangle on disk, by kind."""
    geometry = scene.Geometry.open(path)
    heads = geometry.clusters()
    counts = heads[:, layouts.CLUSTER_COUNTS].astype(np.int64)
    vertices, bits = (counts >> 8 & 255) + 1, counts >> 16 & 255

    def widths(first: int, columns: int) -> np.ndarray:
        return np.frexp(heads[:, first : first + columns].astype(float))[1].sum(1)

    pages = [geometry.page(page) for page in range(geometry.pages)]
    a_head = np.array([page[layouts.PAGE_GROUPS] >> layouts.PAGE_GROUP_BITS & 255 for page in pages])
    has_third = heads[:, layouts.CLUSTER_MASKS] == layouts.FANS_AND_EXPLICIT
    sizes = {
        "heads": 32 * int((a_head * [page[layouts.PAGE_CLUSTERS] for page in pages]).sum()),
        "new": 32 * (layouts.NEW_WORDS * len(heads) + layouts.EXPLICIT_WORDS * int(has_third.sum())),
        "references": int((heads[:, layouts.CLUSTER_REFERENCES] * bits).sum()),
        "positions": int((widths(layouts.CLUSTER_EXTENT, 3) * vertices).sum()),
        "normals": int((widths(layouts.CLUSTER_NORMAL_EXTENT, 2) * vertices).sum()),
        "uv": int((widths(layouts.CLUSTER_UV_EXTENT, 2) * vertices).sum()),
    }
    of_all = {name: round(size / 8 / geometry.meta["triangles"], 3) for name, size in sizes.items()}
    return {"bytes_by_part": of_all, "reference_bits": round(float(bits.mean()), 3)}


def in_a_process(triangles: int, kind: str, workers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--once", str(triangles), kind, str(workers), f"{folder}/mesh.rtg"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--triangles", nargs="+", type=int, default=[1_000_000, 3_000_000, 10_000_000])
    parser.add_argument("--workers", nargs="+", type=int, default=sorted({1, 2, cores}))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stages", action="store_true", help="print a table of the stages of each fastest build")
    parser.add_argument("--quick", action="store_true", help="small builds, to test the script")
    parser.add_argument("--once", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        triangles, kind, workers, path = options.once
        print(json.dumps(build_once(int(triangles), kind, int(workers), Path(path))))
        return 0
    if options.quick:
        options.triangles, options.workers, options.rounds = [20_000], [1, 2], 1
    found: dict[str, Any] = {
        "environment": {"cores": cores, "machine": platform.processor() or platform.machine()},
        "rows": [],
    }
    for triangles in options.triangles:
        for kind in options.kinds:
            tries: dict[int, list[dict[str, Any]]] = {workers: [] for workers in options.workers}
            for _ in range(options.rounds):
                for workers, rows in tries.items():
                    rows.append(in_a_process(triangles, kind, workers))
            fastest = {workers: min(rows, key=lambda row: row["seconds"]) for workers, rows in tries.items()}
            first = fastest[options.workers[0]]
            for workers, row in fastest.items():
                least = min(each["cpu_seconds"] for each in tries[workers])
                row = {"mesh": "hills", "kind": kind, "workers": workers} | row | {"cpu_seconds": least}
                row |= {"ratio": round(first["seconds"] / row["seconds"], 2)}
                row |= {"same_file": row.pop("sha256") == first["sha256"]}
                stages = row.pop("stages")
                found["rows"].append(row | ({"stages": stages} if options.stages else {}))
                print(json.dumps(row), flush=True)
                if options.stages:
                    print_stages(stages)
            if options.out is not None:
                write_json(options.out, found)
    return 0 if all(row["same_file"] for row in found["rows"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
