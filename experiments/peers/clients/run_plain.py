"""FedAvg as a plain PyTorch loop in two processes of one thread each; no framework."""

import os
import sys

import torch
import torch.multiprocessing as mp
from torch.nn import functional

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from networks import build
from shared import finished, load_task, round_done


def work(pipe):
    torch.set_num_threads(1)
    task = load_task()
    model = build(task.network, task.shape, task.classes)
    model.train()
    while (message := pipe.recv()) is not None:
        state, clients = message
        total = {name: torch.zeros_like(value, dtype=torch.float32) for name, value in state.items()}
        samples = 0
        for client in clients:
            x, y = map(torch.from_numpy, task.client(client))
            model.load_state_dict(state)
            optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=task.momentum)
            for _ in range(task.epochs):
                for batch in torch.randperm(len(x)).split(task.batch_size):
                    optimizer.zero_grad()
                    functional.cross_entropy(model(x[batch]), y[batch]).backward()
                    optimizer.step()
            for name, value in model.state_dict().items():
                total[name] += len(x) * value
            samples += len(x)
        pipe.send((total, samples))


def main():
    task = load_task()
    pipes = []
    for _ in range(2):
        our_end, worker_end = mp.get_context("spawn").Pipe()
        mp.get_context("spawn").Process(target=work, args=(worker_end,), daemon=True).start()
        pipes.append(our_end)
    state = build(task.network, task.shape, task.classes).state_dict()
    for _ in range(task.rounds):
        cohort = torch.randperm(task.clients)[: task.cohort].tolist()
        for k, pipe in enumerate(pipes):
            pipe.send((state, cohort[k::2]))
        totals, samples = zip(*(pipe.recv() for pipe in pipes), strict=True)
        state = {
            name: (sum(total[name] for total in totals) / sum(samples)).to(value.dtype)
            for name, value in state.items()
        }
        round_done()
    for pipe in pipes:
        pipe.send(None)
    finished(state.values())


if __name__ == "__main__":
    main()
