"""The files of deploy/: what their own tools say of them, and that ``rayfl init cluster`` writes the same."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayfl.commands.init import CLUSTERS, _checkout_words, init
from rayfl.errors import ConfigError

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def tool(name: str) -> str:
    """A program, also of the environment of this Python; the test is skipped where there is none."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"there is no {name} here")
    return found


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


# -- one source of each file -------------------------------------------------------------------------------


def test_the_package_has_no_copies() -> None:
    assert (ROOT / "rayfl" / "deploy").is_symlink()
    assert (ROOT / "rayfl" / "deploy").resolve() == DEPLOY


def test_every_file_belongs_to_a_kind() -> None:
    there = {path.relative_to(DEPLOY).as_posix() for path in DEPLOY.rglob("*") if path.is_file()}
    assert there == {name for kind in CLUSTERS.values() for name in kind.deploy}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", CLUSTERS)
def test_init_writes_them_for_who_has_rayfl_from_pip(kind: str, tmp_path: Path) -> None:
    """The same text, but for where rayfl and the image come from; nothing speaks of a checkout."""
    written, tries = init("cluster", "", tmp_path, kind)
    assert tries[0].startswith(f"cd {tmp_path} && ")
    assert tries[0].endswith("  (first look at the lines marked CHOOSE)")
    for name in CLUSTERS[kind].deploy:
        ours, theirs = ((DEPLOY / name).read_text(), (tmp_path / Path(name).name).read_text())
        changed = [
            pair for pair in zip(ours.splitlines(), theirs.splitlines(), strict=False) if pair[0] != pair[1]
        ]
        if name.endswith(("Dockerfile", "compose.yaml")):
            assert 0 < len(changed) < 8
        elif "kuberay/ray" not in name:
            assert not changed
        assert "deploy/" not in theirs.replace("!deploy", "")
    assert all("CHOOSE" in path.read_text() for path in written if path.suffix in (".yaml", ".sbatch"))
    assert (tmp_path / "constraints.txt").exists() == CLUSTERS[kind].constraints
    if CLUSTERS[kind].constraints:
        pins = (tmp_path / "constraints.txt").read_text().splitlines()[1:]
        assert all(re.fullmatch(r"[a-z0-9-]+==[\w.!-]+", pin) for pin in pins)
        assert {"ray", "rayfl", "torch", "numpy"} <= {pin.partition("==")[0] for pin in pins}
        assert "ARG RAYFL=rayfl==" in (tmp_path / "Dockerfile").read_text()
        with pytest.raises(ConfigError, match="exists already; nothing was written"):
            init("cluster", "", tmp_path, kind)


def test_what_differs_from_a_checkout_is_in_some_file() -> None:
    texts = [(DEPLOY / name).read_text() for kind in CLUSTERS.values() for name in kind.deploy]
    for words in _checkout_words():
        assert any(words in text for text in texts), words


