"""The ten-minute story with the built wheel, in an environment and a folder outside of the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.story.story import METHODS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rayfl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a wheel in an environment of its own, which borrows what rayfl depends on."""
    folder = tmp_path_factory.mktemp("wheel")
    environment = folder / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = environment / "lib" / version / "site-packages"
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    source = folder / "source"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("no git checkout to build a wheel of")
    for name in filter(None, files.stdout.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():  # rayfl/deploy
            (source / name).symlink_to(os.readlink(ROOT / name))
        elif (ROOT / name).is_file():
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run([*pip, *build], check=True, cwd=folder)
    [wheel] = folder.glob("rayfl-*.whl")
    python = environment / "bin" / "python"
    subprocess.run(
        [*pip, "--python", str(python), "install", "--no-deps", str(wheel)], check=True, cwd=folder
    )
    where = subprocess.run(
        [python, "-c", "import rayfl; print(rayfl.__file__)"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    assert Path(where.stdout.strip()).is_relative_to(environment)
    return environment / "bin" / "rayfl"


@pytest.fixture
def tell(rayfl: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs the story, from the checkout: only rayfl itself is that of the wheel."""

    def told(*options: str) -> str:
        command = [sys.executable, "-m", "tests.story.story", str(tmp_path / "own"), "--rayfl", str(rayfl)]
        found = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
        assert found.returncode == 0, found.stdout + found.stderr
        return found.stdout

    return told


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_methods_run_on_what_lies_in_an_own_folder(tell):
    told = tell("--no-ray")
    assert told.count("same") == len(METHODS)
    assert "inline, killed" in told


@pytest.mark.ray
@pytest.mark.ray_apart
@pytest.mark.timeout(900)
def test_on_ray_results_are_the_same(tell):
    assert "inline, killed on Ray" in tell("--only", "my method")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.ray_apart
@pytest.mark.timeout(900)
def test_on_two_nodes_results_are_the_same(tell):
    isolated = subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
    told = tell("--only", "my method", *(["--two-nodes"] if isolated else []))
    assert "inline, killed on Ray" in told
    assert ("two nodes" in told) == isolated


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.ray_apart
@pytest.mark.timeout(1800)
def test_all_methods_on_ray(tell):
    assert tell().count("same") == len(METHODS)


def test_the_wheel_is_complete(rayfl, tmp_path):
    """Presets, templates, pages and types are in it; its commands find them."""
    [wheel] = rayfl.parents[2].glob("rayfl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    data = (
        "presets/*.yaml",
        "templates/*.txt",
        "report/*.html",
        "py.typed",
        "__main__.py",
        "deploy/*.*",
        "deploy/*/*",
    )
    wanted = {str(path.relative_to(ROOT)) for each in data for path in (ROOT / "rayfl").glob(each)}
    assert len(wanted) > 30
    assert wanted <= inside
    metadata = rayfl.parents[1].glob("lib/*/site-packages/rayfl-*.dist-info/METADATA")
    text = next(metadata).read_text()
    assert "Project-URL: Homepage, " in text
    assert "Classifier: Typing :: Typed" in text
    subprocess.run([rayfl, "init", "cluster"], cwd=tmp_path, check=True, capture_output=True)
    assert {path.name for path in tmp_path.iterdir()} == {"cluster.yaml", "launch.py"}
    subprocess.run(
        [rayfl, "init", "cluster", "--kind", "slurm"], cwd=tmp_path, check=True, capture_output=True
    )
    assert (tmp_path / "rayfl.sbatch").read_bytes() == (ROOT / "deploy/slurm/rayfl.sbatch").read_bytes()
