"""Super-clusters of the classes of CIFAR-10 and Fashion-MNIST, in every way (thesis Figure 5.3, Table 5.7).

::

    python experiments/heterogeneity/super_clusters.py [--all]

With ``--all`` every training image is looked at; by default 1,000 of a class on CIFAR-10, which takes seconds
instead of minutes, and all on Fashion-MNIST.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rayfl.data import DATASETS, data_root
from rayfl.data.heterogeneity.super_clusters import Proximity, class_angles, class_super_clusters
from rayfl.errors import RayflError

WANTED = {"cifar10": 2, "fashion_mnist": 3}
PROXIMITIES: tuple[Proximity, ...] = ("vector_angle_min", "principal_angle", "vector_angle_sum")
TROUSER, DRESS, BAG = 1, 3, 8


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="every image of CIFAR-10")
    options = parser.parse_args(arguments)
    try:
        for name, n in WANTED.items():
            per_class = 1000 if name == "cifar10" and not options.all else None
            samples = DATASETS[name]().load(data_root())
            print(f"{name}, {n} super-clusters, {per_class or 'all'} images of a class")
            for proximity in PROXIMITIES:
                for p in (2, 3, 5):
                    found = [
                        class_super_clusters(samples, p, proximity, linkage, n, per_class=per_class).clusters
                        for linkage in ("average", "complete")
                    ]
                    same = "average and complete" if found[0] == found[1] else "average only"
                    print(f"  {proximity:16} p={p}  {found[0]}  ({same} linkage)")
            if name == "fashion_mnist":
                for proximity in PROXIMITIES[:2]:
                    angles = class_angles(samples, 3, proximity)[1]
                    print(
                        f"  {proximity}, p=3: Trouser-Dress {angles[TROUSER, DRESS]:.2f}, "
                        f"Trouser-Bag {angles[TROUSER, BAG]:.2f} degrees (thesis: 22.47, 51.7)"
                    )
    except RayflError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
