"""The rayfl command line as one file, for ``ray submit`` and ``ray job submit``.

::

    ray submit cluster.yaml experiments/launch.py run pacfl-fmnist rounds=20
    ray job submit --working-dir . -- python experiments/launch.py run pacfl-fmnist rounds=20

``ray job submit`` says in the environment which cluster is meant; ``ray submit`` does not, it only logs in
to the head node. That node is known by the file that ``ray up`` leaves there.
"""

import os
from pathlib import Path

from rayfl.cli import main

if __name__ == "__main__":
    if (Path.home() / "ray_bootstrap_config.yaml").is_file():
        os.environ.setdefault("RAY_ADDRESS", "auto")
    main()
