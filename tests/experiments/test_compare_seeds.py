"""experiments/compare_seeds.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = ["rounds=1", "training.epochs=1", "execution.backend=inline", "output.report=false"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_seeds", ROOT / "experiments" / "compare_seeds.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_holds_mean_and_spread_over_the_seeds(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["digits-demo", "--algorithms", "mt_hfl,fedavg", "--seeds", "0,1", "--out", str(tmp_path)]
    assert script.main([*command, *TINY]) == 0
    runs, table = pd.read_csv(tmp_path / "runs.csv"), pd.read_csv(tmp_path / "table.csv", index_col=0)
    assert runs[["algorithm", "seed"]].values.tolist() == [
        ["mt_hfl", 0],
        ["fedavg", 0],
        ["mt_hfl", 1],
        ["fedavg", 1],
    ]
    first, second = runs.accuracy_mean[runs.algorithm == "mt_hfl"]
    assert table.seeds.tolist() == [2, 2]
    np.testing.assert_allclose(table.accuracy_mean["mt_hfl"], (first + second) / 2)
    np.testing.assert_allclose(table.accuracy_mean_std["mt_hfl"], abs(first - second) / np.sqrt(2))
    assert table.ari["mt_hfl"] == 1.0
    assert np.isnan(table.ari["fedavg"])
    parts = table.group_var_within + table.group_var_between
    np.testing.assert_allclose(parts, table.accuracy_var)  # the law of total variance, and means are linear
    shares = table[[f"accuracy_group_{i}" for i in range(3)]] @ [0.5, 0.3, 0.2]
    np.testing.assert_allclose(shares, table.accuracy_mean)
    text = (tmp_path / "table.md").read_text()
    assert "group 0 (%) | group 1 (%) | group 2 (%) | within groups (%²) | between (%²) |" in text
    assert f"| mt_hfl | 2 | {(first + second) / 2:.2f} ± " in text
    assert text in capsys.readouterr().out

    before = sorted(tmp_path.iterdir())
    assert script.main([*command, *TINY]) == 0  # everything is there already
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["digits-demo", "--seeds", "1-x"], "--seeds: got '1-x'"),
        (["digits-demo", "--seeds", "1,1"], "expected every seed once"),
        (["digits-demo", "--algorithms", "fedavgg"], "did you mean 'fedavg'"),
    ],
)
def test_mistakes_are_one_line(
    script: ModuleType, arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([*arguments, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error
    assert not any(tmp_path.iterdir())


def test_the_command_line_of_the_script_is_what_its_docstring_says(script: ModuleType) -> None:
    assert "compare_seeds.py mthfl-fmnist --algorithms mt_hfl,random_clustering --seeds 0-5" in (
        script.__doc__ or ""
    )
    assert script.seeds_of("0-2,7") == [0, 1, 2, 7]
