"""The methods as in their papers, in a plain loop with which the systems are compared.

FedProx: Li et al., MLSys 2020, Algorithm 2. SCAFFOLD: Karimireddy et al., ICML 2020, Algorithm 1, option II.
FedNova: Wang et al., NeurIPS 2020, Equation 7. FedAvgM: Hsu et al., 2019. FedAdam: Reddi et al., ICLR 2021,
Algorithm 2, with ``v = tau^2`` before the first round. IFCA: Ghosh et al., NeurIPS 2020, Algorithm 1, model
averaging, weighted by n_i. FeSEM: Xie et al., 2021, Algorithm 1, weighted by n_i; its first centers, which
the paper leaves open, are those of the best k-means of the first round's models.

``PEERS_VARIANT`` changes one step, to show that this change explains how a system differs (``agree.WHY``).
"""

import itertools
import os
import sys

import torch
from torch.nn import functional

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from networks import build
from shared import finished, load_task, round_done


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])


class Local:
    """The local SGD of IFCA's and FeSEM's clients, and the loss of a model on their data."""

    def __init__(self, task):
        self.task = task
        self.model = build(task.network, task.shape, task.classes)
        self.parameters = list(self.model.parameters())

    def load(self, values):
        with torch.no_grad():
            sizes = [t.numel() for t in self.parameters]
            for tensor, value in zip(self.parameters, values.split(sizes), strict=True):
                tensor.copy_(value.view_as(tensor))

    def loss(self, i, values):
        self.load(values)
        images, labels = map(torch.from_numpy, self.task.client(i))
        with torch.no_grad():
            return functional.cross_entropy(self.model(images), labels)

    def train(self, i, values):
        self.load(values)
        images, labels = map(torch.from_numpy, self.task.client(i))
        for _ in range(self.task.epochs):
            for at in range(0, len(images), self.task.batch_size):
                batch = slice(at, at + self.task.batch_size)
                loss = functional.cross_entropy(self.model(images[batch]), labels[batch])
                g = flat(torch.autograd.grad(loss, self.parameters))
                self.load(flat(self.parameters) - self.task.lr * g)
        return flat(self.parameters)


def clustered(task, variant):
    """IFCA and FeSEM, all clients in every round."""
    local = Local(task)
    n = torch.tensor([float(task.count(i)) for i in range(task.clients)], dtype=torch.float64)
    if "unweighted" in variant:
        n = torch.ones_like(n)
    centers = torch.from_numpy(task.starts()).double()
    if "equal starts" in variant:
        centers[1:] = centers[0]
    fedsem = task.method == "fedsem"
    assignment = torch.zeros(task.clients, dtype=torch.long)
    for number in range(task.rounds):
        if not fedsem:
            losses = [torch.stack([local.loss(i, center) for center in centers]) for i in range(task.clients)]
            assignment = torch.stack(losses).argmin(dim=1)
        trained = torch.stack([local.train(i, centers[assignment[i]]) for i in range(task.clients)])
        if fedsem and number == 0 and not variant:
            assignment = k_means(trained, n, len(centers))
        elif fedsem:
            assignment = (trained[:, None] - centers).square().sum(dim=2).argmin(dim=1)
        for c in range(len(centers)):
            if (assignment == c).any():
                centers[c] = (n[:, None] * trained)[assignment == c].sum(dim=0) / n[assignment == c].sum()
        round_done()
    tensors = []
    for center in centers:
        local.load(center)
        tensors += [tensor.detach().clone() for tensor in local.parameters]
    finished(tensors)


def k_means(points, n, count):
    """The best of all divisions into ``count`` groups, numbered by first occurrence."""

    def inertia(division):
        labels = torch.tensor(division)
        total = 0.0
        for c in range(count):
            weights = n * (labels == c)
            mean = (weights[:, None] * points).sum(dim=0) / weights.sum()
            total += float((weights * (points - mean).square().sum(dim=1)).sum())
        return total

    divisions = [
        (0, *rest)
        for rest in itertools.product(range(count), repeat=len(points) - 1)
        if list(dict.fromkeys((0, *rest))) == list(range(count))
    ]
    return torch.tensor(min(divisions, key=inertia))


