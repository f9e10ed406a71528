"""The methods in Flower: its strategies, and the proximal term in the client as its documentation asks."""

import os
import sys

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvgM, FedProx
from flwr.simulation import run_simulation

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from networks import build
from shared import finished, load_task, round_done

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(msg, context):
    torch.set_num_threads(1)
    task = load_task()
    model = build(task.network, task.shape, task.classes)
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    received = [parameter.detach().clone() for parameter in model.parameters()]
    mu = msg.content["config"].get("proximal-mu", 0.0)
    x, y = map(torch.from_numpy, task.client(context.node_config["partition-id"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=task.momentum)
    for _ in range(task.epochs):
        for at in range(0, len(x), task.batch_size):
            optimizer.zero_grad()
            batch = slice(at, at + task.batch_size)
            loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
            for current, initial in zip(model.parameters(), received, strict=True):
                loss = loss + mu / 2 * (current - initial).square().sum()
            loss.backward()
            optimizer.step()
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(x)}),
    }
    return Message(content=RecordDict(content), reply_to=msg)


def strategy_of(task):
    s = task.settings
    settings = {
        "fraction_train": 1.0,
        "fraction_evaluate": 0.0,
        "min_train_nodes": task.clients,
        "min_available_nodes": task.clients,
    }
    if task.method == "fedprox":
        return FedProx(**settings, proximal_mu=s["mu"])
    if task.method == "fedavgm":
        return FedAvgM(**settings, server_momentum=s["beta"])
    return FedAdam(**settings, eta=s["lr"], beta_1=s["beta1"], beta_2=s["beta2"], tau=s["tau"])


@server_app.main()
def main(grid, context):
    task = load_task()
    model = build(task.network, task.shape, task.classes)
    result = strategy_of(task).start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=task.rounds,
        evaluate_fn=lambda server_round, arrays: round_done(),
    )
    finished(result.arrays.to_torch_state_dict().values())


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))
    import method_flwr  # Ray's workers import the app from this module

    run_simulation(
        method_flwr.server_app,
        method_flwr.client_app,
        num_supernodes=load_task().clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
