"""Nodes and ranks that a scheduler has set up for `hpml run`, read from its environment variables.

SLURM: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES. Kubernetes: an Indexed Job or JobSet numbers
its pods (JOB_COMPLETION_INDEX); Kubeflow sets torchrun's own PET_* variables. MASTER_ADDR and MASTER_PORT override names of
nodes where they are set.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from passes.errors import BadInput, shortened

FIRST_PORT, PORTS = 10_000, 20_000  # below the ports that Linux gives to connections; one port for each of 20,000 jobs


@dataclass(frozen=True)
class Allocation:
    """Nodes of a run. node: number of this one among `nodes`, None if the scheduler does not say; endpoint: HOST:PORT where the
    nodes meet, None if it has to be given; run_id: what tells this run from others at the same endpoint."""

    scheduler: str
    nodes: int
    node: int | None = None
    endpoint: str | None = None
    run_id: str | None = None
    rank: int | None = None
    """Rank of this process, if the scheduler has started one process for each rank; else None."""
    ranks: int = 0
    local_rank: int = 0
    local_ranks: int = 1


def allocation(environment: Mapping[str, str], started_by_hand: bool = False) -> Allocation | None:
    """The scheduler's nodes and ranks; None outside of one. started_by_hand: the command line gives the number of nodes.

    Raises BadInput if a job of SLURM has several nodes and this process is on one of them alone.
    """
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        return _of_slurm(environment)
    if int(environment.get("SLURM_JOB_NUM_NODES", 1)) > 1 and not started_by_hand:
        raise BadInput(f"`hpml run` was started on one of the {environment['SLURM_JOB_NUM_NODES']} nodes of this job of SLURM",
                       where=f"job {environment.get('SLURM_JOB_ID')}", next_step="start it on all of them: srun "
                       "--ntasks-per-node=1 hpml run ...; or give --nnodes 1 for this node alone")
    endpoint, index = _endpoint(environment, None), environment.get("JOB_COMPLETION_INDEX")
    nodes = environment.get("PET_NNODES", "1")
    if endpoint is None and index is None or not nodes.isdecimal():
        return None
    return Allocation("Kubernetes", int(nodes), int(index) if index is not None else None, endpoint)


def _of_slurm(environment: Mapping[str, str]) -> Allocation:
    nodes, tasks = int(environment["SLURM_STEP_NUM_NODES"]), int(environment["SLURM_STEP_NUM_TASKS"])
    node, job = int(environment["SLURM_NODEID"]), environment["SLURM_JOB_ID"]
    per_node = _tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
    endpoint = _endpoint(environment, f"{first_host(environment['SLURM_STEP_NODELIST'])}:{FIRST_PORT + int(job) % PORTS}")
    run_id = f"{job}.{environment['SLURM_STEP_ID']}.{environment.get('SLURM_RESTART_COUNT', 0)}"
    if tasks == nodes and set(per_node) == {1}:
        return Allocation("SLURM", nodes, node, endpoint, run_id)
    return Allocation("SLURM", nodes, node, endpoint, run_id, int(environment["SLURM_PROCID"]), tasks,
                      int(environment["SLURM_LOCALID"]), per_node[node])


def _endpoint(environment: Mapping[str, str], default: str | None) -> str | None:
    """HOST:PORT of PET_RDZV_ENDPOINT, or of MASTER_ADDR and MASTER_PORT, whichever is given; else the default."""
    if endpoint := environment.get("PET_RDZV_ENDPOINT"):
        return endpoint
    host, _, port = (default or "").rpartition(":")
    host = environment.get("PET_MASTER_ADDR", environment.get("MASTER_ADDR", host))
    return f"{host}:{environment.get('PET_MASTER_PORT', environment.get('MASTER_PORT', port or '29400'))}" if host else None


def first_host(hosts: str) -> str:
    """The first name of a list of SLURM, as `scontrol show hostnames` has it: "a[08-11,20]-x,b1" -> "a08-x"."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])+", hosts)
    if first is None:
        raise BadInput(f"{shortened(hosts)!r} is no list of nodes", where="SLURM_STEP_NODELIST",
                       next_step="set MASTER_ADDR to the name of the first node")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def _tasks_per_node(counts: str) -> list[int]:
    """Tasks of each node of a step: "2(x3),1" -> [2, 2, 2, 1]."""
    return [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts) for _ in range(int(times or 1))]