def test_the_manifests_name_the_ray_of_the_image() -> None:
    (pin,) = re.findall(r"^ray==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert documents("kuberay/raycluster.yaml")[0]["spec"]["rayVersion"] == pin


def test_kinds_that_share_files_can_be_written_to_one_folder(tmp_path: Path) -> None:
    """The image's, which both have; a file that was changed since is refused as ever."""
    init("cluster", "", tmp_path, "kuberay")
    before = (tmp_path / "Dockerfile").stat().st_mtime_ns
    written, _ = init("cluster", "", tmp_path, "docker")
    assert all(path.is_file() for path in written)
    assert (tmp_path / "Dockerfile").stat().st_mtime_ns == before
    (tmp_path / "compose.yaml").unlink()
    (tmp_path / "Dockerfile").write_text("FROM mine")
    with pytest.raises(ConfigError, match="Dockerfile: exists already; nothing was written"):
        init("cluster", "", tmp_path, "docker")
    assert not (tmp_path / "compose.yaml").exists()


def test_kinds_that_there_are_not_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        init("cluster", "", tmp_path, "kubray")
    assert str(raised.value) == "--kind: no files for 'kubray'; did you mean 'kuberay'?"
    with pytest.raises(ConfigError, match="--kind: is for init cluster, not for init method; leave it out"):
        init("method", "", tmp_path, "slurm")


def test_machines_of_ones_own_are_a_valid_cluster(tmp_path: Path) -> None:
    """What the end of cluster.yaml says to do by hand, against Ray's own validator."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    init("cluster", "", tmp_path / "own", "onprem")
    init("cluster", "", tmp_path / "cloud", "aws")
    text = (tmp_path / "own" / "cluster.yaml").read_text()
    own, cloud = (yaml.safe_load((tmp_path / kind / "cluster.yaml").read_text()) for kind in ("own", "cloud"))
    assert own["provider"]["type"] == "local"
    assert own["setup_commands"] == cloud["setup_commands"]
    assert own["worker_start_ray_commands"] == cloud["worker_start_ray_commands"]
    assert "RAY_enable_autoscaler_v2=0 ray start --head" in own["head_start_ray_commands"][1]
    assert not {"available_node_types", "head_node_type"} & own.keys()
    assert "aws" not in text.lower()
    validate_config(prepare_config(own))


# -- Kubernetes --------------------------------------------------------------------------------------------


def containers(cluster: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The pods of a RayCluster's spec, and the container of each."""
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        yield pod, container


def test_the_job_has_the_cluster_of_raycluster_yaml_and_goes_on_with_its_run() -> None:
    (cluster,), (job,) = documents("kuberay/raycluster.yaml"), documents("kuberay/rayjob.yaml")
    assert job["spec"]["rayClusterSpec"] == cluster["spec"]
    assert job["spec"]["entrypoint"].startswith("rayfl run digits-demo --resume ")
    assert job["spec"]["backoffLimit"] > 0


def test_the_kuberay_that_is_asked_for_knows_the_secret() -> None:
    """``authOptions.secretName`` came with 1.6.0."""
    files = (
        DEPLOY / "kuberay/raycluster.yaml",
        DEPLOY / "kuberay/rayjob.yaml",
        ROOT / "docs/clusters/kubernetes.md",
    )
    for file in files:
        text = " ".join(file.read_text().split())
        assert re.findall(r"KubeRay\S* (\S+) or later", text) == ["1.6"]
        assert "secretName" in text


def test_the_cluster_scales_asks_for_a_token_and_keeps_runs() -> None:
    (cluster,), (claim,) = documents("kuberay/raycluster.yaml"), documents("kuberay/storage.yaml")
    spec = cluster["spec"]
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    assert spec["enableInTreeAutoscaling"] is True
    assert spec["authOptions"]["mode"] == "token"
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    gpus = [c["resources"]["limits"].get("nvidia.com/gpu", 0) for _, c in containers(spec)]
    assert gpus == [0, 0, 1]
    for pod, container in containers(spec):
        assert pod["restartPolicy"] == "Never"
        assert pod["securityContext"]["runAsNonRoot"] is True
        limits, requests = (container["resources"][kind] for kind in ("limits", "requests"))
        assert limits["memory"] == requests["memory"]
        assert {"name": "metrics", "containerPort": 8080} in container["ports"]
    (volume,) = spec["headGroupSpec"]["template"]["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text()
    assert f"--uid {pod['securityContext']['runAsUser']} " in dockerfile


def strict(schema: Any) -> Any:
    """A CRD's schema as ``kubectl apply`` takes it: no field that it does not know."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    open_ = "additionalProperties" in found or found.get("x-kubernetes-preserve-unknown-fields")
    if found.get("type") == "object" and "properties" in found and not open_:
        found["additionalProperties"] = False
    if found.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
    return found


@pytest.mark.parametrize("name", ["raycluster", "rayjob"])
def test_kuberay_takes_them(name: str) -> None:
    """By KubeRay's own schema; RAYFL_KUBERAY_CRDS names the folder crds/ of its Helm chart."""
    jsonschema = pytest.importorskip("jsonschema")
    folder = os.environ.get("RAYFL_KUBERAY_CRDS")
    if not folder:
        pytest.skip("RAYFL_KUBERAY_CRDS does not name the folder crds/ of KubeRay's Helm chart")
    crd = yaml.safe_load((Path(folder) / f"ray.io_{name}s.yaml").read_text())
    (version,) = [each for each in crd["spec"]["versions"] if each["name"] == "v1"]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    check = jsonschema.Draft202012Validator(schema)
    document = documents(f"kuberay/{name}.yaml")[-1]
    assert not [error.message for error in check.iter_errors(document)]
    document["spec"]["rayVersoin"] = "2.0"
    assert [error.message for error in check.iter_errors(document)]


# -- Docker ------------------------------------------------------------------------------------------------


def test_hadolint_has_nothing_against_the_dockerfile() -> None:
    found = subprocess.run([tool("hadolint"), DEPLOY / "docker/Dockerfile"], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_image_is_built_from_what_is_there() -> None:
    """What the build copies is let through, and the constraints have the versions of its packages."""
    ignored = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[0] == "**"
    through = [line[1:] for line in ignored if line.startswith("!") and "*" not in line]
    assert all((ROOT / name).exists() for name in through)
    assert {"rayfl", "deploy", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"} == set(through)


def calls(words: str, folder: Path, **programs: str) -> list[list[str]]:
    """What the RUN of the Dockerfile with these words calls.

    Args:
        words: by which it is found.
        folder: for programs that only note how they are called.
        programs: what those of a name do besides.
    """
    text = (DEPLOY / "docker" / "Dockerfile").read_text().replace("\\\n", "")
    (line,) = (line for line in text.splitlines() if line.startswith("RUN ") and words in line)
    for name in ("pip", "rayfl", "rm", "getent", "userdel", "useradd", "mkdir", "chown"):
        note = f'echo {name} "$*" >> {folder}/calls'
        (folder / name).write_text(f"#!/bin/sh\n{note}\n{programs.get(name, '')}\n")
        (folder / name).chmod(0o755)
    variables = {"PATH": str(folder), "TORCH_INDEX": "https://torch/cpu", "RAYFL": ".", "EXTRAS": "parquet"}
    subprocess.run(["/bin/sh", "-c", line.removeprefix("RUN ")], env=variables, check=True)
    return [each.split() for each in (folder / "calls").read_text().splitlines()]


def test_only_pytorch_itself_is_taken_from_its_index(tmp_path: Path) -> None:
    """It has few versions of other packages, and the constraints name one of each."""
    torch, *others = [call for call in calls("torchvision", tmp_path) if call[0] == "pip"]
    assert torch[-3:] == ["--no-deps", "torch", "torchvision"]
    assert torch[torch.index("--index-url") + 1] == "https://torch/cpu"
    assert [call[-1] for call in others] == [".", "rayfl[parquet]"]
    assert all("--index-url" not in call and "--no-deps" not in call for call in others)
    assert all(call[2:4] == ["-c", "constraints.txt"] for call in (torch, *others))


@pytest.mark.parametrize(
    ("found", "removed"),
    [("exit 2", []), ("echo ubuntu:x:1000:1000::/home/ubuntu:/bin/bash", [["userdel", "ubuntu"]])],
)
def test_the_user_of_the_image_is_made_on_any_base(
    found: str, removed: list[list[str]], tmp_path: Path
) -> None:
    """Also on one that has another user of this number."""
    made = [call for call in calls("useradd", tmp_path, getent=found) if call[0] in ("userdel", "useradd")]
    assert made == [*removed, ["useradd", "--create-home", "--uid", "1000", "ray"]]


def test_compose_is_a_head_and_two_workers() -> None:
    (compose,) = documents("compose.yaml")
    head, worker = compose["services"]["head"], compose["services"]["worker"]
    assert "ray start --head" in head["command"]
    assert "--address=head:6379" in worker["command"]
    assert worker["deploy"]["replicas"] == 2
    assert head["ports"] == ["127.0.0.1:8265:8265"]
    assert head["environment"]["RAY_AUTH_MODE"] == "token"


def test_compose_gives_gpus_to_the_workers() -> None:
    """With the lines for them, which are comments: to who trains, not to the head."""
    text, changed = re.subn(r"# (\w+: .*nvidia.*)", r"\1", (DEPLOY / "compose.yaml").read_text())
    assert changed
    services = yaml.safe_load(text)["services"]
    (device,) = services["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert services["worker"]["deploy"]["replicas"] == 2
    assert "deploy" not in services["head"]


def test_compose_takes_it_and_refuses_to_start_without_a_token() -> None:
    for command in (["docker", "compose"], ["docker-compose"]):
        there = shutil.which(command[0])
        if there and not subprocess.run([*command, "version"], capture_output=True).returncode:
            break
    else:
        pytest.skip("there is neither docker compose nor docker-compose here")
    line = [*command, "-f", str(DEPLOY / "compose.yaml"), "config"]
    without = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"}
    given = subprocess.run(line, env={**without, "RAY_AUTH_TOKEN": "secret"}, capture_output=True, text=True)
    assert given.returncode == 0, given.stderr
    assert yaml.safe_load(given.stdout)["services"].keys() == {"head", "worker"}
    refused = subprocess.run(line, env=without, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "set it to a secret" in refused.stderr


# -- monitoring --------------------------------------------------------------------------------------------


def test_prometheus_takes_its_configuration() -> None:
    path = DEPLOY / "monitoring" / "prometheus.yml"
    found = subprocess.run([tool("promtool"), "check", "config", path], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
