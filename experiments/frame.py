"""The command line that all analyses share: ``--seeds``, ``--out``, overrides, and the handling of errors.

An analysis is a script whose docstring is its help and whose work is a function of the parsed options::

    if __name__ == "__main__":
        rounds = frame.option("--rounds", type=int, default=30)
        sys.exit(frame.main(__doc__, work, rounds, seeds="0-2", out="runs/x"))

Bad input prints one line and exits with code 2, as in ``rayfl``; Ctrl-C exits with code 130.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rayfl.errors import ConfigError, Interrupted, RayflError
from rayfl.study.file import seeds_of

Option = tuple[tuple[str, ...], dict[str, Any]]


def option(*names: str, **settings: Any) -> Option:
    """An option, with the arguments of ``argparse.ArgumentParser.add_argument``."""
    return names, settings


def _seeds(text: str) -> tuple[int, ...]:
    """The seeds in ``0-4`` or ``0,3,7-9``.

    Raises:
        ConfigError
    """
    try:
        return seeds_of(text)
    except ValueError as error:
        raise ConfigError("--seeds", str(error).removeprefix("seeds: ")) from None


def main(
    doc: str | None,
    work: Callable[[argparse.Namespace], object],
    *options: Option,
    seeds: str = "",
    out: str = "",
    overrides: bool = False,
    arguments: Sequence[str] | None = None,
) -> int:
    """Parse the command line and do the work; returns the exit code.

    Args:
        doc: the script's docstring.
        work: called with the options: ``seeds`` as numbers, ``out`` as an existing folder.
        options: further options.
        seeds: the default of ``--seeds``; empty: there is no such option.
        out: the default of ``--out``; empty: there is no such option.
        overrides: whether settings such as ``rounds=5`` may follow.
        arguments: by default those of the process.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for names, settings in options:
        parser.add_argument(*names, **settings)
    if seeds:
        parser.add_argument("--seeds", default=seeds, help=f"such as 0-4 or 0,3 (default: {seeds})")
    if out:
        parser.add_argument(
            "--out", type=Path, default=Path(out), help=f"folder of the results (default: {out})"
        )
    if overrides:
        parser.add_argument("overrides", nargs="*", help="settings of all runs such as rounds=50")
    parsed = parser.parse_intermixed_args(arguments)
    try:
        if seeds:
            parsed.seeds = _seeds(parsed.seeds)
        if out:
            parsed.out.mkdir(parents=True, exist_ok=True)
        work(parsed)
    except (RayflError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (Interrupted, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # script | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
        return 128 + signal.SIGPIPE
    return 0
