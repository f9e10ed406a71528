import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rayfl.clustering.cosines import sketch
from rayfl.clustering.parameter_tree import ParameterTree, best_model, walk
from rayfl.clustering.permutation import permute
from rayfl.errors import DataError


def rows(*values):
    return np.array(values, np.float32)


def small_tree():
    """Clients 2, 3, 5, 7, 8: {2, 5, 7} goes up and {3, 8} right, then 7 leaves 2 and 5.

    Parameters name their node: 0 the root, 1 and 2 its children, 3 and 4 the children of 1.
    """
    tree = ParameterTree.start([8, 2, 3, 7, 5], rows(-1, -1))
    tree = tree.split(
        0, ([2, 5, 7], [3, 8]), (rows([0, 2], [1, 9], [-1, 4]), rows([3, 0], [3, 1])), rows(0, 0)
    )
    tree = tree.with_parameters(1, rows(7, 7)).with_parameters(2, rows(2, 2))
    tree = tree.split(1, ([2, 5], [7]), (rows([1, 0], [1, 1]), rows([-1, 0])), rows(1, 1))
    return tree.with_parameters(3, rows(3, 3)).with_parameters(4, rows(4, 4))


def train(updates, seen):
    """A newcomer whose update from the model (v, v) is ``updates[v]``."""

    def step(parameters):
        seen.append(int(parameters[0]))
        return np.array(updates[int(parameters[0])], np.float32)

    return step


def test_the_tree_of_two_splits():
    tree = small_tree()
    assert [node.members.tolist() for node in tree.nodes] == [[2, 3, 5, 7, 8], [2, 5, 7], [3, 8], [2, 5], [7]]
    assert [node.children for node in tree.nodes] == [(1, 2), (3, 4), (), (), ()]
    assert [node.parent for node in tree.nodes] == [-1, 0, 0, 1, 1]
    assert [node.parameters.tolist() for node in tree.nodes] == [[v, v] for v in (0, 1, 2, 3, 4)]
    assert tree.nodes[2].updates.tolist() == [[3, 0], [3, 1]]
    assert tree.leaves == (2, 3, 4)
    assert [tree.leaf_of(client) for client in (2, 3, 5, 7, 8)] == [3, 2, 3, 4, 2]
    assert tree.path(4) == (0, 1, 4)
    with pytest.raises(KeyError):
        tree.leaf_of(4)


def test_children_start_from_the_stationary_point():
    tree = ParameterTree.start([0, 1], rows(5, 5)).split(
        0, ([0], [1]), (rows([1, 0]), rows([0, 1])), rows(6, 6)
    )
    assert [node.parameters.tolist() for node in tree.nodes] == [[6, 6]] * 3


@pytest.mark.parametrize(
    ("updates", "path", "similarities"),
    [
        # the single most similar update decides: 3's (3, 0) in v_1, though all of 2, 5, 7 look up
        ({0: [1, 0]}, (0, 2), [(0.11, 1.0)]),
        # at the root like 2's (0, 2); from the model of node 1 like 7's (-1, 0)
        ({0: [0, 1], 1: [-2, 0]}, (0, 1, 4), [(1.0, 0.316), (-0.707, 1.0)]),
        ({0: [0, 1], 1: [2, 1]}, (0, 1, 3), [(1.0, 0.316), (0.949, -0.894)]),
        # (-3, 0) is unlike everyone but 7's; then at right angles to (1, 0) and to (-1, 0): a tie, v_1
        ({0: [-3, 0], 1: [0, -1]}, (0, 1, 4), [(0.243, -0.949), (0.0, 0.0)]),
    ],
)
def test_a_newcomer_walks_to_the_child_with_the_most_similar_update(updates, path, similarities):
    """As printed, the two maxima belong to the wrong edges; this would end in the other child."""
    seen = []
    found = walk(small_tree(), train(updates, seen))
    assert found.path == path
    assert found.leaf == path[-1]
    assert np.array(found.similarities) == pytest.approx(np.array(similarities), abs=1e-3)
    assert seen == list(path[:-1])  # it trained from the model of every node but the leaf


def test_without_a_split_there_is_no_training():
    found = walk(ParameterTree.start([0], rows(1)), lambda parameters: pytest.fail("trained"))
    assert (found.path, found.similarities) == ((0,), ())


