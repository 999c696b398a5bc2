"""The command line as a user meets it: `hpml run` on real processes, exit codes, and a fast `--help`."""
from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException

from hpml_compiler import cli
from hpml_compiler.commands import run as run_command
from hpml_compiler.runtime.watchdog import error_file
from hpml_compiler.runtime.watchdog.heartbeat import RankLost

LISTENING = """
import os, psutil
def listening():
    "Where this rank and the launcher accept connections."
    processes = psutil.Process(), psutil.Process(os.getppid())
    return sorted({each.laddr.ip for process in processes for each in process.net_connections() if each.status == "LISTEN"})
"""
REPORT = LISTENING + """
import json, sys
names = ["RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "HPML_PG_TIMEOUT_S", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
         "TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
with open(os.path.join(os.path.dirname(__file__), "rank" + os.environ["RANK"]), "w") as f:
    json.dump({"arguments": sys.argv[1:], "listening": listening(), **{name: os.environ.get(name) for name in names}}, f)
"""
RESTARTED = LISTENING + """
import sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(5)
with open(os.path.join(os.path.dirname(__file__), "rank" + os.environ["RANK"]), "w") as f:
    f.write(f"{value.item()} {listening()}")
dist.destroy_process_group()
"""
ENDS = """
import os, sys
if os.environ["RANK"] == "1":
    {how}
"""


SLEEPS = """
import os, time
open(os.path.join(os.path.dirname(__file__), "rank" + os.environ["RANK"]), "w").write(str(os.getpid()))
time.sleep(600)
"""


