"""The rayfl command line as one file, for ``ray submit`` and ``ray job submit``.

::

    ray submit cluster.yaml experiments/launch.py run pacfl-fmnist rounds=20
    ray job submit --working-dir . -- python experiments/launch.py run pacfl-fmnist rounds=20

``ray job submit`` names the cluster in the environment. ``ray submit`` only logs in to the head node, which
is recognised by a file that ``ray up`` leaves there.
"""

import os
from pathlib import Path

from rayfl.cli import main

if __name__ == "__main__":
    if (Path.home() / "ray_bootstrap_config.yaml").is_file():
        os.environ.setdefault("RAY_ADDRESS", "auto")
    main()
