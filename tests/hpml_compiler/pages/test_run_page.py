"""Records of runs -> one page: side by side, with the step as planned and measured; in a browser; and `hpml watch --once`."""
from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import asdict

import pytest
from typer.testing import CliRunner

from hpml_compiler.cli import app
from hpml_compiler.commands.watch import sparkline
from hpml_compiler.pages.line_chart import MOST_POINTS, line_chart, thinned
from hpml_compiler.run_records.record_file import RecordFile, file_of_rank
from passes.simulation.step_timeline import TimelineEvent
from tests.helpers.plans import gpt_plan

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
TIMELINE = [asdict(TimelineEvent(0, "compute", "a <mm>", "forward", 0.0, 30.0)),
            asdict(TimelineEvent(0, "communication", "all_reduce", "collective", 30.0, 45.0))]


@pytest.fixture
def folders(tmp_path):
    for name, speed in (("a", 1.0), ("b & <c>", 2.0)):
        file = RecordFile(file_of_rank(tmp_path / name, 0))
        file.write({"kind": "start", "time": 1e9, "step": 0, "ranks": 8})
        for step in range(10, 110, 10):
            file.write({"kind": "steps", "time": 1e9 + step, "step": step, "steps": 10, "step_s": speed, "longest_s": 2 * speed,
                        "samples_per_s": 8 / speed, "mfu": 0.4 / speed, "budget": 2**31, "memory": {"allocated": 2**30},
                        "values": {"loss": float("nan") if step == 50 else 10.0 / step}})
        file.write({"kind": "event", "event": "stall", "time": 1e9 + 60, "step": 60, "text": "step 60 took <9> s"})
        file.write({"kind": "timeline", "time": 1e9, "events": TIMELINE})
        file.write({"kind": "end", "time": 1e9 + 200, "step": 100, "how": "ended"})
        gpt_plan().save(tmp_path / name / "plan.json")
    return [str(tmp_path / name) for name in ("a", "b & <c>")]


def test_report_of_two_runs(folders, tmp_path):
    page = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["report", *folders, "-o", str(page)])
    assert done.exit_code == 0, done.output
    found = page.read_text()
    for said in ("Runs a, b &amp; &lt;c&gt;", "<td>MFU</td><td>40.0%</td><td>20.0%</td>", "<td>stalls</td><td>1</td><td>1</td>",
                 "step 60 took &lt;9&gt; s", "<h2>loss</h2>", "budget of a 2 GiB", "<p>planned, ", "<p>measured, 45.0 us</p>",
                 "a &lt;mm&gt; (forward)"):
        assert said in found, said
    heights = re.findall(r'y="([0-9.]+)"[^>]*>budget of', found)
    assert len(set(heights)) == 2, "equal budgets are told beneath each other"
    assert "<c>" not in found and "http://" not in found.replace("http://www.w3.org", "")
    if BROWSER is None:
        return
    shown = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--enable-logging=stderr", "--window-size=1280,900", f"--screenshot={tmp_path / 'page.png'}", f"file://{page}"],
        capture_output=True, text=True, timeout=60, check=True)
    assert "CONSOLE" not in shown.stderr
    from matplotlib.image import imread

    pixels = imread(tmp_path / "page.png")[..., :3]
    assert pixels.shape[:2] == (900, 1280) and 0.005 < (pixels.min(axis=-1) < 0.9).mean() < 0.9  # not blank


def test_watch_without_a_terminal(folders):
    done = CliRunner().invoke(app, ["watch", folders[0]])
    assert done.exit_code == 0 and re.search(r"state +ended +step +100", done.output)
    assert "1 GiB" in done.output and "step 60 rank 0 stall: step 60 took <9> s" in done.output


def test_a_folder_without_a_run(tmp_path):
    for command in ("watch", "report"):
        assert "no run was recorded here" in str(CliRunner().invoke(app, [command, str(tmp_path)]).exception)


def test_long_series_keep_their_extremes():
    points = [(float(k), 1000.0 if k == 7777 else float(k % 5)) for k in range(20000)]
    found = thinned(points)
    assert len(found) <= MOST_POINTS and (7777.0, 1000.0) in found and found == sorted(found)
    assert line_chart({"a": [(1.0, float("nan"))]}, str) == ""
    assert line_chart({"a": [(1.0, 2.0), (2.0, float("inf")), (3.0, 4.0), (4.0, 3.0)]}, str).count("<polyline") == 1


def test_sparkline():
    assert sparkline([0.0, 1.0, float("nan"), 2.0], 10) == "▁▅ █"
    assert len(sparkline([1.0] * 1000, 40)) == 40
