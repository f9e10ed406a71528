"""Clients that join after the last round: tested with what they are given; nothing was trained with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayfl.api import Result, resume, run
from rayfl.commands.newcomers import assign_newcomers
from rayfl.config import load
from rayfl.data import Federation, write_npz
from rayfl.errors import ConfigError
from rayfl.report.compare import Comparison
from rayfl.servers.building import build
from rayfl.study.results import check_column
from tests.report.reading import rows
from tests.runs import assert_same

LATE = [{"name": "join", "round": 4, "clients": 1, "group": group} for group in range(3)]
METHODS: dict[str, dict[str, Any]] = {
    "pacfl": {"algorithm": "pacfl", "clustering": {"n_clusters": 3}},
    "ifca": {"algorithm": {"name": "ifca", "clusters": 4}},
    "mt_hfl": {"algorithm": "mt_hfl", "clustering": {"n_clusters": 3}},
    "fedavg": {"algorithm": "fedavg"},
    "per_fedavg": {"algorithm": {"name": "per_fedavg", "alpha": 0.1, "beta": 0.1}},
    "lg_fedavg": {"algorithm": {"name": "lg_fedavg", "local_layers": 1}},
}


def late(settings: dict[str, Any], method: str, **changes: Any) -> dict[str, Any]:
    """A run that three of nine clients join at its end, one of each group."""
    partition = {**settings["partition"], "validation": 0}
    evaluation = {"every": 2, "finetune_epochs": 2}
    data = {"name": "digits", "normalise": "none"}  # the pooled deviation would be of newcomers, too
    found = {
        **settings,
        "data": data,
        "rounds": 4,
        "events": LATE,
        "partition": partition,
        "evaluation": evaluation,
    }
    return {**found, **METHODS[method], **changes}


def samples_of(federation: Federation, clients: list[int], owner: str) -> dict[str, Any]:
    """The samples of some clients, client by client, with each sample's client from 0."""
    found: dict[str, Any] = {}
    for part, lists in (("train", federation.train), ("test", federation.test)):
        ids = [lists[client] for client in clients]
        for name in ("x", "y"):
            found[f"{name}_{part}"] = getattr(federation.samples, f"{name}_{part}")[np.concatenate(ids)]
        found[f"{owner}_{part}"] = np.repeat(np.arange(len(ids)), [len(each) for each in ids])
    return found


@pytest.mark.parametrize("method", METHODS)
def test_they_are_given_what_the_command_gives_them_after_a_run_without_them(
    method: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    config = load(late(settings, method))
    result = run(late(settings, method))
    federation = build(config)[0][-1].federation
    write_npz(
        tmp_path / "known.npz", replace(federation.samples, **samples_of(federation, [*range(6)], "domain"))
    )
    np.savez(tmp_path / "new.npz", **samples_of(federation, [6, 7, 8], "client"))
    alone = late(
        settings,
        method,
        events=[],
        data={"name": "npz", "path": str(tmp_path / "known.npz"), "normalise": "none"},
    )
    before = run({**alone, "partition": {"name": "natural", "clients": 6, "validation": 0}})
    expected = assign_newcomers(before.path, tmp_path / "new.npz", epochs=2, local_epochs=0)
    found = result.clients[6:]
    assert found["newcomers_accuracy"].tolist() == expected["accuracy"].tolist()
    assert found["newcomers_finetuned_accuracy"].tolist() == expected["accuracy_finetuned"].tolist()
    assert found["cluster"].tolist() == expected["cluster"].tolist()
    summary = result.summary
    assert summary["newcomers"] == 3
    assert summary["newcomers_accuracy_mean"] == pytest.approx(expected["accuracy"].mean())
    assert summary["newcomers_finetuned_accuracy_mean"] == pytest.approx(
        expected["accuracy_finetuned"].mean()
    )
    # Nothing else knows of them.
    for name in ("models_sha256", "accuracy_mean", "finetuned_accuracy_mean", "bytes_up", "clusters"):
        assert summary[name] == before.summary[name], name
    assert result.clients["accuracy_last"][:6].tolist() == before.clients["accuracy_last"].tolist()
    assert found["accuracy_last"].isna().all()
    assert (summary["newcomers_bytes_up"] > 0) == (method in ("pacfl", "mt_hfl"))


def test_reports_show_them(settings: dict[str, Any]) -> None:
    config = late(settings, "pacfl", clustering={"threshold": 1.0})  # each founds a cluster
    output = {**settings["output"], "report": True}
    result = run({**config, "output": output})
    assert [each["when"] for each in result.clusters["timeline"]] == ["before", "after"]
    assert [each["round"] for each in result.clusters["timeline"]] == [0, 3]
    page = (result.path / "report.html").read_text()
    mean = f"{result.summary['newcomers_accuracy_mean']:.1f} %"
    assert ["Accuracy of clients that joined at the end", mean, ""] in rows(page)
    table = dict(Comparison.of([result.path]).shown().texts())
    assert table["newcomers"] == [mean]


def test_a_run_that_goes_on_trains_them(settings: dict[str, Any]) -> None:
    """The checkpoint is from before they joined: they do so once, in their turn."""
    first = run(late(settings, "pacfl"))
    longer = resume(first.path, ["rounds=6"])
    assert longer.rounds["clients"].tolist() == [6, 6, 6, 6, 9, 9]
    whole = run(late(settings, "pacfl", rounds=6))
    assert_same(whole, longer)
    assert "newcomers" not in longer.summary
    assert longer.clients["accuracy_last"].notna().all()


def test_a_killed_run_tests_them_again(settings: dict[str, Any]) -> None:
    result = run(late(settings, "ifca"))
    clients = result.clients
    (result.path / "summary.json").unlink()  # as after a kill between the last checkpoint and the summary
    again = resume(result.path)
    told = {name: value for name, value in result.summary.items() if name.startswith("newcomers")}
    assert {name: again.summary[name] for name in told} == told
    assert Result(result.path).clients.equals(clients)


def test_only_newcomers_come_after_the_end(settings: dict[str, Any]) -> None:
    for event, last in (
        ({"name": "leave", "round": 4, "clients": 1}, 3),
        ({"name": "join", "round": 4, "returning": True}, 3),
        ({**LATE[0], "round": 5}, 4),
    ):
        with pytest.raises(ConfigError, match=rf"of 4 rounds; it must lie in 1..{last}$"):
            run(late(settings, "fedavg", events=[event]))


def test_a_study_knows_the_numbers_of_newcomers(settings: dict[str, Any]) -> None:
    column = "newcomers_finetuned_accuracy_worst10"
    check_column(column, "report.columns", [load(late(settings, "fedavg"))])
    with pytest.raises(ConfigError, match=r"an event \{name: join, round: <the last>, clients: 5\}"):
        check_column(column, "report.columns", [load({**settings, "rounds": 4})])


@pytest.mark.slow
@pytest.mark.ray
def test_they_get_the_same_bits_on_ray(ray_cluster: None, settings: dict[str, Any]) -> None:
    inline = run(late(settings, "pacfl"))
    ray = run(late(settings, "pacfl", execution={"backend": "ray", "actors": 2}))
    columns = ["cluster", "newcomers_accuracy", "newcomers_finetuned_accuracy"]
    assert ray.clients[columns].equals(inline.clients[columns])
    assert ray.summary["models_sha256"] == inline.summary["models_sha256"]
