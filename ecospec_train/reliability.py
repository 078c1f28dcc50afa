"""Reliability of acceptance estimates: how often the target really takes what was given probability p."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ecospec_runtime.pool import Floats
from ecospec_train.plots import pyplot, save

BINS = 15
RELIABILITY_PLOT = "reliability.png"


def reliability(estimate: Floats, label: Floats) -> tuple[Floats, Floats, Floats]:
    """Mean estimate, mean label and number of nodes of every bin in use, over `BINS` equal-width bins."""
    index = np.minimum((estimate * BINS).astype(int), BINS - 1)
    counts = np.bincount(index, minlength=BINS).astype(np.float32)
    used = counts > 0
    mean, found = (
        np.bincount(index, values.astype(np.float64), BINS)[used] / counts[used] for values in (estimate, label)
    )
    return mean.astype(np.float32), found.astype(np.float32), counts[used]


def plot_reliability(panels: dict[str, tuple[dict[str, Floats], Floats]], path: Path) -> bool:
    """One panel per name, of (estimates by kind, labels); a line per kind, dots as large as their bins are full.

    False, and no file, without matplotlib or nodes.
    """
    panels = {name: panel for name, panel in panels.items() if len(panel[1])}
    plt = pyplot()
    if plt is None or not panels:
        return False
    figure, axes = plt.subplots(1, len(panels), figsize=(3.6 * len(panels), 3.6), squeeze=False)
    for axis, (name, (estimates, label)) in zip(axes[0], panels.items(), strict=True):
        axis.plot([0, 1], [0, 1], color="black", linewidth=0.8)
        for kind, estimate in estimates.items():
            mean, found, counts = reliability(estimate, label)
            line = axis.plot(mean, found, linewidth=1, label=kind)[0]
            axis.scatter(mean, found, s=60 * np.sqrt(counts / len(label)), color=line.get_color())
        axis.set_title(f"{name}: {len(label)} nodes", fontsize=9)
        axis.set_xlabel("estimated acceptance", fontsize=8)
        axis.set_ylabel("really accepted", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.legend(fontsize=7)
    save(figure, path)
    return True
