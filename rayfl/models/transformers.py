"""Networks of Hugging Face's transformers: classifiers of images and texts, and language models."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator
from typing_extensions import override

from rayfl.errors import ConfigError
from rayfl.losses.base import Task
from rayfl.models._own import TASK, OwnNetwork, built, image_channels, library

if TYPE_CHECKING:
    from torch import nn

_AUTO_CLASSES = {
    "numbers": "AutoModelForImageClassification",
    "texts": "AutoModelForSequenceClassification",
    "words": "AutoModelForCausalLM",
}
"""The class of transformers for each task."""


class TransformersNetwork(OwnNetwork):
    """transformers' classifiers of images or texts, and language models (``rayfl[hub]``).

    With random weights or those of a local file. Texts are tokens ``(n, L)``. Token ``pad_token_id`` (of
    config.json; 0 if ``arch`` is a type) is padding, which classifiers of texts mask. For ``task=words`` the
    vocabulary is that of the data.
    """

    name: Literal["transformers"] = "transformers"
    arch: str = Field(description="type of the network, e.g. vit, bert or gpt2; or a folder with config.json")
    task: Task = TASK

    @field_validator("arch")
    @classmethod
    def _absolute(cls, arch: str) -> str:
        """Workers have another working directory."""
        return os.path.abspath(arch) if os.path.isdir(arch) else arch

    @override
    def prepare(self) -> None:
        library("transformers")

    @override
    def network(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """For images ``(C, H, W)`` or texts ``(L,)``."""
        from rayfl.models.modules.logits import Logits, TextLogits, WordLogits

        transformers: Any = library("transformers")
        local = os.path.isdir(self.arch)
        if self.task == "numbers":
            arguments: dict[str, Any] = {
                "num_channels": image_channels(self.arch, shape),
                "image_size": shape[1],
            }
        elif len(shape) != 1:
            raise ConfigError("model", f"{self.arch} takes texts, not samples of shape {shape}")
        else:
            arguments = {} if local else {"pad_token_id": 0}
        arguments = {
            **arguments,
            ("vocab_size" if self.task == "words" else "num_labels"): classes,
            **self.kwargs,
        }

        def make() -> nn.Module:
            if local:
                read = transformers.AutoConfig.from_pretrained
                config = read(self.arch, local_files_only=True, **arguments)
            else:
                config = transformers.AutoConfig.for_model(self.arch, **arguments)
            network = getattr(transformers, _AUTO_CLASSES[self.task]).from_config(config)
            if self.task == "words":
                return WordLogits(network)
            if self.task == "texts":
                return TextLogits(network, config.pad_token_id)
            return Logits(network)

        module: nn.Module = built(self.arch, make)
        return module
