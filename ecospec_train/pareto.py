"""The picture of a study with two objectives: what a pass yields against what it reads."""

from __future__ import annotations

import warnings
from pathlib import Path

import optuna
from optuna.exceptions import ExperimentalWarning

from ecospec_runtime.console import leads, note

PLOT = "pareto.png"
NAMES = ["tokens per pass", "distinct experts per layer and pass"]


def plot_front(study: optuna.Study, path: Path) -> None:
    """Write the Pareto front and all trials as a picture; without matplotlib a note instead."""
    if not leads():
        return
    try:
        import matplotlib
    except ImportError:
        note(f"tune: no {path.name}, since matplotlib is missing; pip install 'ecospec[train]'")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from optuna.visualization.matplotlib import plot_pareto_front

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        plot_pareto_front(study, target_names=NAMES)  # makes a figure, the current one
    figure = plt.gcf()
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
