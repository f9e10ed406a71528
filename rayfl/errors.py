"""Errors shown to users, each in one line: where it happened, what is wrong, and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")


class RayflError(Exception):
    """Base of all errors that the command line prints as one line (exit code 2) instead of a traceback."""

    lasting: ClassVar[bool] = False
    """Whether a resumed run would end with the same error."""


class ConfigError(RayflError):
    """A setting is wrong.

    Args:
        where: the dotted path of the setting, e.g. ``training.lr``.
        what: what is wrong with it.
        remedy: what would be right (the nearest valid name, the allowed range); may be empty.
    """

    lasting = True

    def __init__(self, where: str, what: str, remedy: str = "") -> None:
        self.where, self.what, self.remedy = where, what, remedy
        super().__init__(where, what, remedy)

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f"; {self.remedy}" if self.remedy else "")


class ArgumentError(ConfigError):
    """An argument is wrong; ``where`` is its name: ``size`` is ``--size`` on the command line."""

    @property
    def as_option(self) -> str:
        """The message as the command line prints it."""
        return f"--{self.where.replace('_', '-')}{str(self)[len(self.where) :]}"


Explain = Callable[[Any, Mapping[str, Any], type], Exception]
"""From what Pydantic found, the settings and the class of a section to the error that is raised."""

_explanations: list[Explain] = []


def explain_by(explain: Explain) -> None:
    """Set how mistakes in the settings of sections that are built from Python become errors."""
    _explanations[:] = [explain]


def explained(error: Exception, settings: Mapping[str, Any], section: type) -> Exception:
    """The error for what Pydantic found in the settings of a section; see :func:`explain_by`."""
    return _explanations[0](error, settings, section)


def one_line(error: object) -> str:
    """The message of another library's error without line breaks, shortened, as part of another message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "..."


def not_a_run(path: object, exists: bool = True) -> ConfigError:
    """The error where a run directory was expected; ``exists``: whether there is anything at this path."""
    if not exists:
        return ConfigError(str(path), "no such directory", "give the directory of a run")
    return ConfigError(str(path), "not a run directory", "it holds no config.yaml")


class DataError(RayflError):
    """A dataset is missing, broken, or cannot be divided as asked."""

    lasting = True


class DiskError(RayflError):
    """Something cannot be written: the disk is full, the folder is gone.

    Args:
        path: of the file or folder.
        why: the error of the disk.
        what: the failed action, after the path in the message.
    """

    def __init__(self, path: object, why: str, what: str = "cannot be written") -> None:
        self.path, self.why, self.what = path, why, what
        super().__init__(path, why, what)

    def __str__(self) -> str:
        return f"{self.path} {self.what}: {self.why}"


class Damaged(RayflError):
    """A checkpoint, or another file of a run, cannot be read, or differs from what was written."""

    lasting = True


class OtherFormat(RayflError):
    """A checkpoint was written by a version of rayfl that writes another format."""

    lasting = True


class Held(RayflError):
    """Another process is running this run."""


class Interrupted(Exception):
    """The run was asked to stop, and a checkpoint has been written."""


class ResultsLost(RayflError):
    """Results of a round were lost with the node that held them: the round has to be repeated."""


class ClientError(RayflError):
    """A client's local work failed.

    Args:
        client: the client's number.
        round: the round in which it happened (0-based).
        cause: the original traceback as text.
        name: the user's own id of the client, quoted; empty if there is none.
    """

    def __init__(self, client: int, round: int, cause: str, name: str = "") -> None:
        self.client, self.round, self.cause, self.name = client, round, cause, name
        super().__init__(client, round, cause, name)

    @property
    def diverged(self) -> bool:
        """Whether the training diverged: then only the last line of the traceback is of interest."""
        return self._last_line.startswith("FloatingPointError: ")

    @property
    def _last_line(self) -> str:
        return self.cause.strip().splitlines()[-1] if self.cause.strip() else "unknown cause"

    @property
    def where(self) -> str:
        """Which client failed, and when."""
        return f"client {self.name or self.client} failed in round {self.round + 1}"

    def __str__(self) -> str:
        return f"{self.where}: {self._last_line}"


def type_of(value: object) -> str:
    """``an int``, ``a list``, ``an array of int64 (3,)``, ``nothing (None)``: for messages about a value."""
    if value is None:
        return "nothing (None)"
    kind = _article(type(value).__name__.replace("ndarray", "array"))
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is not None and isinstance(shape, tuple) and shape:  # without importing NumPy or PyTorch for it
        return f"{kind} of {str(dtype).removeprefix('torch.')} {tuple(shape)}"
    return kind


def returned(where: str, found: object, kind: type[T], *others: type[Any]) -> T:
    """Return ``found``, the result of a method of a user's part, if it has an expected type.

    Args:
        where: the names of the part and the method.
        found: the result.
        kind, others: the expected types.

    Raises:
        ConfigError: if it has another type.
    """
    if not isinstance(found, (kind, *others)):
        expected = " or ".join(_article(each.__name__) for each in (kind, *others))
        raise ConfigError(where, f"returned {type_of(found)}", f"expected {expected}")
    return found  # type: ignore[return-value]


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiouAEIO' else 'a'} {noun}"


def repeats(error: object) -> bool:
    """Whether a resumed run would end with the same error, such as diverging training."""
    if isinstance(error, ClientError):
        return error.diverged
    return isinstance(error, RayflError) and error.lasting


def nearest(name: str, valid: Iterable[str]) -> str:
    """A remedy for an unknown name: the nearest valid one, or all of them if none is similar.

    If there are many, those that contain ``name`` come first, shorter ones before longer ones, and names
    beyond the first :data:`_MOST_NAMES` are only counted.
    """
    valid = sorted(valid)
    if not valid:
        return "there are none"
    close = difflib.get_close_matches(name, valid, n=1, cutoff=_LEAST_SIMILARITY)
    if close:
        return f"did you mean {close[0]!r}?"
    if len(valid) > _MOST_NAMES:
        ordered = sorted(valid, key=lambda each: (name not in each, len(each)))
        return f"valid: {', '.join(ordered[:_MOST_NAMES])} and {len(valid) - _MOST_NAMES} more"
    return "valid: " + ", ".join(valid)


_LEAST_SIMILARITY = 0.55
"""Similarity from 0 to 1 above which a name is suggested; at 0.5 'synthetic' is suggested for 'nothing'."""

_MOST_NAMES = 40
"""Maximum number of names in a message."""
