"""The picture of a study with two objectives: what a pass yields against what it reads."""

from __future__ import annotations

import warnings
from pathlib import Path

import optuna
from optuna.exceptions import ExperimentalWarning

from ecospec_runtime.console import leads, note
from ecospec_train.plots import pyplot, save

PLOT = "pareto.png"
NAMES = ["tokens per pass", "distinct experts per layer and pass"]


def plot_front(study: optuna.Study, path: Path) -> None:
    """Write the Pareto front and all trials as a picture; without matplotlib a note instead."""
    if not leads():
        return
    plt = pyplot()
    if plt is None:
        note(f"tune: no {path.name}, since matplotlib is missing; pip install 'ecospec[train]'")
        return
    from optuna.visualization.matplotlib import plot_pareto_front

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        plot_pareto_front(study, target_names=NAMES)  # makes a figure, the current one
    save(plt.gcf(), path)
