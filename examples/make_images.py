"""Write ``images.npz`` and ``owners.csv``: scikit-learn's digits, and the client that owns each image."""

from __future__ import annotations

import csv

import numpy as np
from sklearn.datasets import load_digits


def main() -> None:
    """600 images for training, 300 for tests; eight clients, four with low digits and four with high ones."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) * 15).astype(np.uint8)
    np.savez(
        "images.npz",
        x_train=images[:600],
        y_train=labels[:600],
        x_test=images[600:900],
        y_test=labels[600:900],
    )
    with open("owners.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["sample", "client"])
        for sample, label in enumerate(labels[:600].tolist()):
            writer.writerow([sample, f"{'low' if label < 5 else 'high'}-{sample % 4}"])


if __name__ == "__main__":
    main()
