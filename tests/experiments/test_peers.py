"""The head-to-head comparison: what is measured, and how it is told."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rayfl import plugins

PEERS = Path(__file__).parents[2] / "experiments" / "peers"


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """Its modules are found as when ``peers.py`` runs, and forgotten afterwards; some become plug-ins."""
    monkeypatch.syspath_prepend(str(PEERS))
    monkeypatch.setattr(plugins, "_loaded", {})
    names = [path.stem for path in PEERS.glob("*.py")]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    yield
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def test_all_requirements_are_pinned_and_every_system_has_a_client():
    import systems

    for system in systems.SYSTEMS.values():
        assert system.script.is_file(), system
        if system.own:
            lines = (PEERS / "requirements" / f"{system.name}.txt").read_text().splitlines()
            assert lines, system
            assert all("==" in line for line in lines), system


def test_networks_fit_their_workloads():
    import networks
    import tasks

    for workload in tasks.WORKLOADS.values():
        task = workload.task
        words = len(task.shape) == 1
        with torch.device("meta"):  # shapes alone
            x = torch.zeros(2, *task.shape, dtype=torch.int64 if words else torch.float32)
            logits = networks.build(task.network, task.shape, task.classes)(x)
        assert logits.shape == (2, task.classes, *(task.shape if words else ()))


def test_clients_own_consecutive_samples(tmp_path):
    import shared
    import tasks

    workload = tasks.WORKLOADS["W3"]
    workload = replace(workload, task=replace(workload.task, clients=3, samples=4))
    assert tasks.write(workload, tmp_path)["data"] == "random"
    task = shared.Task(**json.loads((tmp_path / "task.json").read_text()))
    assert asdict(task)["folder"] == str(tmp_path)
    x, y = task.client(2)
    everything, labels = task.arrays()
    assert x.dtype == np.float32
    np.testing.assert_allclose(x, (everything[8:12] / 255 - 0.5) / 0.29, atol=1e-6)
    np.testing.assert_array_equal(y, labels[8:12])


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A system whose client runs ``text`` after it has defined ``mark``."""
    import systems

    def make(text):
        script = tmp_path / "run_fake.py"
        script.write_text(
            "import os, time\n"
            "def mark():\n"
            "    with open(os.environ['PEERS_MARKS'], 'a') as f: f.write(f'{time.time()}\\n')\n" + text
        )
        monkeypatch.setattr(systems.System, "script", property(lambda self: script))
        return systems.System("fake", "fake", "", own=False)

    return make


def test_a_measurement_ends_when_enough_rounds_are_timed(fake, tmp_path):
    import measure

    limits = measure.Limits(warm_up=2, rounds=3, seconds=0.0, memory=0.1)
    found = measure.measure(fake("while True:\n    mark()\n    time.sleep(0.02)\n"), tmp_path, limits)
    assert len(found["rounds"]) >= 3
    assert all(taken > 0.01 for taken in found["rounds"])
    assert found["startup"] > -max(found["rounds"])  # the first round is taken off
    assert found["memory_gb"] > 0


def test_a_client_that_ends_too_early_is_told_with_its_last_lines(fake, tmp_path):
    import measure

    found = measure.measure(fake("mark()\nraise SystemExit('broken')\n"), tmp_path, measure.Limits())
    assert found["error"] == "ended after 1 rounds"
    assert found["log"] == ["broken"]


def test_lines_of_code_are_without_docstrings_comments_and_blank_lines(tmp_path):
    import systems

    path = tmp_path / "a.py"
    path.write_text(
        '"""Doc\nstring."""\n\nx = 1  # one\n\n\ndef f():\n    """Doc."""\n    # no\n    return """a\nb"""\n'
    )
    assert systems.code_lines(path) == 4  # x, def, and a string in two lines


def row(system, repetition, seconds, **more):
    return {
        "workload": "W1",
        "about": "a",
        "source": "s",
        "data": "random",
        "system": system,
        "repetition": repetition,
        "lines": 9,
        "machine": {"processor": "CPU", "cores": 2, "memory_gb": 8.0, "gpus": [], "python": "3.12.1"},
        "load": 0.5,
        "seconds": seconds,
        "startup": 1.0,
        "cpu_seconds": 2.0,
        "memory_gb": 0.5,
        **more,
    }


