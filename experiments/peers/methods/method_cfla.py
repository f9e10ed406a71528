"""The methods in CFLA: its clients and servers as they are, trained on all samples of a client.

After ``cfla/experiments/scripts/ifca.py`` and ``fesem.py``. CFLA builds networks without arguments.
"""

import os
import sys
import tempfile

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
import torchvision_shim  # noqa: F401, I001

import torch
from cfla.framework.client.client_fesem import ClientFeSEM
from cfla.framework.client.client_ifca import ClientIFCA
from cfla.framework.server.server_fesem import ServerFeSEM
from cfla.framework.server.server_ifca import ServerIFCA
from torch.nn.utils import vector_to_parameters
from torch.utils.data import TensorDataset

from networks import fresh
from shared import finished, load_task, round_done

task = load_task()


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.whole = fresh(task.network, task.shape, task.classes)

    def forward(self, x):
        return self.whole(x)


def models():
    """The models from which the clusters start."""
    start_models = []
    for row in task.starts():
        start_models.append(Network())
        vector_to_parameters(torch.from_numpy(row), start_models[-1].parameters())
    return start_models


def main():
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp()
    args = {
        "device": "cpu",
        "local_epochs": task.epochs,
        "batch_size": task.batch_size,
        "learning_rate": task.lr,
        "train_fraction": 1.0,
        "fraction": 1.0,
        "rounds": task.rounds,
        "num_clusters": task.settings["clusters"],
        "output_dir": folder,
    }
    client_class = ClientFeSEM if task.method == "fedsem" else ClientIFCA
    datasets = [TensorDataset(*map(torch.from_numpy, task.client(c))) for c in range(task.clients)]
    clients = [client_class(c, dataset, args, folder) for c, dataset in enumerate(datasets)]
    starts = models()
    server = (ServerFeSEM if task.method == "fedsem" else ServerIFCA)(starts[0], None, args)
    server.set_clients(clients)
    if task.method in ("ifca", "ifca_unequal"):
        server.cluster_centers = [model.state_dict() for model in starts]
    server.train(verbose=False)
    for _ in range(task.rounds):
        round_done()
    finished(tensor for center in server.cluster_centers for tensor in center.values())


if __name__ == "__main__":
    main()
