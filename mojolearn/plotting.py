"""Pictures of training runs and of weights. Needs matplotlib (extra ``plot``), which is imported where it is used."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mojolearn._typing import WeightFormat
from mojolearn.cli.run_folder import RunFolder

__all__ = ["plot_runs", "plot_weights"]

# Blue, orange, green, ... that stay apart for colour-blind readers (Okabe and Ito).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
PACKED_COLORS: tuple[tuple[WeightFormat, str], ...] = (("int8", COLORS[1]), ("bfloat16", COLORS[2]))
PANELS = (
    ("loss", "loss (nats per token)", "linear"),
    ("bits_per_byte", "bits per byte", "linear"),
    ("lr", "learning rate", "linear"),
    ("grad_norm", "gradient norm", "log"),
    ("tokens_per_second", "tokens per second", "linear"),
)


def _matplotlib() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pictures need the package matplotlib: pip install 'mojolearn[plot]'") from None
    return Figure


def plot_runs(runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None) -> Path:
    """Draw loss, bits per byte, learning rate, gradient norm and speed of runs over the tokens they have seen.

    Parameters
    ----------
    runs : sequence of path-like
        Folders that ``mojolearn train`` wrote.
    out : path-like or None, default None
        ``.png`` or ``.svg``; None writes ``curves.png`` into the first folder.

    Returns
    -------
    pathlib.Path
        The picture.
    """
    figure_class = _matplotlib()
    if not runs:
        raise ValueError("runs must name at least one folder, got none")
    path = Path(out) if out is not None else Path(runs[0]) / "curves.png"
    metrics = {Path(run).name or str(run): list(RunFolder(run).read_metrics()) for run in runs}
    if len(metrics) < len(runs):
        metrics = {str(run): list(RunFolder(run).read_metrics()) for run in runs}
    for name, rows in metrics.items():
        if not rows:
            raise ValueError(f"runs: {name} has no steps yet")

    panels = [
        panel for panel in PANELS if any(row.get(panel[0]) is not None for rows in metrics.values() for row in rows)
    ]
    columns = 2
    lines = -(-len(panels) // columns)
    figure = figure_class(figsize=(5.6 * columns, 3.2 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis, (key, label, scale) in zip(axes, panels, strict=False):
        for (name, rows), color in zip(metrics.items(), _colors(len(metrics)), strict=True):
            _curve(axis, rows, key, color, name if len(metrics) > 1 else "")
        axis.set(ylabel=label, xlabel="tokens", yscale=scale)
        if key in ("loss", "bits_per_byte"):
            _leave_out_the_start(axis, list(metrics.values()), key)
        axis.grid(alpha=0.25)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(frameon=False, fontsize="small")
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _colors(count: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(count)]


def _curve(axis: Any, rows: list[dict[str, Any]], key: str, color: str, name: str) -> None:
    """One quantity of one run: each step faintly, a running mean on top, evaluations as dots."""
    tokens, values = _series(rows, "train", key)
    if values.size:
        width = max(1, values.size // 50)
        smooth = width > 1 and key in ("loss", "bits_per_byte", "grad_norm", "tokens_per_second")
        axis.plot(tokens, values, color=color, alpha=0.25 if smooth else 1.0, lw=0.8 if smooth else 1.4)
        if smooth:
            sums = np.concatenate([[0.0], np.cumsum(values)])
            axis.plot(tokens[width - 1 :], (sums[width:] - sums[:-width]) / width, color=color, lw=1.4)
    label = " ".join(part for part in (name, "train" if key in ("loss", "bits_per_byte") else "") if part)
    if label:
        axis.plot([], [], color=color, label=label)
    tokens, values = _series(rows, "valid", key)
    if values.size:
        axis.plot(tokens, values, "o--", color=color, ms=4, lw=1, mfc="white", label=f"{name} held out".strip())


def _leave_out_the_start(axis: Any, runs: list[list[dict[str, Any]]], key: str) -> None:
    """The first steps, far above all others, would squeeze the rest against the axis."""
    values = np.concatenate([_series(rows, kind, key)[1] for rows in runs for kind in ("train", "valid")])
    if values.size > 50:
        low, high = float(values.min()), float(np.quantile(values, 0.97))
        margin = 0.05 * (high - low)
        axis.set_ylim(low - margin, high + margin)


def _series(rows: list[dict[str, Any]], kind: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    points = [(row["tokens"], row[key]) for row in rows if row["kind"] == kind and row.get(key) is not None]
    array = np.array(points, dtype=np.float64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def plot_weights(weights: Mapping[str, np.ndarray], out: str | os.PathLike[str], errors: bool = True) -> Path:
    """Draw the distribution of each matrix's weights, and of the errors that packing them makes.

    Parameters
    ----------
    weights : mapping of str to float32 array
        Tensors by name; those of one dimension are left out.
    out : path-like
        ``.png`` or ``.svg``.
    errors : bool, default True
        Draw the rounding errors of bfloat16 and int8 beside the weights.

    Returns
    -------
    pathlib.Path
        The picture.
    """
    from mojolearn import lowbit

    figure_class = _matplotlib()
    matrices = {name: value for name, value in weights.items() if value.ndim == 2}
    if not matrices:
        raise ValueError("weights must hold a tensor of two dimensions, got none")
    columns = 2 if errors else 1
    figure = figure_class(figsize=(5.6 * columns, 1.5 * len(matrices) + 0.6), layout="constrained")
    axes = figure.subplots(len(matrices), columns, squeeze=False)
    for row, (name, value) in zip(axes, matrices.items(), strict=True):
        row[0].hist(value.ravel(), bins=100, color=COLORS[0], log=True)
        row[0].set_title(f"{name}  {value.shape[0]} x {value.shape[1]}, rms {_rms(value):.3g}", fontsize="small")
        if errors:
            for fmt, color in PACKED_COLORS:
                difference = lowbit.materialize_one(lowbit.pack_one(value, fmt, name), name) - value
                label = f"{fmt}, rms {_rms(difference):.2g}"
                if difference.any():
                    row[1].hist(difference.ravel(), bins=100, color=color, log=True, alpha=0.7, label=label)
                else:
                    row[1].plot([], [], color=color, label=f"{fmt}, exact")
            row[1].set_title("rounding error", fontsize="small")
            row[1].legend(frameon=False, fontsize="x-small")
        row[0].set_ylabel("weights", fontsize="x-small")
        for axis in row:
            axis.tick_params(which="both", labelsize="x-small")
    for axis, label in zip(axes[-1], ("value", "value after packing - value"), strict=False):
        axis.set_xlabel(label, fontsize="x-small")
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