def test_ratios_are_those_within_a_repetition(tmp_path):
    import report

    rows = [row("rayfl", 0, 1.0), row("rayfl", 1, 4.0), row("plain", 0, 3.0), row("plain", 1, 4.0)]
    assert report.ratios(rows, "W1", "plain") == [3.0, 1.0]
    failed = {**row("pfl", 0, 0.0), "error": "ended after 0 rounds"}
    del failed["seconds"]
    text = report.markdown([*rows, failed])
    assert "| plain PyTorch | 3.5 (3 to 4) | 2 (1 to 3) | 2 | 1.0 | 0.50 | 9 |" in text
    assert "| pfl | failed: ended after 0 rounds |" in text
    report.figure(rows, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_text().startswith("<?xml")


def test_mistakes_are_one_line(capsys, tmp_path):
    import peers

    assert peers.main(["run", "--workloads", "W9"]) == 2
    assert "W9" in capsys.readouterr().err
    assert peers.main(["report", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_is_measured_is_not_measured_again(monkeypatch, tmp_path):
    import measure
    import peers

    calls = []
    monkeypatch.setattr(
        measure, "measure", lambda system, *rest: calls.append(system.name) or {"seconds": 1.0, "load": 0.0}
    )
    arguments = ["run", "--quick", "--systems", "rayfl", "plain", "--workloads", "W2", "--out", str(tmp_path)]
    assert peers.main([*arguments, "--repetitions", "1"]) == 0
    assert peers.main([*arguments, "--repetitions", "2"]) == 0
    assert calls == ["rayfl", "plain", "plain", "rayfl"]  # in turns


def test_the_tiny_federation_has_clients_of_different_sizes(tmp_path, monkeypatch):
    import agree
    import shared

    monkeypatch.setenv("PEERS_TASK", str(agree.tiny(tmp_path, (2, 5, 1, 4))))
    task = shared.load_task()
    assert (task.epochs, task.rounds) == (3, 3)
    x, _ = task.arrays()
    parts = [task.client(number) for number in range(task.clients)]
    assert tuple(len(y) for _, y in parts) == (2, 5, 1, 4)
    np.testing.assert_array_equal(np.concatenate([own for own, _ in parts]), shared.normalised(x))


def test_deviation_is_that_of_the_worst_weight():
    import agree

    found = [np.array([1.0, 2.0]), np.array([[3.0]])]
    assert agree.deviation(found, [np.array([1.0, 2.5]), np.array([[1.0]])]) == 2.0


def test_places_in_a_cluster_are_not_client_ids(tmp_path):
    """Kept as ids they are wrong from the second split on."""
    import positions

    path = tmp_path / "cfl.py"
    path.write_text(
        "class Server:\n"
        "    def cluster_clients(self, similarities):\n"
        "        found = AgglomerativeClustering(affinity='precomputed', linkage='complete')\n"
        "        labels = found.fit(-similarities).labels_\n"
        "        return np.flatnonzero(labels == 0), np.flatnonzero(labels == 1)\n"
    )
    split = positions.from_file(path)
    assert sorted(positions.two_splits(split, kept_as_ids=False)) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    wrong = positions.told(positions.two_splits(split, kept_as_ids=True))
    assert wrong.endswith("8 of 12 clients, 4 of them more than once")
    path.write_text("x = 1\n")
    with pytest.raises(SystemExit, match="no function cluster_clients"):
        positions.from_file(path)


def test_methods_have_scripts_and_reasons_a_plain_loop_that_shows_them():
    import agree
    import systems

    plain = (PEERS / "methods" / "method_plain.py").read_text()
    for name, method in agree.METHODS.items():
        assert name.partition("_")[0] in plain.lower()
        for system in method.systems:
            script = PEERS / "methods" / f"method_{system}.py"
            assert systems.SYSTEMS[system]
            assert name.partition("_")[0] in script.read_text() or system in ("rayfl", "flwr")
    for (name, system), (variant, why) in agree.WHY.items():
        assert system in agree.METHODS[name].systems
        assert f'"{variant}"' in plain, variant
        assert why


def test_the_order_of_a_client_s_images_does_not_matter(tmp_path):
    import agree
    import shared

    folder = agree.several_steps(tmp_path, "fednova")
    task = shared.Task(**json.loads((folder / "task.json").read_text()))
    for client, size in enumerate(agree.METHODS["fednova"].sizes):
        x, y = task.client(client)
        assert len(x) == size
        assert (x == x[0]).all()
        assert (y == y[0]).all()
    assert not (task.client(0)[0][0] == task.client(1)[0][0]).all()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.ray_apart
@pytest.mark.parametrize(
    "name", ["fedprox", "scaffold", "fednova", "fedavgm", "fedadam", "ifca", "ifca_unequal", "fedsem"]
)
def test_methods_are_those_of_their_papers(tmp_path, name):
    import agree
    import systems

    folder = agree.several_steps(tmp_path, name)
    expected = agree.final(systems.SYSTEMS["plain"], folder, agree.HERE / "method_plain.py")
    found = agree.final(systems.SYSTEMS["rayfl"], folder, agree.HERE / "method_rayfl.py")
    assert agree.deviation(found, expected) < agree.ROUNDING
    assert agree.deviation(expected, agree._start(folder)) > 1000 * agree.ROUNDING


def plain(agree, folder, variant=""):
    """The models of the plain loop ``(C, P)``."""
    import systems

    more = {"PEERS_VARIANT": variant}
    found = agree.final(systems.SYSTEMS["plain"], folder, agree.HERE / "method_plain.py", more)
    layers = len(found) // 2
    return [np.concatenate([t.ravel() for t in found[c * layers : (c + 1) * layers]]) for c in range(2)]


@pytest.mark.slow
def test_ifca_s_two_models_are_both_trained_and_equal_ones_are_not(tmp_path):
    """Else the comparison would say nothing of the choice between them."""
    import agree

    folder = agree.several_steps(tmp_path, "ifca")
    first = np.load(folder / "starts.npy")
    assert np.abs(first[0] - first[1]).max() > 0.1
    moved = [np.abs(after - before).max() for after, before in zip(plain(agree, folder), first, strict=True)]
    assert min(moved) > 0.1
    trained, idle = plain(agree, folder, "equal starts")
    np.testing.assert_array_equal(idle, first[0])
    assert np.abs(trained - first[0]).max() > 0.1


def test_the_first_models_are_those_of_the_federation(tmp_path):
    import agree

    folder = agree.several_steps(tmp_path, "ifca")
    parts = agree._start(folder)
    assert [part.shape for part in parts] == 2 * [part.shape for part in agree._start()]
    np.testing.assert_array_equal(
        np.concatenate([part.ravel() for part in parts]), np.load(folder / "starts.npy").ravel()
    )


def test_cfla_s_groups_are_disjoint_and_keep_to_their_labels():
    import cfla_federations as cfla

    labels = np.repeat(np.arange(10), 600)
    dealt = cfla.groups(labels, np.random.default_rng(0))
    assert len(dealt) == 50
    assert len(np.unique(np.concatenate(dealt))) == sum(map(len, dealt))
    clients = iter(dealt)
    for low, high, count in cfla.GROUPS:
        for _ in range(count):
            own = next(clients)
            assert set(labels[own]) <= set(range(low, high + 1))
            assert len(own) == int((high - low + 1) * 600 // count * 0.2)


def test_cfla_s_dirichlet_clients_divide_all_samples():
    import cfla_federations as cfla

    labels = np.repeat(np.arange(4), 5_000)
    dealt = cfla.dirichlet(labels, np.random.default_rng(2026), clients=40, share=1.0)
    np.testing.assert_array_equal(np.sort(np.concatenate(dealt)), np.arange(len(labels)))
    expected = np.random.default_rng(2026).dirichlet(np.full(4, 0.1), size=40)  # as CFLA draws them
    expected = expected / expected.sum(axis=0)
    counts = np.array([np.bincount(labels[own], minlength=4) for own in dealt])
    np.testing.assert_allclose(counts / 5_000, expected, atol=2 / 5_000)
    few = cfla.dirichlet(labels, np.random.default_rng(2026), clients=40, most=300)
    assert max(map(len, few)) == 60


def test_a_constant_answer_is_as_good_as_the_most_frequent_label():
    import cfla_federations as cfla

    labels = np.array([0, 0, 0, 1, 1, 1, 1, 1])
    assert cfla.constant_answer(labels, [np.arange(4), np.arange(4, 8)]) == (87.5, 12.5)


def test_the_text_network_of_cfla_takes_articles():
    import cfla_federations as cfla

    network = cfla.text_cnn(4, vocabulary=50)
    assert network(torch.randint(0, 50, (3, 12))).shape == (3, 4)
    assert sum(p.numel() for p in network.parameters()) == 50 * 128 + 100 * (128 * 12 + 3) + 300 * 4 + 4
    assert cfla.lenet((1, 28, 28), 10)(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


ANGLES = """
import numpy as np


def calculating_adjacency(clients_idxs, U):
    return np.array([[np.degrees(np.arccos(np.clip(a.T @ b, -1, 1))).min() for b in U] for a in U])


def hierarchical_clustering(A, thresh, linkage):
    assert linkage == "average"
    return [[0, 2], [1]]
"""


def test_clusters_of_published_functions_are_read_as_labels(tmp_path):
    import clusterings

    path = tmp_path / "angles.py"
    path.write_text(ANGLES)
    theirs = clusterings.functions(path)
    vectors = [np.array([[1.0], [0.0]]), np.array([[0.0], [1.0]]), np.array([[-1.0], [0.0]])]
    matrix = clusterings.angles(theirs, vectors)
    np.testing.assert_allclose(matrix, [[0, 90, 180], [90, 0, 90], [180, 90, 0]])  # signs count there
    labels = clusterings.clusters(theirs, matrix, 5.0)
    assert clusterings.same(labels, np.array([7, 3, 7]))
    assert not clusterings.same(labels, np.array([7, 7, 3]))
    assert clusterings.sizes(labels) == [2, 1]
    with pytest.raises(SystemExit, match="no such file"):
        clusterings.functions(tmp_path / "none.py")
