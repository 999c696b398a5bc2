"""Memory that is left to a process."""
from __future__ import annotations

from hpml_compiler.runtime.process import out_of_memory
from passes.hardware import control_groups


def test_room_is_at_most_what_the_container_leaves(monkeypatch):
    monkeypatch.setattr(control_groups, "bytes_left", lambda: 12345)
    assert out_of_memory.room_bytes() == 12345
    monkeypatch.setattr(control_groups, "bytes_left", lambda: None)
    assert out_of_memory.room_bytes() > 12345
