"""``python -m rayfl``: the command line."""

from rayfl.cli import main

if __name__ == "__main__":
    main()
