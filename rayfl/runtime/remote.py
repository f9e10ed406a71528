"""What Ray runs in processes of their own besides the clients: local parameter servers and remote tasks.

Like that of :mod:`rayfl.runtime.lps`, its import must stay cheap: neither torch nor anything built on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rayfl.runtime.lps import LocalServer


class ServerActor(LocalServer):
    """An LPS actor."""

    def acknowledge(self, method: str, *args: Any) -> Any:
        """Nothing, which the driver can fetch to see that it is done; then what the method returns."""
        answer = getattr(self, method)(*args)
        return (None, *answer) if isinstance(answer, list | tuple) else (None, answer)


def acknowledge(function: Callable[..., Any], *args: Any) -> tuple[None, Any]:
    """The same for a plain function."""
    return None, function(*args)
