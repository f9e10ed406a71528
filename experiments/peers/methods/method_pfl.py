"""The methods in pfl."""

import functools
import os
import sys

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [HERE, os.path.join(HERE, "clients")]
import run_pfl
import torch
from pfl.algorithm.fedprox import FedProx, FedProxParams
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
from pfl.data.user_state import DiskUserStateStorage
from pfl.stats import MappedVectorStatistics
from shared import load_task


def main():
    task = load_task()
    s = task.settings
    if task.method == "fedprox":
        run_pfl.main(FedProx, functools.partial(FedProxParams, mu=s["mu"]))
    elif task.method == "scaffold":
        # pfl 0.6 reads states by torch.load, which since PyTorch 2.6 accepts only known classes.
        torch.serialization.add_safe_globals([MappedVectorStatistics])
        params = functools.partial(
            SCAFFOLDParams,
            population=task.clients,
            use_gradient_as_control_variate=False,  # option II
            user_state_storage=DiskUserStateStorage(os.path.join(task.folder, "pfl-states")),
        )
        run_pfl.main(SCAFFOLD, params)
    elif task.method == "fedavgm":
        run_pfl.main(server=functools.partial(torch.optim.SGD, lr=1.0, momentum=s["beta"]))
    elif task.method == "fedadam":
        adam = functools.partial(torch.optim.Adam, lr=s["lr"], betas=(s["beta1"], s["beta2"]), eps=s["tau"])
        run_pfl.main(server=adam)


if __name__ == "__main__":
    main()