def _hpml(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.run([sys.executable, "-m", "hpml_compiler.cli", *arguments], env={**clean, **environment},
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100)


def _script(folder: Path, source: str) -> str:
    path = folder / "train.py"
    path.write_text(source)
    return str(path)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_script_arguments_stay_untouched_and_defaults_are_set(tmp_path):
    arguments = ["--nproc", "7", "--", "-m", "--help", "x y"]
    done = _hpml("run", "--nproc", "2", _script(tmp_path, REPORT), *arguments)
    assert done.returncode == 0, done.stderr
    loopback = run_command.loopback_interface()
    for rank in range(2):
        seen = json.loads((tmp_path / f"rank{rank}").read_text())
        assert seen == {
            "arguments": arguments, "RANK": str(rank), "WORLD_SIZE": "2", "HPML_PG_TIMEOUT_S": "60",
            "OMP_NUM_THREADS": str(max(1, run_command.available_cores() // 2)),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": None, "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback, "listening": ["127.0.0.1"]}


def test_the_users_environment_wins_and_a_module_can_be_run(tmp_path):
    _script(tmp_path, REPORT)
    done = _hpml("run", "--nproc", "1", "-m", "train", OMP_NUM_THREADS="3", HPML_PG_TIMEOUT_S="9",
                 PYTHONPATH=os.pathsep.join([str(tmp_path), str(Path(cli.__file__).parent.parent)]))
    assert done.returncode == 0, done.stderr
    seen = json.loads((tmp_path / "rank0").read_text())
    assert (seen["OMP_NUM_THREADS"], seen["HPML_PG_TIMEOUT_S"]) == ("3", "9")


@pytest.mark.parametrize(("how", "exit_code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 128 + 9)])
def test_exit_code_is_that_of_the_failing_rank(tmp_path, how, exit_code):
    done = _hpml("run", "--nproc", "2", _script(tmp_path, ENDS.format(how=how)))
    assert done.returncode == exit_code
    said = [line for line in done.stderr.splitlines() if "rank 1" in line]
    assert said[0].startswith("hpml: rank 1 was the first to fail, with exit code")


def test_who_only_noticed_is_not_blamed():
    word = {"message": "rank 1 is late: outside of compiled calls for 9 s", "noticed": True}
    failure = SimpleNamespace(exitcode=1, error_file_data=word)
    assert run_command._first_failure(0, failure).splitlines() == [
        word["message"], "  (rank 0 noticed, and ended with exit code 1)"]
    failure.error_file_data = {"message": "ValueError: no such weight", "noticed": False}
    assert run_command._first_failure(1, failure) == (
        "rank 1 was the first to fail, with exit code 1: ValueError: no such weight")
    failure.error_file_data = {"message": ""}
    assert run_command._first_failure(1, failure).endswith("with exit code 1")


RAISED, NOTICED, NO_WORD = {"message": "ValueError: x", "noticed": False}, {"message": "rank 1 is gone", "noticed": True}, {}


@pytest.mark.parametrize(("first", "failures"), [
    (0, {0: (1, 100, NOTICED), 1: (-9, 141, NO_WORD)}),  # rank 1 was stopped, and torchrun killed it after all
    (1, {0: (1, 103, NOTICED), 1: (-9, 100, NO_WORD)}),  # rank 1 was killed by the system
    (1, {0: (1, 100, NOTICED), 1: (1, 100, RAISED)}),
    (1, {0: (-15, 100, NO_WORD), 1: (3, 100, NO_WORD), 2: (-15, 100, NO_WORD)}),
    (2, {0: (-15, 100, NO_WORD), 1: (1, 101, RAISED), 2: (1, 99, RAISED)}),
    (0, {0: (-15, 100, NO_WORD), 1: (-15, 100, NO_WORD)})])
def test_the_first_to_fail_is_blamed(first, failures):
    ended = {rank: SimpleNamespace(exitcode=code, timestamp=when, error_file_data=word)
             for rank, (code, when, word) in failures.items()}
    assert run_command.first_failure(ended) == (first, ended[first])


@pytest.mark.parametrize(("error", "rounded"), [(RankLost("rank 1 is gone", "here"), math.ceil), (ValueError("x"), int)])
def test_a_rank_leaves_word_of_when_it_ended(tmp_path, monkeypatch, error, rounded):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    before = time.time()
    error_file.write_error_file(error, noticed=isinstance(error, RankLost))
    word = json.loads((tmp_path / "error.json").read_text())
    assert rounded(before) <= word["timestamp"] <= rounded(time.time()) and word["noticed"] == isinstance(error, RankLost)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_ranks_and_is_the_exit_code(tmp_path, number):
    command = [sys.executable, "-m", "hpml_compiler.cli", "run", "--nproc", "2", _script(tmp_path, SLEEPS)]
    launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    pids = [tmp_path / f"rank{rank}" for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all(pid.exists() and pid.read_text() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + number and "SignalException" not in errors, errors
    assert not [pid for pid in pids if psutil.pid_exists(int(pid.read_text()))]


def test_a_signal_behind_another_error_is_the_exit_code(tmp_path, monkeypatch):
    """torchrun times its functions; a signal before the clock is read becomes an UnboundLocalError."""
    def interrupted(parsed):
        try:
            raise SignalException("interrupted", signal.SIGTERM)
        finally:
            raise UnboundLocalError("start")

    monkeypatch.setattr(torchrun, "run", interrupted)
    assert run_command._torchrun(["--standalone"], _script(tmp_path, SLEEPS), []) == 128 + signal.SIGTERM
    monkeypatch.setattr(torchrun, "run", lambda parsed: {}[parsed.standalone])
    with pytest.raises(KeyError):
        run_command._torchrun(["--standalone"], _script(tmp_path, SLEEPS), [])


@pytest.mark.parametrize(("options", "own"), [([], False), (["--max-restarts", "1"], True), (["--nnodes", "1:1"], True)])
def test_ranks_have_a_store_of_their_own_only_where_they_may_be_restarted(tmp_path, options, own):
    """torchrun's is open before the ranks start; rank 0's own opens at a port that was free some seconds before."""
    meeting = ["--rdzv-endpoint", "localhost:0"] if "--nnodes" in options else []
    done = _hpml("run", "--nproc", "1", *options, *meeting, _script(tmp_path, REPORT))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "rank0").read_text())["TORCHELASTIC_USE_AGENT_STORE"] == str(not own)


def test_gloo_ranks_meet_again_after_a_restart(tmp_path):
    done = _hpml("run", "--nproc", "2", "--max-restarts", "1", _script(tmp_path, RESTARTED))
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == 2 * ["2.0 ['127.0.0.1']"]


@pytest.mark.parametrize("numbered", [True, False])
def test_two_nodes_make_one_world(tmp_path, numbered):
    endpoint = f"127.0.0.1:{_free_port()}"
    nodes = []
    for node in range(2):
        command = [sys.executable, "-m", "hpml_compiler.cli", "run", "--nproc", "1", "--nnodes", "2",
                   "--rdzv-endpoint", endpoint, *(["--node-rank", str(node)] if numbered else []),
                   _script(tmp_path, REPORT)]
        nodes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    try:
        for node in nodes:
            _, errors = node.communicate(timeout=60)
            assert node.returncode == 0, errors
    finally:
        for node in nodes:
            node.terminate()
    assert [json.loads((tmp_path / f"rank{rank}").read_text())["WORLD_SIZE"] for rank in range(2)] == ["2", "2"]


@pytest.mark.parametrize(("arguments", "said"), [
    (["nowhere.py"], "the script does not exist\n  where: nowhere.py\n  next step: "),
    (["--nnodes", "2", __file__], "--rdzv-endpoint HOST:PORT"),
    (["--nproc", "0", __file__], "--nproc"),
    (["--elastic", "--nnodes", "2", "--rdzv-endpoint", "localhost:29400", __file__], "on one node alone\n  where: --elastic"),
    (["--unknown", __file__], "--unknown"),
])
def test_bad_input_ends_with_2_and_says_why(arguments, said, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["run", *arguments])
    assert exit.value.code == 2
    captured = capsys.readouterr()
    assert said in captured.err and "Traceback" not in captured.err and not captured.out


def test_debug_keeps_the_traceback():
    done = _hpml("run", "nowhere.py", HPML_DEBUG="1")
    assert "Traceback" in done.stderr and "BadInput" in done.stderr


@pytest.mark.parametrize(("cuda", "cores", "ranks"), [(8, 64, 8), (0, 2, 2), (0, 64, run_command.MOST_CPU_RANKS)])
def test_as_many_ranks_as_devices(monkeypatch, cuda, cores, ranks):
    monkeypatch.setattr("torch.cuda.device_count", lambda: cuda)
    monkeypatch.setattr(run_command, "available_cores", lambda: cores)
    assert run_command.default_ranks() == ranks
    assert run_command.environment_defaults(ranks)["OMP_NUM_THREADS"] == str(cores // ranks)


def test_more_ranks_than_cores_still_get_a_thread(monkeypatch):
    monkeypatch.setattr(run_command, "available_cores", lambda: 2)
    assert run_command.environment_defaults(8)["OMP_NUM_THREADS"] == "1"


def test_neither_the_package_nor_help_loads_torch():
    source = ("import sys, hpml_compiler\nassert not {'torch', 'pydantic', 'hpml_compiler.options'} & set(sys.modules)\n"
              "import hpml_compiler.cli as c\ntry: c.main(['--help'])\nfinally: assert 'torch' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout and "run" in done.stdout
