"""CIFAR-100 (Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images)."""

from __future__ import annotations

from typing import ClassVar, Literal

from typing_extensions import override

from rayfl.data.datasets._torchvision import TorchvisionDataset

_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid
otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray
road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""


class Cifar100(TorchvisionDataset):
    """CIFAR-100: 50,000 and 10,000 colour images of 32x32, 100 (fine) classes."""

    name: Literal["cifar100"] = "cifar100"
    torchvision_name: ClassVar[str] = "CIFAR100"
    names: ClassVar[tuple[str, ...]] = tuple(_NAMES.split())

    @override
    def layout(self) -> tuple[str, ...]:
        return tuple(f"cifar-100-python/{file}" for file in ("train", "test", "meta"))
