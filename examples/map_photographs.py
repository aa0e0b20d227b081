"""Describe every photograph of some folders with your own function on all cores, and show the brightest.

    python examples/map_photographs.py FOLDER... [--out described.parquet] [--workers 4]

A second run describes only new photographs. A damaged photograph gets a row with its error. See docs/map.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pyarrow.parquet
from torch import Tensor

from rooftop.cluster import map_items
from rooftop.errors import RooftopError


def describe(image: Tensor) -> dict[str, object]:
    """The columns of a photograph, (3, H, W) uint8."""
    red, green, blue = image.float().mean((1, 2)).tolist()  # 0..255
    return {
        "height": image.shape[1],
        "width": image.shape[2],
        "brightness": (0.299 * red + 0.587 * green + 0.114 * blue) / 255,
        "colour": {"red": red, "green": green, "blue": blue},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photographs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("described.parquet"))
    parser.add_argument("--workers", type=int, help="number of processes (default: one for each four cores)")
    options = parser.parse_args()
    try:
        report = map_items(
            describe, options.photographs, options.out, kind="image", workers=options.workers, device="cpu"
        )
    except RooftopError as error:
        raise SystemExit(f"error: {error}") from error
    print(report)

    rows = pyarrow.parquet.read_table(options.out).to_pylist()  # or pandas.read_parquet(options.out)
    good = [row for row in rows if row["error"] is None]
    for row in sorted(good, key=lambda row: -row["brightness"])[:3]:
        print(f"{row['brightness']:.0%} bright, {row['width']} x {row['height']}: {row['input']}")
    for row in rows:
        if row["error"] is not None:
            print(f"not described: {row['error']}")


if __name__ == "__main__":
    main()