def main():
    torch.set_num_threads(1)
    task = load_task()
    if "clusters" in task.settings:
        clustered(task, os.environ.get("PEERS_VARIANT", ""))
        return
    s = task.settings
    variant = os.environ.get("PEERS_VARIANT", "")
    model = build(task.network, task.shape, task.classes)
    parameters = list(model.parameters())
    x = flat(parameters)
    sizes = torch.tensor([task.count(i) for i in range(task.clients)], dtype=torch.float64)
    p = sizes / sizes.sum()
    c = torch.zeros_like(x)
    own_c = torch.zeros(task.clients, len(x), dtype=torch.float64)
    m, v = torch.zeros_like(x), torch.full_like(x, 0.0 if variant else s.get("tau", 0.0) ** 2)

    def load(values):
        with torch.no_grad():
            for tensor, value in zip(parameters, values.split([t.numel() for t in parameters]), strict=True):
                tensor.copy_(value.view_as(tensor))

    for number in range(1, task.rounds + 1):
        updates, steps, changes = [], [], []
        for i in range(task.clients):
            images, labels = map(torch.from_numpy, task.client(i))
            load(x)
            n_steps = 0
            for _ in range(task.epochs):
                for at in range(0, len(images), task.batch_size):
                    batch = slice(at, at + task.batch_size)
                    loss = functional.cross_entropy(model(images[batch]), labels[batch])
                    g = flat(torch.autograd.grad(loss, parameters))
                    y = flat(parameters)
                    if task.method == "fedprox":
                        g = g + s["mu"] * (y - x)
                    if task.method == "scaffold":
                        g = g - own_c[i] + c
                    load(y - task.lr * g)
                    n_steps += 1
            updates.append(flat(parameters) - x)
            steps.append(n_steps)
            if task.method == "scaffold":
                sign = 1 if variant == "sign" else -1
                new_c = own_c[i] - c + sign * updates[-1] / (n_steps * task.lr)
                changes.append(new_c - own_c[i])
                own_c[i] = new_c
        delta = torch.stack(updates)
        tau = torch.tensor(steps, dtype=torch.float64)
        if task.method == "scaffold":
            x = x + delta.mean(dim=0)
            c = c + torch.stack(changes).mean(dim=0)
        elif task.method == "fednova":
            weights = p / tau * (p * tau).sum()
            x = (weights[:, None] * delta).sum(dim=0) + (weights.sum() if variant == "models" else 1) * x
        elif task.method == "fedavgm":
            if variant != "late" or number > 1:
                m = s["beta"] * m + (p[:, None] * delta).sum(dim=0)
            x = x + m
        elif task.method == "fedadam":
            mean = (p[:, None] * delta).sum(dim=0) * (s["lr"] if variant == "lr twice" else 1)
            m = s["beta1"] * m + (1 - s["beta1"]) * mean
            v = s["beta2"] * v + (1 - s["beta2"]) * mean**2
            first, second = 1 - s["beta1"] ** number, 1 - s["beta2"] ** number
            if variant == "bias":
                x = x + s["lr"] * (m / first) / ((v / second).sqrt() + s["tau"])
            elif variant == "next bias":
                first, second = 1 - s["beta1"] ** (number + 1), 1 - s["beta2"] ** (number + 1)
                x = x + s["lr"] * second**0.5 / first * m / (v.sqrt() + s["tau"])
            else:
                x = x + s["lr"] * m / (v.sqrt() + s["tau"])
        else:
            x = x + (p[:, None] * delta).sum(dim=0)
        round_done()
    load(x)
    finished(tensor.detach() for tensor in parameters)


if __name__ == "__main__":
    main()
