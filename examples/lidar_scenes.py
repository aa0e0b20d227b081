"""Generate streets and rooms from boxes, cylinders and ellipsoids, different for each seed.

    python examples/lidar_scenes.py [--seed 0]

The script prints the contents of a scene of each kind. `python examples/lidar_scans.py` scans them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from random import Random

from rooftop.train.tasks.generated.lidar_scenes import ROOM, STREET, room, street


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for build, classes in ((street, STREET), (room, ROOM)):
        solids, places = build(Random(options.seed))
        counts = Counter(solid.label for solid in solids)
        print(f"{build.__name__}, scanned from {len(places)} places, {len(solids)} solids:")
        print("  " + ", ".join(f"{name} {counts[label]}" for label, name in enumerate(classes)))


if __name__ == "__main__":
    main()
