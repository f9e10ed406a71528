import types

import pytest

from rayfl.clustering.cluster import refuse
from rayfl.clustering.config import Clustering
from rayfl.clustering.memory import bytes_per_pair, check_memory
from rayfl.errors import RayflError
from rayfl.memory import free_memory, total_memory
from rayfl.signatures.spectrum import Spectrum


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with 10 GB free."""
    free = types.SimpleNamespace(available=10 * 10**9, total=12 * 10**9)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)


def write(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_without_a_control_group_it_is_what_the_machine_has(tmp_path):
    assert free_memory(tmp_path) == 10 * 10**9


def test_a_control_group_has_its_limit_less_what_cannot_be_reclaimed(tmp_path):
    write(
        tmp_path,
        memory__max=6 * 10**9,
        memory__current=5 * 10**9,
        memory__stat=f"anon 1\ninactive_file {2 * 10**9}",
    )
    assert free_memory(tmp_path) == 3 * 10**9


@pytest.mark.parametrize("limit", ["max", 10**15])
def test_a_control_group_without_a_limit_does_not_count(tmp_path, limit):
    write(tmp_path, memory__max=limit, memory__current=5, memory__stat="inactive_file 0")
    assert free_memory(tmp_path) == 10 * 10**9


def test_the_first_version_of_control_groups(tmp_path):
    write(
        tmp_path / "memory",
        memory__limit_in_bytes=4 * 10**9,
        memory__usage_in_bytes=3 * 10**9,
        memory__stat="inactive_file 7\ntotal_inactive_file 500000000",
    )
    assert free_memory(tmp_path) == 15 * 10**8


def test_the_job_of_a_batch_system_is_a_group_below_others(tmp_path):
    """The limits of all groups around a process hold; another container's path leads nowhere."""
    membership = tmp_path / "cgroup"
    membership.write_text("0::/system.slice/job_1/step_0\n")
    write(tmp_path, memory__max="max")
    job = tmp_path / "system.slice" / "job_1"
    (job / "step_0").mkdir(parents=True)
    write(job, memory__max=10**9, memory__current=3 * 10**8, memory__stat="inactive_file 0")
    write(job / "step_0", memory__max="max", memory__current=10**8, memory__stat="inactive_file 0")
    assert total_memory(tmp_path, membership) == 10**9
    assert free_memory(tmp_path, membership) == 7 * 10**8
    membership.write_text("11:cpu:/elsewhere\n4:memory,hugetlb:/job_2\n")
    write(tmp_path / "memory")
    write(tmp_path / "memory" / "job_2", memory__limit_in_bytes=2 * 10**9)
    assert total_memory(tmp_path, membership) == 2 * 10**9
    for elsewhere in ("0::/../../job_1\n", "0::/docker/abc\n", "nonsense", ""):
        membership.write_text(elsewhere)
        assert total_memory(tmp_path, membership) == 12 * 10**9
    assert total_memory(tmp_path, tmp_path / "none") == 12 * 10**9


def test_a_machine_has_in_all_no_more_than_its_control_group(tmp_path):
    assert total_memory(tmp_path) == 12 * 10**9
    write(tmp_path, memory__max=6 * 10**9)
    assert total_memory(tmp_path) == 6 * 10**9
    write(tmp_path, memory__max="max")
    assert total_memory(tmp_path) == 12 * 10**9


def test_a_full_control_group_has_nothing_left(tmp_path):
    write(tmp_path, memory__max=10, memory__current=20, memory__stat="inactive_file 0")
    assert free_memory(tmp_path) == 0


def test_thirty_thousand_clients_fit_into_5_gb_and_not_into_4():
    per_pair = bytes_per_pair(30_000)
    check_memory(30_000, 5 * 10**9, per_pair)
    with pytest.raises(RayflError, match=r"30,000 clients need 4\.50 GB, 4\.00 GB are free; up to 28,284"):
        check_memory(30_000, 4 * 10**9, per_pair)
    check_memory(28_284, 4 * 10**9, per_pair)


def test_what_does_not_fit_is_refused_before_anything_is_computed(monkeypatch):
    monkeypatch.setattr("rayfl.clustering.cluster.free_memory", lambda: 10**9)
    many = Clustering(exact_up_to=10**6)
    refuse(many, 14_000)
    with pytest.raises(RayflError, match=r"20,000 clients need 2\.00 GB.*clustering\.exact_up_to=14142"):
        refuse(many, 20_000)
    refuse(Clustering(exact_up_to=14_142), 20_000)  # as the message says


def test_an_exchange_needs_room_for_its_relations_too(monkeypatch):
    monkeypatch.setattr("rayfl.clustering.cluster.free_memory", lambda: 10**9)
    spectrum = Clustering(signature=Spectrum())
    with pytest.raises(RayflError, match=r"14,000 clients need 2\.55 GB"):
        refuse(spectrum, 14_000)
    refuse(spectrum, 14_000, exchanged=True)  # they are in memory already
