"""FedAvg in Flower's simulation engine, as in its PyTorch quickstart.

After https://flower.ai/docs/framework/tutorial-quickstart-pytorch.html: a ``ClientApp`` that trains the
received weights and replies with its own, and a ``ServerApp`` with the strategy ``FedAvg``.
"""

import os
import sys

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from networks import build
from shared import finished, load_task, round_done

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(msg: Message, context: Context):
    torch.set_num_threads(1)
    task = load_task()
    model = build(task.network, task.shape, task.classes)
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    x, y = map(torch.from_numpy, task.client(context.node_config["partition-id"]))
    loader = DataLoader(TensorDataset(x, y), batch_size=task.batch_size, shuffle=True)
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=task.momentum)
    model.train()
    running_loss = 0.0
    for _ in range(task.epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    metrics = MetricRecord(
        {"train_loss": running_loss / (task.epochs * len(loader)), "num-examples": len(loader.dataset)}
    )
    return Message(
        content=RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg
    )


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    task = load_task()
    model = build(task.network, task.shape, task.classes)
    strategy = FedAvg(
        fraction_train=(task.cohort + 0.5) / task.clients,
        fraction_evaluate=0.0,
        min_train_nodes=task.cohort,
        min_available_nodes=task.clients,
    )

    def after_round(server_round, arrays):
        if server_round:  # it is also called before the first round
            round_done()

    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=task.rounds,
        evaluate_fn=after_round,
    )
    finished(result.arrays.to_torch_state_dict().values())


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))
    import run_flwr  # Ray's workers import the app from this module

    run_simulation(
        run_flwr.server_app,
        run_flwr.client_app,
        num_supernodes=load_task().clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
