"""Behavior of a separate process: closed pipes, Ctrl-C, full disks under stdout, poor terminals, no dot."""
from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from hpml_compiler.cli import main
from passes.hardware.cluster import MOST_DEVICES
from passes.hardware.mesh import factorizations
from tests.hpml_compiler.command_lines import files

pytestmark = pytest.mark.timeout(120)
HPML = [sys.executable, "-m", "hpml_compiler.cli"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("processes")
    files.write(made)
    return made


def start(folder, *arguments: str, **options):
    environment = {**os.environ, "HPML_CACHE_DIR": str(folder / "cache"), **options.pop("env", {})}
    return subprocess.Popen([*HPML, *arguments], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, **options)


def test_nobody_reads_what_is_printed(folder):
    reads, writes = os.pipe()
    process = start(folder, "simulate", "plan.json", stdout=writes)
    os.close(writes)
    os.close(reads)
    assert process.communicate(timeout=60)[1] == "" and process.returncode == 128 + signal.SIGPIPE


def test_a_full_disk_under_stdout(folder):
    with open("/dev/full", "w") as full:
        process = start(folder, "simulate", "plan.json", "--json", stdout=full)
        err = process.communicate(timeout=60)[1]
    assert process.returncode == 2 and "No space left" in err and "next step" in err and "Exception ignored" not in err


def test_ctrl_c(folder):
    (folder / "endless.py").write_text("import time\nprint('started', flush=True)\ndef f(): time.sleep(60)\n")
    # A shell has what it starts in the background ignore Ctrl-C, and so everything that these tests start.
    process = start(folder, "plan", "endless.py:f", stdout=subprocess.PIPE,
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert process.stderr is not None and "started" in process.stderr.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=30)[1]
    assert process.returncode == 130 and "interrupted" in err and "Traceback" not in err


def test_a_terminal_without_unicode_without_colors_and_narrow(folder):
    environment = {"PYTHONIOENCODING": "ascii", "LANG": "C", "LC_ALL": "C", "COLUMNS": "40", "PYTHONUTF8": "0",
                   "PYTHONCOERCECLOCALE": "0", "TERM": "dumb"}
    process = start(folder, "simulate", "plan.json", stdout=subprocess.PIPE, env=environment)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and out.isascii() and "step" in out, err
    assert max(map(len, out.splitlines())) <= 60  # narrower tables would lose numbers


def test_without_dot_everything_else_is_done(folder):
    (folder / "bin").mkdir()
    process = start(folder, "plan", "models.py:tiny", "--json", "--svg", "drawn.svg", "--save", "drawn.json",
                    stdout=subprocess.PIPE, env={"PATH": str(folder / "bin")})
    out, err = process.communicate(timeout=60)
    assert process.returncode == 4 and json.loads(out)["mesh"] == {} and "apt-get install graphviz" in err
    assert (folder / "drawn.json").is_file() and (folder / "drawn.gv").is_file()


def test_a_port_that_is_taken(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        for arguments in (["--nnodes", "1"], ["--nnodes", "2", "--node-rank", "0"]):
            with pytest.raises(SystemExit) as ended:
                main(["run", *arguments, "--rdzv-endpoint", endpoint, "train.py"])
            err = capfd.readouterr().err
            assert ended.value.code == 2 and "is taken" in err and "choose another port" in err


@pytest.mark.parametrize("content", [b"not a database", b"", b"SQLite format 3\0" + b"\1" * 5000])
def test_a_damaged_cache_of_measurements(folder, tmp_path, content, monkeypatch, capfd, caplog):
    """It costs a warning, and the plan only where measured prices were asked for. One that is empty has no measurements."""
    (tmp_path / "measurements.sqlite").write_bytes(content)
    monkeypatch.setenv("HPML_CACHE_DIR", str(tmp_path))
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "models.py:tiny", "--json"])
    captured = capfd.readouterr()
    assert ended.value.code == 0 and json.loads(captured.out)
    assert ("costs are estimated" in caplog.text and "delete this file" in caplog.text) == bool(content)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "models.py:tiny", "--fix", "costs=measured"])
    assert ended.value.code == 2
    assert ("damaged" if content else "there are no measurements") in capfd.readouterr().err


@pytest.mark.parametrize("place", ["models.py", "/dev/null", "/proc/none"])
def test_a_cache_that_cannot_be_written_is_known_before_anything_is_timed(folder, place, monkeypatch, capfd):
    monkeypatch.setenv("HPML_CACHE_DIR", place)
    monkeypatch.chdir(folder)
    start = time.perf_counter()
    with pytest.raises(SystemExit) as ended:
        main(["profile", "models.py:tiny", "--model-seconds", "20"])
    err = capfd.readouterr().err
    assert ended.value.code == 2 and "HPML_CACHE_DIR" in err and time.perf_counter() - start < 15


def test_factorizations_of_the_largest_numbers_come_at_once():
    start = time.perf_counter()
    for number in (MOST_DEVICES, MOST_DEVICES - 3, 720720):  # a power of two, a prime, one of many divisors
        shapes = list(factorizations(number, 2))
        assert all(a * b == number and a > 1 < b for a, b in shapes) and len(set(shapes)) == len(shapes)
    assert len(list(factorizations(MOST_DEVICES, 2))) == 19
    assert time.perf_counter() - start < 5
