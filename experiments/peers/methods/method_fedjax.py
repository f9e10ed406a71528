"""The methods in FedJAX."""

import os
import sys

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [HERE, os.path.join(HERE, "clients")]
import run_fedjax  # first: it restores names that JAX has removed  # noqa: I001
import fedjax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_prox, hyp_cluster
from shared import load_task


class Clusters:
    """The state of HypCluster, whose models ``run_fedjax`` sees as layers of one."""

    def __init__(self, state):
        self.state = state
        self.params = {
            f"{c} {name}": layer
            for c, params in enumerate(state.cluster_params)
            for name, layer in params.items()
        }


def ifca(loss, client, server, batches):
    """HypCluster (Mansour et al. 2020) is IFCA with model averaging."""
    hyper = fedjax.PaddedBatchHParams(batch_size=batches.batch_size)
    algorithm = hyp_cluster.hyp_cluster(loss, client, server, hyper, batches)

    def init(params):
        return Clusters(algorithm.init([unflatten(row, params) for row in load_task().starts()]))

    def apply(clusters, clients):
        state, diagnostics = algorithm.apply(clusters.state, clients)
        return Clusters(state), diagnostics

    return fedjax.FederatedAlgorithm(init, apply)


def unflatten(row, params):
    """Weights in the order of the PyTorch network, whose matrices are transposed."""
    layers = {}
    for name, layer in params.items():
        inputs, outputs = layer["w"].shape
        w, b, row = np.split(row, [inputs * outputs, (inputs + 1) * outputs])
        layers[name] = {"w": jnp.asarray(w.reshape(outputs, inputs).T), "b": jnp.asarray(b)}
    return layers


def main():
    task = load_task()
    s = task.settings
    if task.method.startswith("ifca"):
        run_fedjax.main(ifca)
    elif task.method == "fedprox":
        run_fedjax.main(lambda *given: fed_prox.fed_prox(*given, proximal_weight=s["mu"]))
    elif task.method == "fedavgm":
        run_fedjax.main(server=fedjax.optimizers.sgd(learning_rate=1.0, momentum=s["beta"]))
    elif task.method == "fedadam":
        server = fedjax.optimizers.adam(learning_rate=s["lr"], b1=s["beta1"], b2=s["beta2"], eps=s["tau"])
        run_fedjax.main(server=server)


if __name__ == "__main__":
    main()
