"""Timelines: files that are pictures, and words that say the numbers."""
from __future__ import annotations

import pytest

from hpml_compiler.simulate import TimedStage, simulate
from hpml_compiler.simulate.timeline_plot import draw, headline
from passes.errors import BadInput
from passes.simulation.step_timeline import TimelineEvent
from tests.helpers.plans import gpt_plan
from tests.hpml_compiler.simulate.toy import chain_plan


def test_a_timeline_names_streams_kinds_and_peak(tmp_path):
    found = simulate(chain_plan(3))
    svg = draw(found, tmp_path / "step.svg", "three layers").read_text()
    for word in ("ranks 0-1", "communication", "forward", "backward", "all_gather", "reduce_scatter", "three layers"):
        assert f"<!-- {word}" in svg or f">{word}" in svg, word
    assert draw(found, tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_a_pipeline_has_a_row_for_each_stage(tmp_path):
    found = simulate(gpt_plan(2), stages=[TimedStage(10, 20)] * 8, microbatches=4)
    svg = draw(found, tmp_path / "pipeline.svg").read_text()
    assert all(f"rank {rank}  compute" in svg for rank in range(8))
    assert all(f"<!-- {kind}{i} -->" in svg for kind in "FB" for i in range(4))


def test_what_was_measured_is_drawn_below(tmp_path):
    found = simulate(gpt_plan(2), stages=[TimedStage(10, 20)] * 8, microbatches=4)
    measured = [TimelineEvent(event.lane, event.stream, event.name, event.kind, event.start_us, event.stop_us)
                for event in found.events if event.stream == "compute"]
    before = draw(found, tmp_path / "simulated.svg").read_text()
    after = draw(found, tmp_path / "both.svg", measured=measured).read_text()
    assert after.count("<!-- measured -->") == 8 and before.count("<!-- measured -->") == 0
    assert after.count("<!-- F0 -->") > before.count("<!-- F0 -->") > 0


def test_the_headline_shares_add_up():
    line = headline(simulate(chain_plan(3)))
    shares = [float(part.rsplit(" ", 1)[1].rstrip("%")) for part in line.split(": ")[1].split(";")[0].split(", ")]
    assert sum(shares) == pytest.approx(100, abs=0.3)


@pytest.mark.parametrize("name", ["no/such/folder.png", "picture.unknown"])
def test_a_file_that_cannot_be_drawn_is_bad_input(tmp_path, name):
    with pytest.raises(BadInput, match="cannot (draw|write) the timeline"):
        draw(simulate(chain_plan(2)), tmp_path / name)
