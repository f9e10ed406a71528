"""Files of objects that users pass from Python (arrays, tables, networks), each named after its content."""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

from rayfl.errors import DiskError


def data_root() -> Path:
    """Where downloaded datasets lie unless ``data.root`` is set: ``$RAYFL_DATA``, else ``~/.cache/rayfl``."""
    return Path(os.environ.get("RAYFL_DATA") or Path.home() / ".cache" / "rayfl")


def own_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that say where rayfl's data and runs lie."""
    names = ("RAYFL_DATA", "RAYFL_STAGING")
    return {name: environment[name] for name in names if environment.get(name)}


def shown_path(path: Path) -> str:
    """How messages name a file: just "data" for arrays passed from Python, whose file users do not know."""
    return "data" if path.absolute().parent == (data_root() / "given").absolute() else str(path)


def keep(content: bytes, suffix: str) -> str:
    """The path of a file below :func:`data_root` with this content; it is written if it does not exist.

    A file of this name with other content, for example a truncated one, is replaced.

    Raises:
        DiskError
    """
    folder = data_root() / "given"
    path = folder / (hashlib.sha256(content).hexdigest()[:16] + suffix)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        if not path.is_file() or path.read_bytes() != content:
            folder.mkdir(parents=True, exist_ok=True)
            part.write_bytes(content)
            os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise DiskError(path, error.strerror or str(error)) from None
    return str(path.absolute())
