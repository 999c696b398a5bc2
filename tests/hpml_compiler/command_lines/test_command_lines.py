"""Every row of the table: its exit code, and a message with what, where and the next step; never a traceback."""
from __future__ import annotations

import json
import shlex
import stat
import sys
import time
from pathlib import Path

import pytest

from hpml_compiler.cli import main
from tests.hpml_compiler.command_lines import files, pins_table
from tests.hpml_compiler.command_lines.table import TABLE

MOST_S = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("command_lines")
    files.write(made)
    return made


@pytest.fixture
def hpml(folder, monkeypatch, capfd):
    """A function that runs a command line in the folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("HPML_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("HPML_DEBUG", raising=False)

    def run(arguments: list[str]) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capfd.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def test_the_table_is_large_and_no_line_is_there_twice():
    lines = [line for line, *_ in TABLE]
    assert len(set(lines)) == len(lines) >= 150


@pytest.mark.timeout(2 * MOST_S)
@pytest.mark.parametrize(("line", "code", "said", "reason"), TABLE, ids=[row[0][:70] for row in TABLE])
def test_command_line(hpml, line, code, said, reason):
    start = time.perf_counter()
    found, out, err = hpml(shlex.split(line))
    assert time.perf_counter() - start < MOST_S
    assert found == code, f"{reason}: {err}"
    assert "Traceback" not in out + err
    if code == 0:
        assert said in " ".join(out.split()), reason  # wherever a line is broken
        if "--json" in line:
            json.loads(out)
        return
    assert said in err, f"{reason}: {err}"
    assert not out or "--svg" in line  # a picture comes last: without one, all else has been done
    if code != 130:
        _check_message(err)
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def _check_message(err: str) -> None:
    assert err.count("hpml: ") == 1
    what, *rest = err[err.index("hpml: "):].splitlines()
    assert len(what) > len("hpml: ") and [text.split(":")[0] for text in rest[-2:]] == ["  where", "  next step"]
    assert max(map(len, [what, *rest])) < 1000


@pytest.fixture(scope="module")
def pinned(folder):
    pins_table.write(folder)


@pytest.mark.timeout(2 * MOST_S)
@pytest.mark.parametrize(("line", "code", "said"), pins_table.TABLE, ids=[row[0][:90] for row in pins_table.TABLE])
def test_pins_that_do_not_fit(pinned, hpml, caplog, line, code, said):
    found, out, err = hpml(["plan", *shlex.split(f"pins.py:{line}")])
    assert found == code, err
    assert "Traceback" not in out + err
    if code == 0:
        assert said in " ".join((out + err + caplog.text).split())
    else:
        assert said in err and not out
        _check_message(err)
