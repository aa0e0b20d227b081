"""Trial switches, each timed alone: ROOFTOP_SCENE_TRIAL=records,tiles. To be removed with what they decide."""

import os

import warp as wp

NAMES = {
    "signs": "small triangles of both orientations are drawn by one loop",
    "records": "the rasterizer and the pixels read a decoded head of 64 bytes",
    "flat": "with records: the lanes of a warp share the pixels of its triangles",
    "covered": "with records: depths are computed only where a triangle covers a pixel",
    "early": "a pixel is read before its atomic maximum",
    "tiles": "a warp handles 8 x 4 pixels, and each pixel has a thread",
    "registers": "kernels of pixels have at most 80 registers",
    "counters": "the host reads the counters while pixels are computed",
    "merge": "clusters are sorted by tiles of 4,096, and eight of them are searched at once",
    "pixels": "with records: the base pass of meshes without attributes in CUDA C++",
    "groups": "in CUDA C++ a launch of its own asks the groups of clusters",
    "words": "kernels in Warp read bits by a funnel shift, and matrices by rows",
    "scale": "pixels divide by powers of two",
}
ON = frozenset(filter(None, os.environ.get("ROOFTOP_SCENE_TRIAL", "").split(",")))
if not set(NAMES) >= ON:
    raise ValueError(f"ROOFTOP_SCENE_TRIAL: unknown {', '.join(sorted(ON - set(NAMES)))}; known: {', '.join(NAMES)}")

RECORDS, TILES, SCALE = wp.constant("records" in ON), wp.constant("tiles" in ON), wp.constant("scale" in ON)
OF_PIXELS = {"launch_bounds": (256, 3)} if "registers" in ON else {}


OF_CUDA = ("signs", "records", "flat", "covered", "early", "groups", "merge", "scale")


def defines() -> str:
    """For the CUDA C++."""
    return "".join(f"#define TRIAL_{name.upper()} {int(name in ON)}\n" for name in OF_CUDA)
