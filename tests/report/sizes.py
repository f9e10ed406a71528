"""Sizes of pages, and what it takes to open them: ``python -m tests.report.sizes`` (needs Chromium).

The runs are made up: 200 rounds, 100 or 10,000 clients with ids of their own, in 10 planted groups, whose
clusters change in every round.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
from playwright.sync_api import sync_playwright

from rayfl.report import write_report
from rayfl.report.compare import Comparison
from tests.report.test_browser import ARGUMENTS, CHROMIUM

ROUNDS = 200


def made_up(path: Path, clients: int, seed: int = 0, algorithm: str = "ifca") -> Path:
    """A run directory."""
    path.mkdir()
    rng, rounds = np.random.default_rng(seed), np.arange(ROUNDS)
    accuracy = 90 - 60 * np.exp(-rounds / 30) + rng.normal(0, 1, ROUNDS)
    columns = {"accuracy_mean": 0, "accuracy_worst10": -20, "accuracy_best10": 8, "accuracy_median": 1}
    frame = pd.DataFrame({name: accuracy + shift for name, shift in columns.items()})
    frame.insert(0, "round", rounds)
    more = {
        "seconds": 0.3,
        "accuracy_var": 50.0,
        "train_loss": 1.2,
        "loss_mean": 1.5,
        "clusters": 10,
        "ari": 0.9,
    }
    frame.assign(**more, bytes_up=1e7, bytes_down=1e7).to_csv(path / "rounds.csv", index=False)
    groups = rng.integers(0, 10, clients)
    labels = [
        np.where(rng.random(clients) < 0.1, rng.integers(0, 10, clients), groups) for _ in range(ROUNDS)
    ]
    pd.DataFrame(
        {
            "client": np.arange(clients), "name": [f"writer-{i:05d}" for i in range(clients)],
            "n": rng.integers(20, 400, clients), "group": groups, "cluster": labels[-1],
            "accuracy_last": rng.uniform(30, 100, clients), "accuracy_best": rng.uniform(60, 100, clients),
            "best_round": rng.integers(0, ROUNDS, clients), "test_samples": rng.integers(5, 90, clients),
        }
    ).to_csv(path / "clients.csv", index=False)  # fmt: skip
    counts = rng.integers(0, 40, (clients, 10)) + 100 * np.eye(10, dtype=int)[groups]
    pd.DataFrame(counts, columns=[f"class_{i}" for i in range(10)]).to_csv(path / "labels.csv", index=False)
    timeline = [
        {"round": t, "when": "after", "labels": each.tolist(), "n_clusters": 10}
        for t, each in enumerate(labels)
    ]
    (path / "clusters.json").write_text(json.dumps({"groups": groups.tolist(), "timeline": timeline}))
    ledger = [
        f"{t},{tier},{way},model,{10**7}"
        for t in rounds for tier in ("client_lps", "lps_gps") for way in ("up", "down")
    ]  # fmt: skip
    (path / "communication.csv").write_text("\n".join(["round,tier,direction,kind,bytes", *ledger]))
    (path / "config.yaml").write_text(f"seed: {seed}\nalgorithm: {{name: {algorithm}}}\n")
    (path / "environment.json").write_text("{}")
    return path


def measure(tab: object, name: str, path: Path, written: float) -> None:
    """Print one line: size, and seconds until the page and its first charts are there, and until all are."""
    begun = time.perf_counter()
    tab.goto(path.as_uri())  # type: ignore[attr-defined]
    tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")  # type: ignore[attr-defined]
    shown = time.perf_counter() - begun
    tab.evaluate("document.querySelectorAll('[data-chart]').forEach(rayfl.open)")  # type: ignore[attr-defined]
    every = time.perf_counter() - begun
    size = path.stat().st_size / 1e6
    print(f"{name:40s} {size:5.2f} MB  written {written:5.2f} s  shown {shown:5.2f} s  all {every:5.2f} s")


def main() -> None:
    """Measure reports and comparisons."""
    root = Path(tempfile.mkdtemp())
    try:
        with sync_playwright() as started:
            browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            tab = browser.new_page(viewport={"width": 1280, "height": 900})
            for clients in (100, 10_000):
                runs = [made_up(root / f"{clients}-{seed}", clients, seed) for seed in range(3)]
                begun = time.perf_counter()
                page = write_report(runs[0])
                measure(tab, f"report, {clients:,} clients", page, time.perf_counter() - begun)
                begun = time.perf_counter()
                page = Comparison.of(runs).write(root / f"{clients}.html")
                measure(tab, f"comparison of 3 seeds, {clients:,} clients", page, time.perf_counter() - begun)
                names = ("ifca", "pacfl", "cfl", "flt", "flis_dc", "flis_hc", "mt_hfl")
                methods = [made_up(root / f"{clients}-{name}", clients, 0, name) for name in names]
                begun = time.perf_counter()
                page = Comparison.of(methods).write(root / f"{clients}-methods.html")
                what = f"comparison of {len(names)} methods, {clients:,} clients"
                measure(tab, what, page, time.perf_counter() - begun)
            browser.close()
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
