"""Simulated LiDAR scans of streets and rooms, each point labelled by what it hit.

    python examples/lidar_scans.py FOLDER [--setting street] [--count 4] [--seed 0] [--device cpu]

The script writes scans as .ply files, each with a picture. Each seed generates one scene. The same seed gives the same
scene everywhere, and the same scan on the same kind of device.

`rooftop train sparse_unet` and `python examples/lidar_segmentation.py` train a network on such scans.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from rooftop.models.point_clouds.clouds import lit, sheet, write
from rooftop.train.tasks.generated.lidar_scans import SETTINGS, simulate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--setting", choices=list(SETTINGS), default="street")
    parser.add_argument("--count", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    if options.count < 1:
        parser.error("expected --count of at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs an NVIDIA GPU, and PyTorch finds none here")
    setting, palette = SETTINGS[options.setting], torch.tensor(list(SETTINGS[options.setting].classes.values()))
    options.folder.mkdir(parents=True, exist_ok=True)
    for number in range(options.count):
        found = simulate(setting, options.seed + number, options.device)
        path = options.folder / f"{options.setting}{options.seed + number:04}.ply"
        write(found.cloud(), path, list(setting.classes.values()))
        xyz, intensity, labels = (each.cpu() for each in found)
        shown = labels != setting.lid
        colours = lit(palette.byte()[labels], intensity)[shown]
        sheet(xyz[shown], [(path.stem, colours)], list(setting.classes.items()), 1000).save(path.with_suffix(".png"))
        print(f"{path}: {len(xyz):,} points")


if __name__ == "__main__":
    main()
