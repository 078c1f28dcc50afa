"""What every picture begins and ends with. matplotlib is an extra: without it there are no pictures, and nothing fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DPI = 130


def pyplot() -> Any:
    """`matplotlib.pyplot`, drawing into files only; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save(figure: Any, path: Path) -> None:
    """Write a figure and let go of its memory."""
    from matplotlib import pyplot as plt

    figure.tight_layout()
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
