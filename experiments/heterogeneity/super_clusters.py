"""Super-clusters of the classes of CIFAR-10 and Fashion-MNIST under all measures (thesis Figure 5.3, Table
5.7).

::

    python experiments/heterogeneity/super_clusters.py [--all]

``--all`` uses every training image. The default is 1,000 per class on CIFAR-10, which takes seconds instead
of minutes, and all on Fashion-MNIST.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rayfl.data import DATASETS, data_root
from rayfl.data.heterogeneity.super_clusters import Proximity, class_angles, class_super_clusters

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import frame

WANTED = {"cifar10": 2, "fashion_mnist": 3}
PROXIMITIES: tuple[Proximity, ...] = ("vector_angle_min", "principal_angle", "vector_angle_sum")
TROUSER, DRESS, BAG = 1, 3, 8


def work(options: argparse.Namespace) -> None:
    """Print the super-clusters under every measure."""
    for name, n in WANTED.items():
        per_class = 1000 if name == "cifar10" and not options.all else None
        samples = DATASETS[name]().load(data_root())
        print(f"{name}, {n} super-clusters, {per_class or 'all'} images of a class")
        for proximity in PROXIMITIES:
            for p in (2, 3, 5):
                by_linkage = [
                    class_super_clusters(samples, p, proximity, linkage, n, per_class=per_class).clusters
                    for linkage in ("average", "complete")
                ]
                same = "average and complete" if by_linkage[0] == by_linkage[1] else "average only"
                print(f"  {proximity:16} p={p}  {by_linkage[0]}  ({same} linkage)")
        if name == "fashion_mnist":
            for proximity in PROXIMITIES[:2]:
                angles = class_angles(samples, 3, proximity)[1]
                print(
                    f"  {proximity}, p=3: Trouser-Dress {angles[TROUSER, DRESS]:.2f}, "
                    f"Trouser-Bag {angles[TROUSER, BAG]:.2f} degrees (thesis: 22.47, 51.7)"
                )


if __name__ == "__main__":
    ALL = frame.option("--all", action="store_true", help="every image of CIFAR-10")
    sys.exit(frame.main(__doc__, work, ALL))
