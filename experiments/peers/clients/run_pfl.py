"""FedAvg in Apple's pfl on PyTorch, in two processes under torchrun.

After ``benchmarks/image_classification/pytorch/train.py`` of https://github.com/apple/pfl-research and the
tutorial "Introduction to Federated Learning with CIFAR10 and PyTorch".
"""

import functools
import os
import sys

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from networks import build
from shared import finished, load_task, round_done


def with_loss(module):
    """Add what pfl asks of a PyTorch module: ``loss`` and ``metrics``."""

    def loss(inputs, targets, eval=False):
        module.train(not eval)
        return torch.nn.functional.cross_entropy(module(inputs), targets)

    def metrics(inputs, targets):
        return {"loss": Weighted(loss(inputs, targets, eval=True).item() * len(inputs), len(inputs))}

    module.loss, module.metrics = loss, metrics
    return module


class RoundDone(TrainingProcessCallback):
    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        if os.environ.get("RANK", "0") == "0":
            round_done()
        return False, Metrics()


def main(algorithm=FederatedAveraging, params=NNAlgorithmParams, server=None):
    task = load_task()

    def user(number):
        return Dataset(raw_data=list(map(torch.from_numpy, task.client(number))), user_id=str(number))

    users = list(range(task.clients))
    sizes = {number: task.count(number) for number in users}
    data = FederatedDataset(user, get_user_sampler("minimize_reuse", users), user_id_to_weight=sizes)
    module = with_loss(build(task.network, task.shape, task.classes))
    model = PyTorchModel(
        model=module,
        local_optimizer_create=functools.partial(torch.optim.SGD, momentum=task.momentum),
        central_optimizer=(server or functools.partial(torch.optim.SGD, lr=1.0))(module.parameters()),
    )
    algorithm().run(
        algorithm_params=params(
            central_num_iterations=task.rounds,
            evaluation_frequency=task.rounds,
            train_cohort_size=task.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=None, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=task.lr, local_num_epochs=task.epochs, local_batch_size=task.batch_size
        ),
        callbacks=[RoundDone()],
    )
    if os.environ.get("RANK", "0") == "0":
        finished(module.state_dict().values())


if __name__ == "__main__":
    main()
