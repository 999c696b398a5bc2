"""`hpml profile [TARGET]`: time operations and collectives on these devices, and save them as costs for plans."""
from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from hpml_compiler.cli_target import load_target
from passes.cost_model.measured.measurement_cache import MeasurementCache, device_key
from passes.errors import BadInput

RANKS = "torchrun --nproc-per-node 2 -m hpml_compiler.cli profile --collectives"


def register(app: typer.Typer) -> None:
    app.command("profile")(profile)


def profile(
    target: Annotated[str | None, typer.Argument(help="FILE.py:FUNCTION or MODULE:FUNCTION that returns (model, batch): "
                                                 "time the operations of its graphs.")] = None,
    collectives: Annotated[bool, typer.Option("--collectives", help="Time the collectives of the process group; "
                                              f"start it on several ranks: {RANKS}.")] = False,
    seconds: Annotated[float, typer.Option(min=0.01, help="Time limit for each kind of collective on each group.")] = 3.0,
    max_mib: Annotated[float, typer.Option("--max-mib", min=2**-6, help="Largest message to time, in MiB.")] = 64,
    model_seconds: Annotated[float, typer.Option(min=0.01, help="Time limit for the operations and steps of TARGET.")] = 15.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time operations and collectives on these devices, and save the medians in the user's cache folder.

    That is $HPML_CACHE_DIR, else $XDG_CACHE_HOME/hpml, else ~/.cache/hpml. Several ranks without a TARGET time the
    collectives; several ranks with a TARGET only with --collectives.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks < 2 and target is None:
        raise BadInput(
            "there is only one process, and collectives need two ranks or more" if collectives else "nothing to time",
            "hpml profile --collectives" if collectives else "hpml profile",
            f"name a TARGET to time its operations, or start it on several ranks for the collectives: {RANKS}",
        )
    if ranks < 2 and collectives:
        print("hpml: skipping collectives: there is only one process", file=sys.stderr)
    from hpml_compiler.runtime.process.world_group import process_group

    with MeasurementCache() as cache, process_group():
        cache.check_writable()
        found: dict[str, Any] = {"device": _device(), "cache": str(cache.path)}
        if ranks > 1 and (collectives or target is None):
            found["collectives"] = _collectives(cache, seconds, max_mib)
        if target is not None:
            found["operations"] = _operations(cache, target, model_seconds)
        if int(os.environ.get("RANK", "0")) == 0:
            _print(found, as_json)


def _device() -> str:
    import torch


    return device_key("cuda" if torch.cuda.is_available() else "cpu")


def _operations(cache: MeasurementCache, target: str, seconds: float) -> dict[str, Any]:
    from hpml_compiler.profile.model_profile import profile_model
    from hpml_compiler.runtime.process.compute_device import device_type, moved

    with contextlib.redirect_stdout(sys.stderr):  # prints of the model's code
        model, batch = load_target(target)
        found = profile_model(model.to(device_type()), moved(batch, device_type()), cache, seconds)
    return {
        "measured": {key: m.median_us for key, m in found.operations.items()}, "failed": dict(found.failed),
        "factors": dict(found.factors), "overheads_us": dict(found.overheads_us),
    }


def _collectives(cache: MeasurementCache, seconds: float, max_mib: float) -> list[dict[str, Any]]:
    from hpml_compiler.profile.collective_timing import SIZES, profile_collectives

    sizes = [size for size in SIZES if size <= max_mib * 2**20]
    return collective_rows(profile_collectives(cache, seconds, sizes))


def collective_rows(timings: Iterable[Any]) -> list[dict[str, Any]]:
    """Fitted parameters of `CollectiveTiming`s: one JSON object per kind and group. beta: of the largest sizes.

    left_out_error: the median relative error of predicting a size from the others, null with fewer than 4 sizes.
    """
    from passes.cost_model.measured.measured_collectives import fit_points
    from passes.cost_model.measured.piecewise_linear import left_out_errors

    timings = list(timings)
    rows = []
    for (kind, group), fit in fit_points(timing.point for timing in timings).items():
        own = [timing for timing in timings if (timing.kind, timing.group) == (kind, group)]
        errors = left_out_errors([t.nbytes for t in own], [t.point.us for t in own])
        rows.append({
            "kind": kind, **dataclasses.asdict(group), "alpha_us": fit.alpha_us,
            "beta_us_per_byte": fit.beta_us_per_byte, "pieces": fit.pieces, "knots_bytes": fit.knots,
            "knots_us": fit.values, "left_out_error": statistics.median(errors) if errors else None,
            "measured": [{"bytes": t.nbytes, "median_us": t.measurement.median_us, "runs": t.measurement.runs,
                          "spread": t.measurement.spread} for t in own],
        })
    return rows


def _print(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, allow_nan=False))
        return
    from hpml_compiler.visualize.terminal import show

    print(f"on {found['device']}")
    if "collectives" in found:
        show(_table(found["collectives"]))
    if "operations" in found:
        print(_operation_lines(found["operations"]))
    print(f"saved in {found['cache']}")


def _table(rows: list[dict[str, Any]]) -> Any:
    from rich.box import SIMPLE
    from rich.table import Column, Table

    table = Table(Column("collective", no_wrap=True), "ranks", "stride", "latency us", "GB/s", "pieces", "max MiB", "error",
                  box=SIMPLE, pad_edge=False, caption="error: median, of predicting a size from the others")
    for row in rows:
        beta, error = row["beta_us_per_byte"], row["left_out_error"]
        table.add_row(
            row["kind"], str(row["size"]), str(row["stride"]), f"{row['alpha_us']:.0f}",
            f"{1e-3 / beta:.2f}" if beta > 0 else "-", str(row["pieces"]),
            f"{row['measured'][-1]['bytes'] / 2**20:.2f}", "-" if error is None else f"{error:.0%}",
        )
    return table


def _operation_lines(found: dict[str, Any]) -> str:
    failed = f", {len(found['failed'])} cannot run alone" if found["failed"] else ""
    lines = [f"operations: {len(found['measured'])} timed{failed}"]
    lines += [f"  {name}: {value:.2f} times the formula" for name, value in found["factors"].items()]
    lines += [f"  {name}: {us:.1f} us of overhead" for name, us in found["overheads_us"].items()]
    return "\n".join(lines)
