"""``rayfl bench``: the workloads against a plain PyTorch loop, measured in the same run."""
