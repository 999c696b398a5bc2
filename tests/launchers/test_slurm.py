"""examples/slurm/train.sbatch on a real SLURM: one world of all nodes; a job that loses its nodes goes on where it stopped."""
from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.launchers.slurm_cluster import SlurmCluster, missing_programs, slurm_cluster, wait_for

ROOT = Path(__file__).parents[2]
HPML = Path(sys.executable).parent / "hpml"
pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(240),
    pytest.mark.skipif(bool(missing_programs()), reason=f"no {', '.join(missing_programs())} (Debian: slurm-wlm and munge)"),
]
REPORT = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
print(json.dumps([*(os.environ[name] for name in names), *sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        cluster.environment |= {"PYTHONPATH": str(ROOT), "PATH": f"{HPML.parent}{os.pathsep}{os.environ['PATH']}"}
        yield cluster


@pytest.mark.parametrize("tasks, options, local", [
    (["--ntasks-per-node=1"], ["--nproc", "2"], "2"),  # hpml run starts the ranks of its node
    (["--ntasks=4", "--ntasks-per-node=2", "--overcommit"], [], "2"),  # srun has started them
])
def test_ranks_of_two_nodes_are_one_world(cluster: SlurmCluster, tmp_path, tasks, options, local):
    (tmp_path / "report.py").write_text(REPORT)
    said = cluster("srun", "--nodes=2", *tasks, str(HPML), "run", *options, str(tmp_path / "report.py"), "--flag")
    reports = sorted(map(json.loads, re.findall(r"\[[^]]*]", said)))  # two ranks may share a line
    assert [rank for rank, *_ in reports] == ["0", "1", "2", "3"]
    assert sorted(local_rank for _, _, local_rank, *_ in reports) == ["0", "0", "1", "1"]
    assert {(world, count, flag) for _, world, _, count, _, flag in reports} == {("4", local, "--flag")}


def test_a_job_whose_nodes_are_taken_saves_waits_and_goes_on(cluster: SlurmCluster, tmp_path):
    output = tmp_path / "output"
    examples = ROOT / "examples"
    job = cluster("sbatch", "--parsable", "--exclusive", f"--output={output}", str(examples / "slurm" / "train.sbatch"),
                  "--nproc", "1", str(examples / "long_run.py"), "--folder", str(tmp_path / "run"), "--steps", "60",
                  "--every", "1000", "--pause", "0.1", "--compiler", "eager")
    wait_for(lambda: output.exists() and "step 4 " in output.read_text(), "the fifth step", 90)
    cluster("sbatch", "--partition=high", "--nodes=2", "--exclusive", f"--output={tmp_path}/high", "--wrap", "srun true")
    wait_for(lambda: cluster.state(job)["JobState"] == "PENDING", "back in the queue")

    def has_ended() -> bool:
        state = cluster.state(job)["JobState"]
        if state == "PENDING":  # SLURM would wait two minutes
            cluster("scontrol", "update", f"JobId={job}", "StartTime=now")
        return state == "COMPLETED"

    wait_for(has_ended, "the end of the job", 90)

    saved = re.search(r"SIGTERM: saved the checkpoint of step (\d+), and ends with exit code 75", output.read_text())
    assert saved, output.read_text()
    first, second = output.read_text().split(saved[0])
    assert f"starts at step {saved[1]}\n" in second and second.count("finished") == 2
    steps = [[int(step) for step in re.findall(r"^step (\d+) ", part, re.MULTILINE)] for part in (first, second)]
    assert sorted(set(steps[0] + steps[1])) == list(range(60)) and not set(steps[0]) & set(steps[1])
