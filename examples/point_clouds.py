"""Draw a point cloud from a .ply or .npy file.

    python examples/point_clouds.py FILE [--out picture.png]

The cloud is shown from the side and from above, coloured by label, or by height if it has no labels.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from rooftop.errors import InputError
from rooftop.models.point_clouds.clouds import PALETTE, lit, of_heights, read, sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, default=Path("picture.png"))
    options = parser.parse_args()
    try:
        cloud = read(options.file)
    except InputError as error:
        raise SystemExit(f"error: {error}") from error
    if cloud.labels is None:
        colours = of_heights(cloud.xyz[:, 2].float())
    else:
        colours = torch.tensor(PALETTE, dtype=torch.uint8)[cloud.labels % len(PALETTE)]
    sheet(cloud.xyz, [(options.file.name, lit(colours, cloud.intensity))], []).save(options.out)
    print(f"{len(cloud.xyz):,} points of {options.file}, drawn in {options.out}")


if __name__ == "__main__":
    main()
