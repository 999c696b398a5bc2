"""Variables of a scheduler -> nodes, this node, where they meet; or this rank."""
from __future__ import annotations

import pytest

from hpml_compiler.commands._allocation import allocation, first_host
from passes.errors import BadInput


def slurm(**changed: str) -> dict[str, str]:
    return {"SLURM_JOB_ID": "41234", "SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2",
            "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "n[07-08]",
            "SLURM_NODEID": "1", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", **changed}


def test_one_task_per_node_gives_nodes_and_where_they_meet():
    found = allocation(slurm(SLURM_RESTART_COUNT="3"))
    assert found is not None and (found.nodes, found.node, found.endpoint, found.rank) == (2, 1, "n07:11234", None)
    assert found.run_id == "41234.0.3"
    one = allocation(slurm(SLURM_STEP_NUM_NODES="1", SLURM_STEP_NUM_TASKS="1", SLURM_STEP_TASKS_PER_NODE="1", SLURM_NODEID="0"))
    assert one is not None and (one.nodes, one.rank) == (1, None)
    named = allocation(slurm(MASTER_ADDR="10.0.0.7"))
    assert named is not None and named.endpoint == "10.0.0.7:11234"


def test_one_task_per_rank_gives_the_rank():
    found = allocation(slurm(SLURM_STEP_NUM_TASKS="5", SLURM_STEP_TASKS_PER_NODE="3,2", SLURM_PROCID="4", SLURM_LOCALID="1"))
    assert found is not None and (found.rank, found.ranks, found.local_rank, found.local_ranks) == (4, 5, 1, 2)


def test_a_script_of_several_nodes_without_srun_is_an_error():
    batch = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0"}
    with pytest.raises(BadInput, match="one of the 2 nodes") as error:
        allocation(batch)
    assert "srun" in str(error.value)
    assert allocation(batch, started_by_hand=True) is None and allocation({**batch, "SLURM_JOB_NUM_NODES": "1"}) is None


@pytest.mark.parametrize("environment, expected", [
    ({}, None),
    ({"JOB_COMPLETION_INDEX": "3"}, (1, 3, None)),
    ({"MASTER_ADDR": "train-0", "MASTER_PORT": "23456", "PET_NNODES": "4"}, (4, None, "train-0:23456")),
    ({"PET_MASTER_ADDR": "a", "PET_NNODES": "2"}, (2, None, "a:29400")),
    ({"PET_RDZV_ENDPOINT": "b:1", "MASTER_ADDR": "a", "PET_NNODES": "2"}, (2, None, "b:1")),
])
def test_pods_know_their_number_or_where_they_meet(environment, expected):
    found = allocation(environment)
    assert (found and (found.nodes, found.node, found.endpoint)) == expected


@pytest.mark.parametrize("hosts, first", [
    ("n1", "n1"), ("n[07-12]", "n07"), ("a[3,7-9]-x,b[1-2]", "a3-x"), ("gpu-1.site,b", "gpu-1.site"),
    ("r[1-2]c[04-05]", "r1c04")])
def test_the_first_host_of_a_list(hosts, first):
    assert first_host(hosts) == first
