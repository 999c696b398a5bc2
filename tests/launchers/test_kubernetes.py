"""examples/kubernetes -> pods that Kubernetes accepts, whose commands find each other."""
from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("kubernetes_validate") is None,
                                reason="kubernetes-validate, which has Kubernetes' schemas, is not installed")
FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
REPORT = "import json, os, sys; print(json.dumps([os.environ['RANK'], os.environ['WORLD_SIZE'], *sys.argv[1:]]))"


def manifest(name: str) -> dict[str, Any]:
    import yaml

    return yaml.safe_load((FOLDER / name).read_text())


def job_of_jobset() -> dict[str, Any]:
    return manifest("jobset.yaml")["spec"]["replicatedJobs"][0]["template"]["spec"]


@pytest.mark.parametrize("spoil, said", [(None, None), ({"restart": "Never"}, "Additional properties"),
                                         ({"restartPolicy": 3}, "'string'")])
def test_pods_of_the_jobset_are_valid(spoil, said):
    import kubernetes_validate as kubernetes

    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, "spec": job_of_jobset()}
    job["spec"]["template"]["spec"] |= spoil or {}
    if spoil is None:
        kubernetes.validate(job, kubernetes.latest_version(), strict=True)
        return
    with pytest.raises(kubernetes.ValidationError, match=said):
        kubernetes.validate(job, kubernetes.latest_version(), strict=True)


def commands_of_jobset(port: int) -> list[tuple[list[str], dict[str, str]]]:
    (container,) = job_of_jobset()["template"]["spec"]["containers"]
    command = [part.replace("train-node-0-0.train:29500", f"127.0.0.1:{port}") for part in container["command"]]
    return [(command, {"JOB_COMPLETION_INDEX": str(index)}) for index in range(2)]


def commands_of_trainjob(port: int) -> list[tuple[list[str], dict[str, str]]]:
    trainer = manifest("trainjob.yaml")["spec"]["trainer"]
    ours = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port)}
    return [(trainer["command"] + trainer["args"], {**ours, "PET_NODE_RANK": str(index)}) for index in range(2)]


@pytest.mark.parametrize("commands", [commands_of_jobset, commands_of_trainjob])
def test_pods_make_one_world(tmp_path, commands):
    (tmp_path / "report.py").write_text(REPORT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pods = []
    for command, environment in commands(port):
        assert command[:2] == ["hpml", "run"]
        ours = [str(tmp_path / "report.py") if part == "examples/long_run.py" else part for part in command[2:]
                if not part.startswith("--shutdown-timeout")]  # torch 2.11 has none
        pods.append(subprocess.Popen([sys.executable, "-m", "hpml_compiler.cli", "run", *ours], text=True,
                                     env={**os.environ, **environment, "CUDA_VISIBLE_DEVICES": "", "PET_NPROC_PER_NODE": "1"},
                                     stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    try:
        said = [pod.communicate(timeout=60) for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert sorted(json.loads(output) for output, _ in said) == [["0", "2", "--folder=/checkpoints/run"],
                                                                ["1", "2", "--folder=/checkpoints/run"]]
