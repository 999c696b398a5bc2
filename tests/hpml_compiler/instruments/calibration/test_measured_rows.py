"""Rows of a file -> checked rows and step times in seconds; errors name the row."""
from __future__ import annotations

import json

import pytest

from hpml_compiler.instruments.calibration.measured_rows import megatron_flops, read_rows
from passes.errors import BadInput

ROW = {"name": "a", "target": "m.py:f", "cluster": "2x8:a100-80g", "mesh": {"dp": 16}, "seconds": 2.5}
ARGUMENTS = {"layers": 24, "hidden": 2304, "vocabulary": 51200, "sequence": 2048, "batch": 512}
TFLOPS = {key: value for key, value in ROW.items() if key != "seconds"} | {
    "cluster": "4x8:a100-80g", "mesh": {"dp": 32}, "tflops_per_device": 137, "formula": "megatron", "arguments": ARGUMENTS}


def read(tmp_path, data):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(data))
    return read_rows(path)


def test_seconds_are_the_step_time(tmp_path):
    (row,) = read(tmp_path, [ROW])
    assert (row.measured_s, row.devices, row.recompute, row.microbatches) == (2.5, 16, "none", 1)
    assert row.tflops(2.5) is None


def test_tflops_per_device_become_seconds_by_the_formula(tmp_path):
    """96·512·2048·24·2304²·(1 + 2048/13824 + 51200/884736) FLOPs over 32 devices at 137 TFLOP/s."""
    (row,) = read(tmp_path, {"source": "a table", "rows": [TFLOPS]})
    flops = 96 * 512 * 2048 * 24 * 2304**2 * (1 + 2048 / 13824 + 51200 / 884736)
    assert megatron_flops(**ARGUMENTS) == pytest.approx(flops, rel=1e-12)
    assert row.measured_s == pytest.approx(flops / 137e12 / 32)
    assert row.tflops(row.measured_s) == pytest.approx(137)


def test_the_formula_is_four_forward_passes_of_all_matrix_products():
    """Per layer and token 24h² FLOPs of weights and 4sh of attention forward, 2hV of logits; backward is twice forward,
    and layers (not logits) run forward once more."""
    layers, hidden, vocabulary, sequence, batch = 5, 64, 1000, 32, 3
    tokens = batch * sequence
    layer = tokens * (24 * hidden**2 + 4 * sequence * hidden)
    logits = tokens * 2 * hidden * vocabulary
    assert megatron_flops(layers, hidden, vocabulary, sequence, batch) == pytest.approx(4 * layers * layer + 3 * logits)


def test_a_target_beside_the_file_is_found_there(tmp_path):
    (tmp_path / "m.py").write_text("")
    assert read(tmp_path, [ROW])[0].target == f"{tmp_path / 'm.py'}:f"


def test_a_row_without_a_name_is_called_by_its_number(tmp_path):
    nameless = {key: value for key, value in ROW.items() if key != "name"}
    assert [row.name for row in read(tmp_path, [nameless, ROW])] == ["row 0", "a"]


def test_a_pipeline_takes_the_devices_that_the_mesh_leaves(tmp_path):
    row = {**TFLOPS, "mesh": {"dp": 8}, "pipeline": {"stages": 4, "schedule": "interleaved", "virtual": 3}}
    assert read(tmp_path, [row])[0].pipeline.virtual == 3


@pytest.mark.parametrize(("change", "message"), [
    ({"seconds": None}, "either seconds or tflops_per_device"),
    ({"seconds": -1.0}, "seconds: expected a number above 0, got -1"),
    ({"seconds": "fast"}, "seconds: expected a number, got 'fast'"),
    ({"tflops_per_device": 137.0}, "either seconds or tflops_per_device"),
    ({"formula": "megatron"}, "seconds without"),
    ({"speed": 3}, "speed: unknown key"),
    ({"recompute": "some"}, "recompute: expected 'none' or 'full', got 'some'"),
    ({"microbatches": 0}, "microbatches: expected a number of at least 1, got 0"),
    ({"mesh": {"dp": 8}}, "has 8 devices, the cluster 2x8:a100-80g has 16"),
    ({"cluster": "2x8:a1000"}, "unknown device 'a1000'"),
])
def test_a_bad_row_is_named_with_what_is_wrong(tmp_path, change, message):
    with pytest.raises(BadInput) as caught:
        read(tmp_path, [ROW, {**ROW, "name": "b", **change}])
    assert message in caught.value.what
    assert "row 1 (b)" in caught.value.where and "rows.json" in caught.value.where


@pytest.mark.parametrize("data", [[], {}, {"rows": []}, "text"])
def test_a_file_without_rows_is_refused(tmp_path, data):
    with pytest.raises(BadInput, match="there are no rows"):
        read(tmp_path, data)


def test_an_unknown_key_beside_the_rows_is_refused(tmp_path):
    with pytest.raises(BadInput, match="unknown key 'row'"):
        read(tmp_path, {"rows": [ROW], "row": 1})
