"""``rayfl init``: a skeleton that works as it stands, with its test, in the user's own folder."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import keyword
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayfl import files
from rayfl.config.kinds import KINDS
from rayfl.config.text import parse
from rayfl.errors import ConfigError, nearest

_TEMPLATES = Path(__file__).parents[1] / "templates"

_DEPLOY = Path(__file__).parents[1] / "deploy"
"""The files of ``deploy/``: in a checkout a link to that folder, in a wheel the files."""


@dataclass(frozen=True)
class Skeleton:
    """The skeleton of one kind of part.

    Attributes:
        name: default name.
        tries: commands to continue with.
        registry: the registry in which the name must be new; empty if users refer to the part by its file.
    """

    name: str
    tries: tuple[str, ...]
    registry: str = ""


SKELETONS = {
    "method": Skeleton(
        "my_method", ("rayfl run digits-demo --plugin __FILE__ algorithm=__NAME__",), "methods"
    ),
    "model": Skeleton("my_model", ("rayfl run digits-demo --plugin __FILE__ model=__NAME__",), "models"),
    "loss": Skeleton("my_loss", ("rayfl run digits-demo --plugin __FILE__ loss=__NAME__",), "losses"),
    "dataset": Skeleton(
        "my_data",
        (
            "rayfl run digits-demo data.name=python data.target=__FILE__:load data.test_fraction=0.2 "
            "partition.name=column partition.column=hospital",
        ),
    ),
    "partition": Skeleton(
        "my_partition",
        ("rayfl partition digits-demo partition.name=python partition.target=__FILE__:deal",),
    ),
}
"""The skeletons by kind; ``study`` is one file of settings, ``cluster`` has its own files."""

CHOICES = (*SKELETONS, "study", "cluster")


@dataclass(frozen=True)
class ClusterFiles:
    """The files that are written for a kind of cluster.

    Attributes:
        tries: commands to continue with.
        deploy: files of ``deploy/``, which are written without their subfolders.
        template: whether ``cluster.yaml`` and ``launch.py`` are written.
        constraints: whether ``constraints.txt`` is written.
    """

    tries: tuple[str, ...]
    deploy: tuple[str, ...] = ()
    template: bool = False
    constraints: bool = False


_IMAGE = ("docker/Dockerfile", "docker/Dockerfile.dockerignore")

CLUSTERS: Mapping[str, ClusterFiles] = {
    "aws": ClusterFiles(("ray up cluster.yaml",), template=True),
    "onprem": ClusterFiles(("ray up cluster.yaml",), template=True),
    "kuberay": ClusterFiles(
        ("docker build -t <registry>/rayfl .", "kubectl apply -f storage.yaml -f rayjob.yaml"),
        ("kuberay/raycluster.yaml", "kuberay/rayjob.yaml", "kuberay/storage.yaml", *_IMAGE),
        constraints=True,
    ),
    "slurm": ClusterFiles(("sbatch rayfl.sbatch digits-demo",), ("slurm/rayfl.sbatch",)),
    "docker": ClusterFiles(("docker compose up -d --build",), ("compose.yaml", *_IMAGE), constraints=True),
    "monitoring": ClusterFiles(
        ("prometheus --config.file=prometheus.yml",),
        ("monitoring/prometheus.yml", "monitoring/grafana-rayfl.json"),
    ),
}
"""By ``--kind``; the first is the default."""


def init(kind: str, name: str, folder: Path, cluster: str = "") -> tuple[list[Path], list[str]]:
    """Write the files of a kind; nothing is overwritten.

    Args:
        kind: one of :data:`CHOICES`.
        name: of the module and the part; empty for the default.
        folder: to write to, created if need be.
        cluster: one of :data:`CLUSTERS`, where ``kind`` is ``cluster``; empty for the first.

    Returns:
        The files that were written, and commands to continue with.

    Raises:
        ConfigError: for a name that cannot be used, or files that exist.
        DiskError
    """
    if kind not in CHOICES:
        raise ConfigError("init", f"no skeleton for {kind!r}", nearest(kind, CHOICES))
    if cluster and kind != "cluster":
        raise ConfigError("--kind", f"is for init cluster, not for init {kind}", "leave it out")
    if kind == "cluster":
        if name:
            raise ConfigError("--name", "a cluster's files have fixed names", "leave it out")
        if cluster and cluster not in CLUSTERS:
            raise ConfigError("--kind", f"no files for {cluster!r}", nearest(cluster, CLUSTERS))
        wanted = cluster or next(iter(CLUSTERS))
        begin, *others = CLUSTERS[wanted].tries
        cd = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
        first = f"{cd}{begin}  (first look at the lines marked CHOOSE)"
        return _write(folder, _cluster_files(wanted), "--folder"), [first, *others]
    if kind == "study":
        name = name or "my_study"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ConfigError(
                "--name", f"{name!r} cannot be a study's name", "use letters, digits, . _ and -"
            )
        text = name if parse(name) == name else json.dumps(name)  # 123 would be a number
        paths = _write(folder, {f"{name}.yaml": _fill_template("study.yaml", {"__NAME__": text})})
        return paths, [f"rayfl study {paths[0]} --dry-run", f"rayfl study {paths[0]}"]
    skeleton = SKELETONS[kind]
    name = name or skeleton.name
    module_file = folder / f"{name}.py"
    _check_name(name, kind, skeleton, module_file)
    words = {
        "__NAME__": name,
        "__CLASS__": "".join(word.capitalize() for word in name.split("_")),
    }
    texts = {
        f"{name}.py": _fill_template(f"{kind}.py", words),
        f"test_{name}.py": _fill_template(f"test_{kind}.py", words),
    }
    paths = _write(folder, texts)
    words["__FILE__"] = str(paths[0])
    test = f"python -m pytest {paths[1]}"
    if importlib.util.find_spec("pytest") is None:
        test += "  (first: python -m pip install pytest)"
    return paths, [test, *(_replace_words(line, words) for line in skeleton.tries)]


def _check_name(name: str, kind: str, skeleton: Skeleton, file: Path) -> None:
    if not (name.isascii() and name.isidentifier() and name.islower()) or keyword.iskeyword(name):
        raise ConfigError(
            "--name", f"{name!r} cannot be a module's name", f"use small letters and _, as in {skeleton.name}"
        )
    if skeleton.registry and name in KINDS[skeleton.registry]:
        raise ConfigError("--name", f"there is a {kind} named {name!r} already", "choose another name")
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
        if spec is not None and not file.exists():
            raise ConfigError("--name", f"there is a module named {name!r} already", "choose another name")


def _write(folder: Path, texts: dict[str, str], remedy: str = "--name or --folder") -> list[Path]:
    """Write the files; existing ones with the same text are kept."""
    missing = {folder / name: text for name, text in texts.items() if not _has_text(folder / name, text)}
    for path in missing or [folder / name for name in texts]:
        if path.exists() or path.is_symlink():
            raise ConfigError(str(path), "exists already; nothing was written", f"choose another {remedy}")
    files.make(folder, parents=True)
    for path, text in missing.items():
        with files.boundary(path), path.open("x", encoding="utf-8") as file:
            file.write(text)
    return [folder / name for name in texts]


def _has_text(path: Path, text: str) -> bool:
    """Whether there is a file with this text."""
    try:
        return path.is_file() and path.read_text(encoding="utf-8") == text
    except (OSError, ValueError):
        return False


def _fill_template(template: str, words: dict[str, str]) -> str:
    return _replace_words((_TEMPLATES / f"{template}.txt").read_text(encoding="utf-8"), words)


def _replace_words(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text


def _cluster_files(kind: str) -> dict[str, str]:
    """The files of a kind of cluster, by their names."""
    wanted, texts = CLUSTERS[kind], dict[str, str]()
    if wanted.template:
        text = _fill_template("cluster.yaml", {"__REQUIREMENTS__": _requirements()})
        texts["cluster.yaml"] = on_premise(text) if kind == "onprem" else text
        texts["launch.py"] = _fill_template("launch.py", {})
    for name in wanted.deploy:
        text = (_DEPLOY / name).read_text(encoding="utf-8")
        texts[Path(name).name] = _replace_words(text, _checkout_words())
    if wanted.constraints:
        pins = (f"{name}=={version}" for name, version in sorted(_installed_versions("rayfl").items()))
        texts["constraints.txt"] = "\n".join(["# The versions with which rayfl was installed.", *pins, ""])
    return texts


def _checkout_words() -> dict[str, str]:
    """Text in the files of ``deploy/`` for a checkout, and its replacement where rayfl comes from pip."""
    version = importlib.metadata.version("rayfl")
    return {
        "ARG RAYFL=.\n": f"ARG RAYFL=rayfl=={version}\n",
        "context: ..\n": "context: .\n",
        "dockerfile: deploy/docker/Dockerfile\n": "dockerfile: Dockerfile\n",
        "docker build -f deploy/docker/Dockerfile": "docker build",
        "docker compose -f deploy/compose.yaml": "docker compose",
        "that of docker/Dockerfile": "that of Dockerfile",
        'rayVersion: "2.60.0"': f'rayVersion: "{importlib.metadata.version("ray")}"',
    }


_SECTION = re.compile(r"^(\w+):", re.MULTILINE)


def on_premise(text: str) -> str:
    """``cluster.yaml`` for the user's own machines: the lines at its end replace the cloud's sections.

    Args:
        text: of the ``cluster.yaml`` for a cloud.
    """
    cloud, _, end = text.partition("# On machines of your own:")
    lines = end.partition("# -- on-premise\n")[2].partition("# -- end")[0].splitlines()
    onprem = "".join(f"{line.removeprefix('# ')}\n" for line in lines)
    places = [*(match.start() for match in _SECTION.finditer(cloud)), len(cloud)]
    dropped = {match[1] for match in _SECTION.finditer(onprem)} | {"available_node_types", "head_node_type"}
    sections = (cloud[a:b] for a, b in itertools.pairwise(places))
    kept_sections = [
        section for section in sections if section.partition(":")[0] not in dropped | {"cluster_name"}
    ]
    head = (
        "# A Ray cluster for rayfl on machines of your own, which need ssh and Python with venv.\n#\n"
        "#   ray up cluster.yaml\n"
        "#   ray submit cluster.yaml launch.py run digits-demo execution.actors=8\n"
        "#   ray rsync-down cluster.yaml '~/runs/' runs/\n"
        "#   ray down cluster.yaml\n#\n"
        "# CHOOSE the addresses, the user and the key, and the datasets that are prepared.\n\n"
    )
    return f"{head}cluster_name: rayfl\n\n{onprem}\n{''.join(kept_sections).rstrip()}\n"


def _installed_versions(package: str) -> dict[str, str]:
    """A package and its dependencies, with the versions that are installed here."""
    versions: dict[str, str] = {}
    pending = [package]
    while pending:
        name = re.sub(r"[-_.]+", "-", pending.pop()).lower()
        if name in versions:
            continue
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            distribution = importlib.metadata.distribution(name)
            versions[name] = distribution.version.partition("+")[0]  # torch 2.13.0+cpu
            for need in distribution.requires or ():
                pending.append(re.split(r"[^A-Za-z0-9._-]", need, maxsplit=1)[0])
    return versions


def _requirements(packages: Sequence[str] = ("rayfl", "ray[default]")) -> str:
    """Packages with the versions that are installed here."""
    versions = {name: importlib.metadata.version(name.partition("[")[0]) for name in packages}
    return " ".join(f"'{name}=={version}'" for name, version in versions.items())
