"""FedAvg in CFLA; it trains one client after another in one process.

After its scripts (``cfla/experiments/scripts``): clients with a dataset, a server with a test set,
``set_clients`` and ``train``. CFLA's client trains with Adam on a part of its data, tests after every epoch,
and builds a network without arguments; the client here overrides ``train``, as CFLA's own clients do, to do
the work of the comparison. CFLA's server tests the model after every round, here on one sample.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import torchvision_shim  # noqa: F401, I001

import numpy as np
import torch
from cfla.framework.client.clientbase import Client
from cfla.framework.server.server_fedavg import ServerFedAvg
from torch.utils.data import DataLoader, TensorDataset

from networks import build
from shared import finished, load_task, round_done

task = load_task()


class ClientSGD(Client):
    def __init__(self, client_id, dataset, args):
        super().__init__(client_id, dataset, args)
        self.train_loader = DataLoader(dataset, batch_size=args["batch_size"], shuffle=True)  # all of them

    def train(self, global_model=None, verbose=False, **kwargs):
        self.local_model = build(task.network, task.shape, task.classes)
        self.local_model.load_state_dict(global_model.state_dict())
        self.local_model.train()
        optimizer = torch.optim.SGD(
            self.local_model.parameters(), lr=self.learning_rate, momentum=task.momentum
        )
        criterion = torch.nn.CrossEntropyLoss()
        before = torch.cat([p.detach().flatten() for p in global_model.parameters()])
        losses = []
        for _ in range(self.local_epochs):
            for data, target in self.train_loader:
                optimizer.zero_grad()
                loss = criterion(self.local_model(data), target)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        after = torch.cat([p.detach().flatten() for p in self.local_model.parameters()])
        return after - before, np.mean(losses)


class Server(ServerFedAvg):
    def evaluate(self, model, test_dataloader, return_loss=False):
        metrics = super().evaluate(model, test_dataloader, return_loss)
        round_done()
        return metrics


def main():
    torch.set_num_threads(int(os.environ["PEERS_THREADS"]))
    args = {
        "device": "cpu",
        "criterion": None,
        "optimizer": None,
        "local_epochs": task.epochs,
        "batch_size": task.batch_size,
        "learning_rate": task.lr,
        "train_fraction": 0.5,
        "fraction": (task.cohort + 0.5) / task.clients,
        "nb_epochs": task.rounds,
    }
    datasets = [TensorDataset(*map(torch.from_numpy, task.client(c))) for c in range(task.clients)]
    test = DataLoader(TensorDataset(*datasets[0][:1]))
    server = Server(build(task.network, task.shape, task.classes), test, args)
    server.set_clients([ClientSGD(c, dataset, args) for c, dataset in enumerate(datasets)])
    server.train()
    finished(server.global_model.state_dict().values())


if __name__ == "__main__":
    main()
