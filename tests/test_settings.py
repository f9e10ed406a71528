"""Sections and parts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from rayfl.errors import ConfigError
from rayfl.settings import Registry, Section, choice, part_name, summary


class Animal(Section):
    """Base."""

    name: str = ""


class Cat(Animal):
    """A cat. It sleeps."""

    name: Literal["cat"] = "cat"
    lives: int = 9


class Dog(Animal):
    """A dog, which
    barks, e.g. at cats
    """

    name: Literal["dog"] = "dog"
    owner: str


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes the modules of a package of parts, and imports it."""
    made: list[str] = []

    def write(name: str, **modules: str) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        for module, text in modules.items():
            (folder / f"{module}.py").write_text(HEAD + text)
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()
        made.append(name)
        return name

    yield write
    for module in [m for m in sys.modules if m.split(".")[0] in made]:
        del sys.modules[module]


HEAD = "from typing import Literal\nfrom tests.test_settings import Animal, Cat\n"


def test_parts_are_found_in_their_own_files(package):
    name = package(
        "zoo_found",
        b="class Zebra(Animal):\n    name: Literal['zebra'] = 'zebra'\n",
        a="class Ant(Animal):\n    name: Literal['ant'] = 'ant'\n\nclass Abstract(Animal):\n    pass\n",
    )
    assert list(Registry("animal", name, Animal)) == ["ant", "zebra"]  # not Cat, which is only imported there


def test_two_parts_of_one_name_are_refused(package):
    text = "class Ant(Animal):\n    name: Literal['ant'] = 'ant'\n"
    with pytest.raises(ValueError, match="both named 'ant'"):
        list(Registry("animal", package("zoo_twice", a=text, b=text), Animal))


def test_part_name():
    assert part_name(Cat) == "cat"
    assert part_name(Animal) is None
    assert part_name(Section) is None


@pytest.mark.parametrize(
    ("value", "lives"), [("cat", 9), ({"name": "cat", "lives": 3}, 3), (Cat(lives=2), 2)]
)
def test_a_part_is_chosen_by_its_name(value, lives):
    for parts in ({"cat": Cat, "dog": Dog}, {"cat": Cat}):
        part: Any = TypeAdapter(choice(parts)).validate_python(value)
        assert isinstance(part, Cat)
        assert part.lives == lives


@pytest.mark.parametrize(
    "value", ["cow", {"name": "cow"}, {"lives": 3}, 3, {"name": "cat", "owner": "x"}, "dog"]
)
def test_what_is_no_choice(value):
    with pytest.raises(ValidationError):
        TypeAdapter(choice({"cat": Cat, "dog": Dog})).validate_python(value)


if TYPE_CHECKING:
    Pet = Animal
else:
    Pet = choice({"cat": Cat, "dog": Dog})


class Home(Section):
    """Holds parts chosen by name, whose defaults are an object and a factory."""

    pet: Pet = Cat(lives=7)
    other: Pet = Field(default_factory=Cat)


class Shelf(Section):
    """Holds settings of a kind that nobody can copy."""

    things: Mapping[str, Any] = MappingProxyType({})


class Kennel(Section):
    """Holds a part without a default."""

    pet: Pet


def test_settings_without_a_name_belong_to_the_default_part() -> None:
    """Only its name is taken: other settings are those of the part, not of the default object."""
    home: Any = Home.model_validate({"pet": {"lives": 3}, "other": {}})
    assert (home.pet, home.other) == (Cat(lives=3), Cat())
    assert Home.model_validate({"pet": {}}).pet == Cat()
    assert Home().pet == Cat(lives=7)
    assert Shelf(things={"x": 1}).things == {"x": 1}
    with pytest.raises(ValidationError, match=r"pet\.owner\n.*Extra"):
        Home.model_validate({"pet": {"owner": "x"}})
    with pytest.raises(ValidationError, match="expected a name"):
        Kennel.model_validate({"pet": {"lives": 3}})
    with pytest.raises(ValidationError, match="no part has this name"):
        Home.model_validate({"pet": {"name": "cow"}})


def test_the_schema_offers_the_names_of_parts_that_need_no_setting():
    schema = TypeAdapter(choice({"cat": Cat, "dog": Dog})).json_schema()
    assert schema["anyOf"][0] == {"enum": ["cat"], "type": "string"}
    assert len(schema["anyOf"]) == 3


def test_sections_are_frozen_and_strict_about_keys_and_defaults():
    with pytest.raises(ValidationError, match="frozen"):
        Cat().lives = 3
    with pytest.raises(ConfigError, match=r"^tail: no such setting; valid: lives, name$"):
        Cat(tail=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"^lives: got 'x'; expected an integer"):
        Cat(lives="x")  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        TypeAdapter(type("Bad", (Section,), {"__annotations__": {"n": int}, "n": "x"})).validate_python({})


def test_summary_is_the_first_sentence():
    assert summary(Cat) == "A cat."
    assert summary(Dog) == "A dog, which barks, e.g. at cats."
