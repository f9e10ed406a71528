"""The ``paper:`` blocks of the presets: every setting that is not the paper's has its reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from rayfl.config import load, paper_of, presets
from rayfl.errors import ConfigError
from rayfl.paper import Deviation, Paper, deviations, value

OF_EVERY_PAPER = (
    "rounds",
    "data.name",
    "partition.validation",
    "model.name",
    "training.participation",
    "training.epochs",
    "training.batch_size",
    "training.lr",
)
"""What a block speaks of even if the preset leaves the default."""

NOT_THE_PAPERS = ("name", "seed", "evaluation", "execution", "output", "algorithm.name", "paper")
"""Settings of a run that no paper has, and the method itself."""


def mistakes(paper: Paper, config: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """What is wrong with a block, a line each.

    Args:
        paper: the block.
        config: the preset's resolved config.
        given: what the preset's file says.
    """
    found = []
    for setting in [*paper.settings, *paper.open]:
        try:
            value(config, setting)
        except (KeyError, TypeError):
            found.append(f"{setting}: no such setting")
    if found:
        return found
    differing = {each.setting for each in deviations(paper, config)}
    found += [f"{setting}: differs from the paper without a reason" for setting in differing - set(paper.why)]
    found += [f"{setting}: has a reason but is the paper's" for setting in set(paper.why) - differing]
    found += [f"{setting}: is both stated and left open" for setting in set(paper.settings) & set(paper.open)]
    spoken_of = {*paper.settings, *paper.open}
    for setting in [*leaves(given), *OF_EVERY_PAPER]:
        above = {".".join(setting.split(".")[:depth]) for depth in range(1, setting.count(".") + 2)}
        if not above & {*spoken_of, *NOT_THE_PAPERS}:
            found.append(f"{setting}: not spoken of")
    return found


def leaves(given: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """The dotted settings that a YAML file gives; a part's short form is its name."""
    for key, inner in given.items():
        if isinstance(inner, Mapping):
            yield from leaves(inner, f"{where}{key}.")
        else:
            short = key in ("data", "model", "algorithm", "partition", "features", "dataset", "signature")
            yield f"{where}{key}" + (".name" if short and isinstance(inner, str) else "")


@pytest.mark.parametrize("name", presets())
def test_every_deviation_from_the_paper_is_listed_with_its_reason(name: str) -> None:
    path = presets()[name]
    paper = paper_of(path)
    if name == "digits-demo":
        assert paper.source.startswith("none")
        return
    assert mistakes(paper, load(name).to_dict(), yaml.safe_load(path.read_text())) == []


def test_a_setting_that_differs_needs_a_reason_and_no_other_may_have_one() -> None:
    given = yaml.safe_load(presets()["pacfl-fmnist"].read_text())
    paper = Paper.model_validate(given["paper"])

    def found(*overrides: str, **changes: Any) -> list[str]:
        changed = paper.model_copy(update=changes)
        return mistakes(changed, load("pacfl-fmnist", overrides).to_dict(), given)

    assert found() == []
    assert found("training.epochs=5") == ["training.epochs: differs from the paper without a reason"]
    assert found("rounds=200") == ["rounds: has a reason but is the paper's"]
    fewer = {key: stated for key, stated in paper.settings.items() if key != "partition.rho"}
    assert found(settings=fewer) == ["partition.rho: not spoken of"]
    assert found(open={}) == ["clustering.proximity: not spoken of"]
    assert found(open={**paper.open, "clustering.beta": "?"}) == ["clustering.beta: no such setting"]


def test_deviations_hold_the_papers_value_and_the_presets() -> None:
    paper = Paper(source="a paper", settings={"rounds": 7, "training.lr": 0.5}, why={"rounds": "for speed"})
    found = deviations(paper, load({"rounds": 3, "training": {"lr": 0.5}}).to_dict())
    assert found == [Deviation("rounds", 7, 3, "for speed")]


def test_a_block_is_no_part_of_the_run() -> None:
    settings = {"rounds": 3, "paper": {"source": "a paper"}}
    assert load(settings) == load({"rounds": 3})
    assert "paper" not in load("pacfl-fmnist").to_dict()


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("", "paper: "),
        ("paper: {settings: {rounds: 3}}", "paper.source: "),
        ("paper: {source: x, whi: {}}", "paper.whi: "),
    ],
)
def test_a_bad_block_is_one_line(block: str, words: str, tmp_path: Any) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(f"rounds: 3\n{block}\n")
    with pytest.raises(ConfigError) as caught:
        paper_of(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
