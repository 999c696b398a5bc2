"""`hpml run`: torchrun with sound defaults."""
from __future__ import annotations

import errno
import importlib.util
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import psutil
import typer

from hpml_compiler.commands._allocation import Allocation, allocation
from passes.errors import BadInput, shortened
from passes.hardware.control_groups import available_cores

MOST_CPU_RANKS = 4  # default: ranks without accelerators are for trying things out, and each costs memory
MOST_RANKS = 1024  # on one node: more are probably a typing error, and would exhaust the machine
PG_TIMEOUT_S = 60
RANK_MODULE = "hpml_compiler.commands._rank"


def register(app: typer.Typer) -> None:
    # Options end at the script's name; everything after it belongs to the script.
    app.command("run", context_settings={"allow_interspersed_args": False})(run)


def run(
    script: Annotated[str, typer.Argument(help="Script to run on every rank (with -m, a module).")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script, passed on untouched.")] = None,
    nproc: Annotated[int | None, typer.Option(
        min=1, max=MOST_RANKS, help="Ranks on this node.",
        show_default=f"CUDA devices; without any, cores but at most {MOST_CPU_RANKS}")] = None,
    nnodes: Annotated[str | None, typer.Option(
        help="Number of nodes, or MIN:MAX for elastic runs.", show_default="the scheduler's, or 1")] = None,
    node_rank: Annotated[int | None, typer.Option(
        min=0, envvar="PET_NODE_RANK", help="Rank of this node; by default chosen at rendezvous.")] = None,
    rdzv_endpoint: Annotated[str | None, typer.Option(
        metavar="HOST:PORT", help="Rendezvous address; required for several nodes, except under SLURM.")] = None,
    max_restarts: Annotated[int, typer.Option(
        min=0, envvar="PET_MAX_RESTARTS", help="Restarts of all ranks after one has failed.")] = 0,
    shutdown_timeout: Annotated[int | None, typer.Option(
        min=1, metavar="SECONDS", help="How long ranks may run on after a signal, as to save a checkpoint.",
        show_default="30")] = None,
    elastic: Annotated[bool, typer.Option(
        "--elastic", help="Where a rank is lost, the others go on in their processes (hpml_compiler.attempts).")] = False,
    replace: Annotated[bool, typer.Option(
        "--replace", help="--elastic, and start another process for each rank that is lost, to join the others.")] = False,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT names a module, as in `python -m`.")] = False,
) -> None:
    """Run a training script on every device with torchrun and sensible defaults.

    Under SLURM (srun), number and address of the nodes are SLURM's; where srun has started one task for each rank, this process
    becomes that rank. Kubernetes' JOB_COMPLETION_INDEX and the PET_* variables of Kubeflow are read as well.
    Sets, unless the environment has them: OMP_NUM_THREADS (cores divided by ranks), HPML_PG_TIMEOUT_S=60 (timeout of hpml's
    process groups), on one node GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (loopback) and, if ranks
    may be restarted (--max-restarts, --nnodes MIN:MAX), TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    The exit code is that of the first rank that failed; 128 + N if signal N ended it, or the run.
    """
    if module and not _has_module(script):
        raise BadInput(f"there is no module {script!r}", where="hpml run -m", next_step="install it, start from its folder, "
                       "or give a script without -m")
    if not module and not Path(script).is_file():
        raise BadInput("the script does not exist", where=script, next_step="give the path of a Python file, or -m and "
                       "a module; options of `hpml run` stand before it, options of the script after it")
    given = allocation(os.environ, started_by_hand=nnodes is not None)
    if given is not None and given.rank is not None and nnodes is None:
        _become_rank(given, nproc, max_restarts, module, script, arguments or [])
    nnodes = nnodes or os.environ.get("PET_NNODES") or (str(given.nodes) if given else "1")
    ranks = nproc or _wanted_ranks() or default_ranks()
    elastic = elastic or replace
    may_restart, alone = (max_restarts > 0 or ":" in nnodes) and not elastic, _is_alone(nnodes, rdzv_endpoint)
    for name, value in environment_defaults(ranks, may_restart, alone).items():
        os.environ.setdefault(name, value)
    module, script, arguments = started(script, arguments or [], module, own_store=may_restart and alone)
    if elastic:
        from hpml_compiler.elastic.launcher import run_elastic

        command = [sys.executable, *(["-m"] if module else []), script, *arguments]
        raise typer.Exit(run_elastic(command, ranks, max_restarts, replace, shutdown_timeout or 30, alone))
    options = [*_rendezvous(nnodes, node_rank, rdzv_endpoint, given), *(["--local-addr=127.0.0.1"] if alone else []),
               f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}", *(["--module"] if module else [])]
    raise typer.Exit(_torchrun(options, script, arguments, shutdown_timeout))


def _wanted_ranks() -> int | None:
    """PET_NPROC_PER_NODE, if it is a number: Kubeflow also writes "auto" and "gpu", which are `hpml run`'s default."""
    wanted = os.environ.get("PET_NPROC_PER_NODE", "")
    return int(wanted) if wanted.isdecimal() and 1 <= int(wanted) <= MOST_RANKS else None


def _become_rank(given: Allocation, nproc: int | None, max_restarts: int, module: bool, script: str,
                 arguments: list[str]) -> NoReturn:
    """Replace this process, which the scheduler has started for one rank, by the script. Raises BadInput for options that need
    a launcher of several ranks."""
    if nproc not in (None, given.local_ranks) or max_restarts:
        raise BadInput(f"{given.scheduler} has started {given.ranks} tasks on {given.nodes} nodes, one for each rank, so "
                       "`hpml run` neither starts nor restarts any", where="--max-restarts" if max_restarts else "--nproc",
                       next_step="leave the option out, or start one task per node: srun --ntasks-per-node=1 hpml run ...")
    assert given.endpoint is not None
    host, _, port = given.endpoint.rpartition(":")
    for name, value in environment_defaults(given.local_ranks, alone=given.nodes == 1).items():
        os.environ.setdefault(name, value)
    os.environ |= {"RANK": str(given.rank), "WORLD_SIZE": str(given.ranks), "LOCAL_RANK": str(given.local_rank),
                   "LOCAL_WORLD_SIZE": str(given.local_ranks), "MASTER_ADDR": host, "MASTER_PORT": port}
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", RANK_MODULE, *(["-m"] if module else []), script, *arguments])


def started(script: str, arguments: list[str], module: bool, own_store: bool = False) -> tuple[bool, str, list[str]]:
    """(is a module, name, arguments) for torchrun to start. With several GPUs, or `own_store` (rank 0 opens a store, which
    listens on loopback), that is a launcher that sets the rank's GPU and runs the script."""
    import torch

    if torch.cuda.device_count() < 2 and not own_store:
        return module, script, arguments
    return True, RANK_MODULE, [*(["-m"] if module else []), script, *arguments]


def default_ranks() -> int:
    """One rank per CUDA device; without any, one per core, at most MOST_CPU_RANKS."""
    import torch

    return torch.cuda.device_count() or min(available_cores(), MOST_CPU_RANKS)


def _is_alone(nnodes: str, endpoint: str | None) -> bool:
    """True if all ranks are on this node and other nodes need not reach them."""
    return nnodes in ("1", "1:1") and (endpoint is None or endpoint.rpartition(":")[0] in ("localhost", "127.0.0.1"))


def loopback_interface() -> str | None:
    """Name of the loopback interface, such as "lo"; None if there is none, as in some containers."""
    return next((name for name, addresses in psutil.net_if_addrs().items()
                 if any(each.address == "127.0.0.1" for each in addresses)), None)


def environment_defaults(ranks: int, may_restart: bool = False, alone: bool = False) -> dict[str, str]:
    """Environment variables set for every rank unless the user has set them. alone: no other node has ranks."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, available_cores() // ranks)),
        "HPML_PG_TIMEOUT_S": str(PG_TIMEOUT_S),
    }
    if alone and (interface := loopback_interface()) is not None:
        # Without it, gloo and NCCL listen on the interface of the host's name, for everybody who reaches it.
        defaults |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    if may_restart:
        # A restarted gloo group would find the addresses of its dead predecessor in torchrun's shared store.
        # A store of rank 0 has a price: torchrun chooses its port seconds before rank 0 opens it, and another
        # process may take it meanwhile ("address already in use"), which costs one more restart.
        defaults["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return defaults


def _has_module(name: str) -> bool:
    """True if `python -m` would find the module's package, with the current folder on the path. Imports nothing."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def _check_endpoint(endpoint: str, binds: bool) -> None:
    """Raises BadInput unless `endpoint` is HOST:PORT and, where this node binds it, the port is free:
    torchrun would wait for the process that has it."""
    host, colon, port = endpoint.rpartition(":")
    if not (host and colon and port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) < 2**16):
        raise BadInput(f"{shortened(endpoint)!r} is not HOST:PORT", where="--rdzv-endpoint",
                       next_step="write --rdzv-endpoint localhost:29400, the same on every node")
    if not binds or port == "0":
        return
    try:
        family = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family[0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(family[4])
    except socket.gaierror as error:
        raise BadInput(f"unknown host: {error.strerror}", where=f"--rdzv-endpoint {endpoint}",
                       next_step="give the name or address of the first node") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise BadInput(f"port {port} is taken by another process", where=f"--rdzv-endpoint {endpoint}",
                           next_step="choose another port, or end that process (`ss -ltnp` lists them)") from error
        raise BadInput(f"this node cannot open the port: {error.strerror}", where=f"--rdzv-endpoint {endpoint}",
                       next_step="give an address of the node of rank 0, and run rank 0 there") from error


def _rendezvous(nnodes: str, node_rank: int | None, endpoint: str | None, given: Allocation | None = None) -> list[str]:
    """Options of torchrun with which the nodes find each other."""
    counts = re.fullmatch(r"([1-9]\d{0,5})(?::([1-9]\d{0,5}))?", nnodes, re.ASCII)
    if counts is None or (counts[2] and int(counts[2]) < int(counts[1])):
        raise BadInput(f"{shortened(nnodes)!r} is not a number of nodes", where="--nnodes",
                       next_step="write --nnodes 2, or MIN:MAX as in 1:4")
    if nnodes == "1" and endpoint is None:
        return ["--standalone"]  # chooses a free port, so that several runs fit on one machine
    if endpoint is None and given is not None:
        endpoint = given.endpoint
    if endpoint is None:
        raise BadInput("several nodes need a rendezvous address", where=f"--nnodes {nnodes}",
                       next_step="add --rdzv-endpoint HOST:PORT, the same on every node")
    number = given.node if given is not None and node_rank is None else node_rank
    _check_endpoint(endpoint, binds=nnodes == "1" or number == 0)
    meeting = [f"--nnodes={nnodes}", f"--rdzv-endpoint={endpoint}"]
    if node_rank is not None:
        return [*meeting, "--rdzv-backend=static", f"--node-rank={node_rank}"]
    if given is not None and given.node is not None:  # torch would compare host names, of which a pod or node may have several
        meeting += [f"--rdzv-conf=is_host={int(given.node == 0)}", *([f"--rdzv-id={given.run_id}"] if given.run_id else [])]
    return [*meeting, "--rdzv-backend=c10d"]


def _torchrun(options: list[str], script: str, arguments: list[str], shutdown_timeout: int | None = None) -> int:
    """Run torchrun in this process, so that ranks share its interpreter, and return the script's exit code.

    As a child process torchrun would exit with 1 on every failure.
    """
    import torch
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from passes import compat

    parsed = torchrun.parse_args([*options, "--", script])
    parsed.training_script_args = arguments  # torchrun's parser would match their prefixes with its own options
    if hasattr(parsed, "signals_to_handle") and hasattr(signal, "SIGUSR1"):
        parsed.signals_to_handle += ",SIGUSR1"  # passed on to the ranks; SLURM sends it before the time limit
    if shutdown_timeout is not None:
        if not hasattr(parsed, "shutdown_timeout"):
            raise BadInput(f"torchrun of torch {torch.__version__} gives ranks 30 s", where="--shutdown-timeout",
                           next_step="leave it out, or install torch 2.13 or later")
        parsed.shutdown_timeout = shutdown_timeout
    try:
        compat.open_stores_on_loopback()
        torchrun.run(parsed)
    except ChildFailedError as error:
        rank, failure = first_failure(error.failures)
        typer.echo(f"hpml: {_first_failure(rank, failure)}\n{error}", err=True)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except Exception as error:
        # Such as Ctrl-C: torchrun has ended the ranks. Another error may hide it: torchrun's timers raise UnboundLocalError
        # where the signal meets them before they have read the clock.
        received = next((each for each in _causes(error) if isinstance(each, SignalException)), None)
        if received is None:
            raise
        return 128 + received.sigval
    return 0


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, the one that it was raised from or while handling, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def first_failure(failures: Mapping[int, Any]) -> tuple[int, Any]:
    """The rank that failed first, and its failure. Among failures of the same second, prefers ranks that did not merely
    notice another rank's failure, and that torchrun did not terminate."""
    def order(rank: int) -> tuple[int, bool, bool, int]:
        failure = failures[rank]
        word = failure.error_file_data
        noticed = isinstance(word, dict) and bool(word.get("noticed"))
        return failure.timestamp, noticed, failure.exitcode == -signal.SIGTERM, rank

    rank = min(failures, key=order)
    return rank, failures[rank]


def _first_failure(rank: int, failure: Any) -> str:
    """One line about the first failure: the rank, and its message if it wrote one (`runtime.watchdog.heartbeat`)."""
    word = failure.error_file_data if isinstance(failure.error_file_data, dict) else {}
    if word.get("noticed"):
        return f"{word['message']}\n  (rank {rank} noticed, and ended with exit code {failure.exitcode})"
    message = f": {word['message']}" if isinstance(word.get("message"), str) and word["message"] else ""
    return f"rank {rank} was the first to fail, with exit code {failure.exitcode}{message}"
