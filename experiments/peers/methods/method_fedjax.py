"""The methods in FedJAX."""

import os
import sys

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [HERE, os.path.join(HERE, "clients")]
import run_fedjax  # first: it puts back what JAX has removed  # noqa: I001
import fedjax
from fedjax.algorithms import fed_prox
from shared import load_task


def main():
    task = load_task()
    s = task.settings
    if task.method == "fedprox":
        run_fedjax.main(lambda *given: fed_prox.fed_prox(*given, proximal_weight=s["mu"]))
    elif task.method == "fedavgm":
        run_fedjax.main(server=fedjax.optimizers.sgd(learning_rate=1.0, momentum=s["beta"]))
    elif task.method == "fedadam":
        server = fedjax.optimizers.adam(learning_rate=s["lr"], b1=s["beta1"], b2=s["beta2"], eps=s["tau"])
        run_fedjax.main(server=server)


if __name__ == "__main__":
    main()
