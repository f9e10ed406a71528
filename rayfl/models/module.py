"""A network from the user's own file or package."""

from __future__ import annotations

import inspect
import io
import pickletools
import sys
import zipfile
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from typing_extensions import override

from rayfl import plugins
from rayfl.errors import ConfigError, type_of
from rayfl.given import keep
from rayfl.losses.base import Task
from rayfl.models._own import TASK, OwnNetwork, built
from rayfl.models.base import one_line

if TYPE_CHECKING:
    from torch import nn

_FILE_LOADER = "rayfl.models.modules.given:load"
"""The function that reads the file of a network that was given as an object."""


def _is_no_plugin(module: str) -> bool:
    """Whether a module is PyTorch's, NumPy's or Python's, and not a plug-in."""
    return module.partition(".")[0] in {"torch", "numpy", "__builtin__", *sys.stdlib_module_names}


class OwnModule(OwnNetwork):
    """Any ``nn.Module`` with one tensor as input and logits as output: ``target: "mynet:MyNet"``.

    The target is a class, or a function that returns the network. If it has parameters named ``shape`` (of a
    sample), ``classes`` or ``num_classes`` that ``kwargs`` do not set, they are passed to it.
    """

    name: Literal["module"] = "module"
    target: str = Field(description="module:Class or path/to/file.py:Class (or a function)")
    task: Task = TASK

    @override
    def prepare(self) -> None:
        """Import the target."""
        self._builder()

    @override
    def outline(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        module = super().outline(shape, classes)
        if module is super().outline(shape, classes):
            what = f"{self.target} returns the same network object in every call"
            raise ConfigError("model.target", what, "build a new one in each call, or return a deep copy")
        return module

    @override
    def network(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Call the target."""
        from torch import nn

        builder = self._builder()
        available = {"shape": tuple(shape), "classes": classes, "num_classes": classes}
        arguments: dict[str, Any] = dict(self.kwargs)
        try:
            signature = inspect.signature(builder)
        except ValueError:  # a function in C
            signature = inspect.Signature()
        for name, parameter in signature.parameters.items():
            if name in available and parameter.kind in (
                parameter.POSITIONAL_OR_KEYWORD,
                parameter.KEYWORD_ONLY,
            ):
                arguments.setdefault(name, available[name])
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise ConfigError("model.kwargs", f"{self.target}: {error}") from None
        module = built(self.target, lambda: builder(**arguments), "model.target")
        if not isinstance(module, nn.Module):
            what = f"{self.target} returns {type_of(module)}"
            raise ConfigError("model.target", what, "expected a torch.nn.Module")
        return module

    def given_classes(self) -> list[str]:
        """The targets of the user's classes in the file of a network that was given as an object."""
        path = self.kwargs.get("path")
        if self.target != _FILE_LOADER or not isinstance(path, str):
            return []
        try:
            with zipfile.ZipFile(path) as archive:
                (name,) = (member for member in archive.namelist() if member.endswith("data.pkl"))
                opcodes = list(pickletools.genops(archive.read(name)))
        except (OSError, ValueError, zipfile.BadZipFile):  # reported when the run reads the file
            return []
        # torch.save writes pickle protocol 2, which names classes only by GLOBAL
        names = [str(value).split(" ", 1) for code, value, _ in opcodes if code.name == "GLOBAL"]
        return sorted({f"{module}:{class_name}" for module, class_name in names if not _is_no_plugin(module)})

    def _builder(self) -> Any:
        from torch import nn

        target = plugins.resolve(self.target, "model.target")
        if isinstance(target, nn.Module):
            what = f"{self.target} is a network that has been built"
            raise ConfigError("model.target", what, "expected its class, or a function that builds it")
        if not callable(target) or (isinstance(target, type) and not issubclass(target, nn.Module)):
            what = f"{self.target} is {'the class ' if isinstance(target, type) else 'a '}" + (
                target.__name__ if isinstance(target, type) else type(target).__name__
            )
            remedy = "expected a class of torch.nn.Module, or a function that returns one"
            raise ConfigError("model.target", what, remedy)
        return target


def settings_of(thing: Any) -> dict[str, Any] | None:
    """The settings that stand for a class of ``nn.Module``, a function that builds a network, or a network.

    A network that has been built is written to a file with its weights, from which every client starts.

    Raises:
        ConfigError: if no other process could import the class, or PyTorch cannot write the network.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(thing, torch.nn.Module):
        for part in sorted({type(module) for module in thing.modules()}, key=str):
            if part.__module__ == "__main__":
                what = f"got a network with a {part.__name__}, whose class is this script's"
                raise ConfigError("model", what, "give the class, or put it into a file of its own")
            if part.__module__.partition(".")[0] != "torch":
                plugins.resolve(
                    plugins.target_of(part), "model"
                )  # processes that read the file import its classes
        buffer = io.BytesIO()
        try:
            torch.save(thing, buffer)
        except Exception as error:  # weight_norm, TorchScript, a hook that is a lambda
            what = f"PyTorch cannot write the network to a file ({one_line(error)[:90]})"
            raise ConfigError("model", what, "give its class, or a function that builds it") from None
        path = keep(buffer.getvalue(), ".pt")
        return {"name": "module", "target": _FILE_LOADER, "kwargs": {"path": path}}
    if not callable(thing):
        return None
    return {"name": "module", "target": plugins.target_of(thing)}
