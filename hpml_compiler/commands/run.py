"""`hpml run`: torchrun with sound defaults."""
from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import psutil
import typer

from passes.errors import BadInput

MOST_CPU_RANKS = 4  # by default: without accelerators ranks are for trying things out, and each costs memory
PG_TIMEOUT_S = 60


def register(app: typer.Typer) -> None:
    # Options end where the script's name begins; whatever follows it is the script's.
    app.command("run", context_settings={"allow_interspersed_args": False})(run)


def run(
    script: Annotated[str, typer.Argument(help="Script to run on every rank (with -m, a module).")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script, passed on untouched.")] = None,
    nproc: Annotated[int | None, typer.Option(min=1, show_default="CUDA devices; without any, cores but at most "
                                              f"{MOST_CPU_RANKS}", help="Ranks on this node.")] = None,
    nnodes: Annotated[str, typer.Option(help="Number of nodes, or MIN:MAX for elastic runs.")] = "1",
    node_rank: Annotated[int | None, typer.Option(min=0, help="Rank of this node; by default they agree.")] = None,
    rdzv_endpoint: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where the nodes meet; needed for "
                                                      "more than one.")] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="Restarts of all ranks after one has failed.")] = 0,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT names a module, as in `python -m`.")] = False,
) -> None:
    """Run a training script on every device, as torchrun would, with sound defaults.

    Sets, unless the environment has them: OMP_NUM_THREADS (cores divided by ranks), HPML_PG_TIMEOUT_S=60 (the time
    limit of process groups that hpml makes) and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (restarts work with gloo).
    Ends with the exit code of the first rank that failed; 128 + N if signal N ended it, or the run.
    """
    if not module and not Path(script).is_file():
        raise BadInput("the script does not exist", where=script, next_step="give the path of a Python file, or -m and "
                       "a module; options of `hpml run` stand before it, options of the script after it")
    ranks = nproc if nproc is not None else default_ranks()
    for name, value in environment_defaults(ranks).items():
        os.environ.setdefault(name, value)
    options = [*_rendezvous(nnodes, node_rank, rdzv_endpoint), f"--nproc-per-node={ranks}",
               f"--max-restarts={max_restarts}", *(["--module"] if module else [])]
    raise typer.Exit(_torchrun(options, script, arguments or []))


def available_cores() -> int:
    """Physical cores this process may use; hardware threads of one core would only compete."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def default_ranks() -> int:
    """One rank per CUDA device; without any, one per core but at most MOST_CPU_RANKS."""
    import torch

    return torch.cuda.device_count() or min(available_cores(), MOST_CPU_RANKS)


def environment_defaults(ranks: int) -> dict[str, str]:
    """Environment variables that every rank gets where the user has not set them."""
    return {
        "OMP_NUM_THREADS": str(max(1, available_cores() // ranks)),
        "HPML_PG_TIMEOUT_S": str(PG_TIMEOUT_S),
        # A restarted gloo group would find the addresses of its dead predecessor in a store shared with torchrun.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def _rendezvous(nnodes: str, node_rank: int | None, endpoint: str | None) -> list[str]:
    if nnodes == "1" and endpoint is None:
        return ["--standalone"]  # a free port, so that several runs fit on one machine
    if endpoint is None:
        raise BadInput("several nodes need a place to meet", where=f"--nnodes {nnodes}",
                       next_step="add --rdzv-endpoint HOST:PORT, the same on every node")
    meeting = [f"--nnodes={nnodes}", f"--rdzv-endpoint={endpoint}"]
    if node_rank is None:
        return [*meeting, "--rdzv-backend=c10d"]
    return [*meeting, "--rdzv-backend=static", f"--node-rank={node_rank}"]


def _torchrun(options: list[str], script: str, arguments: list[str]) -> int:
    """Run torchrun in this process, whose interpreter the ranks then share, and return the script's exit code.

    As a child process torchrun would answer every failure with 1.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    parsed = torchrun.parse_args([*options, "--", script])
    parsed.training_script_args = arguments  # its parser would take them for its own where a prefix matches
    try:
        torchrun.run(parsed)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        typer.echo(f"{error}\nhpml: rank {rank} was the first to fail, with exit code {failure.exitcode}", err=True)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:  # Ctrl-C and the like: torchrun has ended the ranks
        return 128 + error.sigval
    return 0
