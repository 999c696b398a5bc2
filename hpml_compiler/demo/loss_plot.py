"""Plot loss.png: the loss curves of two runs, and their relative difference."""
from __future__ import annotations

from pathlib import Path

from hpml_compiler.demo.training_runs import TrainingRun
from hpml_compiler.visualize.picture_files import save_figure


def draw(one: TrainingRun, many: TrainingRun, path: Path) -> None:
    """Plot both loss curves to the file `path`."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context({"axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False,
                                "axes.spines.right": False}):
        figure = Figure(figsize=(7, 5), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        steps = range(1, len(one.curve) + 1)
        upper.plot(steps, one.curve, color="black", linewidth=1.2, label="1 rank")
        upper.plot(steps, many.curve, "o", color="#d62728", markersize=4, fillstyle="none", label=f"{many.ranks} ranks")
        upper.set_ylabel("loss (nats per character)")
        upper.legend(frameon=False)
        difference = [abs(a - b) / abs(a) for a, b in zip(one.curve, many.curve, strict=True)]
        lower.bar(steps, difference, color="#1f77b4")
        lower.set_ylabel("relative\ndifference")
        lower.set_xlabel("step")
        lower.xaxis.set_major_locator(MaxNLocator(integer=True))
        save_figure(figure, path, "the losses", dpi=110)
