"""A cluster of SLURM on loopback for tests: munged, slurmctld and a slurmd for each node, all as the present user."""
from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
MpiDefault=none
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 MaxTime=10
PartitionName=high Nodes=ALL PriorityTier=10 MaxTime=10 PreemptMode=OFF
"""


class SlurmCluster:
    """Two nodes, n1 and n2, of two cores each; jobs of the partition "high" take the nodes of those of "low"."""

    def __init__(self, folder: Path) -> None:
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "MASTER_ADDR": "127.0.0.1"}

    def __call__(self, *command: str, timeout: float = 60) -> str:
        """Output of a command; raises AssertionError with all of it if the command fails."""
        done = subprocess.run(command, env=self.environment, text=True, capture_output=True, timeout=timeout,
                              stdin=subprocess.DEVNULL)
        assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        return dict(pair.split("=", 1) for pair in self("scontrol", "show", "job", job, "--oneliner").split() if "=" in pair)


def wait_for(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.2)


def missing_programs() -> list[str]:
    return [program for program in PROGRAMS if _program(program) is None]


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + os.pathsep + "/usr/sbin")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Starts the daemons, waits until both nodes are idle, and ends what it has started."""
    munge = folder / "munge"
    munge.mkdir(mode=0o711)
    (folder / "state").mkdir()
    key = munge / "key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, host=socket.gethostname(), user=getpass.getuser(),
                                                            ports=_free_ports(3)))
    cluster, daemons = SlurmCluster(folder), []

    def start(program: str, *arguments: str) -> None:
        path = _program(program)
        assert path is not None
        with (folder / f"{program}-{len(daemons)}.out").open("w") as output:
            daemons.append(subprocess.Popen([path, *arguments], env=cluster.environment, stdin=subprocess.DEVNULL,
                                            stdout=output, stderr=subprocess.STDOUT, start_new_session=True))

    try:
        start("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}/socket", f"--pid-file={munge}/pid",
              f"--seed-file={munge}/seed", f"--log-file={munge}/log")
        wait_for((munge / "socket").exists, "munged's socket")
        start("slurmctld", "-D")
        for node in ("n1", "n2"):
            start("slurmd", "-D", "-N", node)
        wait_for(lambda: _idle_nodes(cluster) == 2, "two idle nodes")
        yield cluster
    finally:
        subprocess.run(["scancel", f"--user={getpass.getuser()}"], env=cluster.environment, timeout=30, capture_output=True)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(timeout=30)


def _idle_nodes(cluster: SlurmCluster) -> int:
    done = subprocess.run(["sinfo", "--noheader", "--Node", "--partition=low", "--states=idle"], env=cluster.environment,
                          text=True, capture_output=True, timeout=30)
    return len(done.stdout.splitlines()) if done.returncode == 0 else 0
