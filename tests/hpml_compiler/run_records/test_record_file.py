"""Records -> lines of JSON -> records, with torn lines, full disks and figures that JSON lacks."""
from __future__ import annotations

import logging
import math

import pytest

from hpml_compiler.run_records.record_file import RecordFile, number_of, read_records
from passes.errors import BadInput


def test_records_are_read_as_written_and_a_torn_line_costs_only_itself(tmp_path):
    path = tmp_path / "a" / "rank-00000.jsonl"
    file = RecordFile(path)
    file.write({"kind": "steps", "loss": float("nan"), "values": {"x": [float("-inf"), 1.5]}})
    file.close()
    with open(path, "a") as torn:
        torn.write('{"kind":"ste')  # the process was killed
    again = RecordFile(path)
    again.write({"kind": "start"})
    again.close()
    found, lost = read_records(path)
    assert [each["kind"] for each in found] == ["steps", "start"] and lost == 1
    assert math.isnan(number_of(found[0]["loss"])) and list(map(number_of, found[0]["values"]["x"])) == [-math.inf, 1.5]


def test_a_full_disk_is_said_once_and_training_continues(tmp_path, caplog):
    link = tmp_path / "rank-00000.jsonl"
    link.symlink_to("/dev/full")
    file = RecordFile(link)
    with caplog.at_level(logging.WARNING, "hpml"):
        file.write({"kind": "steps"})
        file.write({"kind": "steps"})
    assert len(caplog.messages) == 1 and "No space left on device" in caplog.text and "free space there" in caplog.text


@pytest.mark.parametrize("folder", ["/proc/none", "/dev/null/a", "a\0b"])
def test_a_folder_that_cannot_be_written_is_refused(folder):
    from pathlib import Path

    with pytest.raises(BadInput, match="give hpml_compiler.Monitor a folder that can be written"):
        RecordFile(Path(folder) / "rank-00000.jsonl")
