"""FedAvg in FedJAX, as in its EMNIST example: a Haiku network, ``fed_avg`` and a client sampler.

After ``examples/emnist_fed_avg.py`` of https://github.com/google/fedjax. FedJAX 0.0.17 was written for an
older JAX: names that JAX has removed since then are restored below, and nothing else is changed.
"""

import functools
import os
import sys

import jax

for name in ("tree_map", "tree_leaves", "tree_flatten", "tree_unflatten", "tree_structure"):
    if not hasattr(jax, name):
        setattr(jax, name, getattr(jax.tree_util, name))
if not hasattr(jax.random, "KeyArray"):
    jax.random.KeyArray = jax.Array

import fedjax
import haiku as hk
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from shared import finished, load_task, normalised, round_done


def network(name, classes):
    """The layers of ``networks.py``; images are ``(B, H, W, C)`` here."""
    pool = functools.partial(hk.MaxPool, window_shape=(2, 2, 1), strides=(2, 2, 1), padding="VALID")
    if name in ("mlp", "mlp32"):
        hidden = 32 if name == "mlp32" else 200
        return [hk.Flatten(), hk.Linear(hidden), jax.nn.relu, hk.Linear(classes)]
    if name == "lenet5":
        convolutions = [
            layer
            for channels in (6, 16)
            for layer in (hk.Conv2D(channels, 5, padding="VALID"), jax.nn.relu, pool())
        ]
        dense = [hk.Linear(120), jax.nn.relu, hk.Linear(84), jax.nn.relu, hk.Linear(classes)]
        return [*convolutions, hk.Flatten(), *dense]

    def dropout(rate):
        return lambda x: hk.dropout(hk.next_rng_key(), rate, x)

    return [
        hk.Conv2D(32, 3, padding="VALID"),
        jax.nn.relu,
        hk.Conv2D(64, 3, padding="VALID"),
        jax.nn.relu,
        pool(),
        dropout(0.25),
        hk.Flatten(),
        hk.Linear(128),
        jax.nn.relu,
        dropout(0.5),
        hk.Linear(classes),
    ]


def start(task, params):
    """The initial weights of ``networks.py``, for networks of linear layers alone."""
    if not task.network.startswith("mlp"):
        return params
    from networks import build

    tensors = [t.detach().numpy() for t in build(task.network, task.shape, task.classes).parameters()]
    return {
        name: {"w": jnp.asarray(w.T), "b": jnp.asarray(b)}
        for name, w, b in zip(params, tensors[::2], tensors[1::2], strict=True)
    }


def averaging(loss, client, server, batches):
    def mean(params, batch, rng):
        return jnp.mean(loss(params, batch, rng))

    return fed_avg.federated_averaging(jax.jit(jax.grad(mean)), client, server, batches)


def main(method=averaging, server=None):
    task = load_task()
    x, y = task.arrays()

    def preprocess(batch):
        return {"x": np.moveaxis(normalised(batch["x"]), 1, -1), "y": batch["y"]}

    clients = {}
    for number in range(task.clients):
        positions = task.own(number)
        clients[b"%06d" % number] = {"x": x[positions], "y": y[positions]}
    data = fedjax.InMemoryFederatedData(clients).preprocess_batch(preprocess)

    model = hk.transform(lambda images: hk.Sequential(network(task.network, task.classes))(images))

    def loss(params, batch, rng):
        logits = model.apply(params, rng, batch["x"])
        return fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], logits)

    algorithm = method(
        loss,
        fedjax.optimizers.sgd(learning_rate=task.lr, momentum=task.momentum or None),
        server or fedjax.optimizers.sgd(learning_rate=1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=task.batch_size, num_epochs=task.epochs),
    )
    sample = np.zeros((1, *task.shape[1:], task.shape[0]), np.float32)
    state = algorithm.init(start(task, model.init(jax.random.PRNGKey(0), sample)))
    sampler = fedjax.client_samplers.UniformGetClientSampler(data, task.cohort, seed=0)
    for _ in range(task.rounds):
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        round_done()
    finished(np.asarray(v).T for layer in state.params.values() for v in (layer["w"], layer["b"]))


if __name__ == "__main__":
    main()
