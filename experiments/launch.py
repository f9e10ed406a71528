"""One file for ``ray submit cluster.yaml experiments/launch.py run pacfl-fmnist``: the rayfl command line."""

from rayfl.cli import main

if __name__ == "__main__":
    main()