def test_members_find_their_own_cluster_also_sketched_or_permuted():
    random = np.random.default_rng(0)
    updates = random.standard_normal((10, 2000)).astype(np.float32)
    members = [[0, 3, 4, 8], [1, 2, 5, 6, 7, 9]]
    for send in (
        lambda d: d,
        lambda d: sketch(np.atleast_2d(d), 128, 5).reshape(*d.shape[:-1], 128),
        lambda d: permute(d, 5),
    ):
        cached = tuple(send(updates[half]) for half in members)
        tree = ParameterTree.start(range(10), rows(0)).split(0, tuple(members), cached, rows(0))
        for client in range(10):
            found = walk(tree, lambda _, client=client, send=send: send(updates[client]))
            assert client in tree.nodes[found.leaf].members


def test_a_newcomer_joins_all_clusters_on_its_way():
    old = small_tree()
    tree = old.with_member(3, 4)
    assert [node.members.tolist() for node in tree.nodes] == [
        [2, 3, 4, 5, 7, 8],
        [2, 4, 5, 7],
        [3, 8],
        [2, 4, 5],
        [7],
    ]
    assert old.nodes[0].members.tolist() == [2, 3, 5, 7, 8]
    assert tree.nodes[3].updates.tolist() == [[1, 0], [1, 1]]
    # a cluster with a newcomer can be split again
    again = tree.split(3, ([2], [4, 5]), (rows([1, 0]), rows([0, 1], [0, 2])), rows(3, 3))
    assert again.leaves == (2, 4, 5, 6)
    for leaf, client in ((1, 4), (3, 8)):
        with pytest.raises(ValueError, match="cannot join"):
            old.with_member(leaf, client)


def test_the_parents_model_is_still_there_where_a_split_did_harm():
    tree = small_tree()

    def scores(*of_nodes):
        return lambda parameters: of_nodes[int(parameters[0])]

    assert best_model(tree, 4, scores(0.5, 0.6, 0.9, 0.9, 0.7)) == 4
    assert best_model(tree, 4, scores(0.5, 0.8, 0.9, 0.9, 0.7)) == 1
    assert best_model(tree, 4, scores(0.9, 0.8, 0.9, 0.9, 0.7)) == 0
    assert best_model(tree, 4, scores(0.7, 0.7, 0.9, 0.9, 0.7)) == 4  # equal: the most specialised
    assert best_model(tree, 4, scores(0.8, 0.8, 0.9, 0.9, 0.7)) == 1


def test_it_goes_through_a_file_bit_for_bit(tmp_path):
    tree = small_tree().with_member(2, 99)
    arrays, shape = tree.to_arrays()
    save_file(arrays, tmp_path / "tree.safetensors")
    again = ParameterTree.from_arrays(load_file(tmp_path / "tree.safetensors"), json.dumps(json.loads(shape)))
    assert len(again.nodes) == len(tree.nodes)
    for ours, theirs in zip(tree.nodes, again.nodes, strict=True):
        assert (ours.parent, ours.children) == (theirs.parent, theirs.children)
        for name in ("members", "parameters", "updates"):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert a.tobytes() == b.tobytes()
    del arrays["updates.3"]
    with pytest.raises(DataError, match=r"updates\.3"):
        ParameterTree.from_arrays(arrays, shape)


def test_a_tree_is_a_value():
    parameters = rows(1, 2)
    tree = ParameterTree.start([0, 1], parameters)
    with pytest.raises(ValueError, match="read-only"):
        tree.nodes[0].parameters[0] = 3
    with pytest.raises(ValueError, match="read-only"):
        tree.nodes[0].members[0] = 3
    tree.split(0, ([0], [1]), (rows([1, 0]), rows([0, 1])), parameters)
    assert tree.leaves == (0,)
    assert parameters.flags.writeable


@pytest.mark.parametrize(
    ("leaf", "halves", "updates"),
    [
        (1, ([2, 5], [7]), (rows([1, 0], [1, 1]), rows([-1, 0]))),  # no leaf
        (2, ([3], [7]), (rows([1, 0]), rows([1, 1]))),  # not its members
        (2, ([0], [1]), (rows([1, 0]), rows([1, 1]))),  # positions in place of ids
        (2, ([8, 3], []), (rows([1, 0], [1, 1]), np.empty((0, 2), np.float32))),  # an empty half
        (2, ([3], [8]), (rows([1, 0]), np.empty((0, 2), np.float32))),  # an update is missing
    ],
)
def test_splits_that_are_refused(leaf, halves, updates):
    with pytest.raises(ValueError, match="members"):
        small_tree().split(leaf, halves, updates, rows(0, 0))


def test_halves_have_to_be_in_the_order_of_their_updates():
    with pytest.raises(ValueError, match="rising"):
        small_tree().split(3, ([5], [2]), (rows([1, 0]), rows([1, 1])), rows(0, 0)).split(
            2, ([8, 3], []), (rows([1, 0], [1, 1]), np.empty((0, 2), np.float32)), rows(0, 0)
        )
