"""Objects of the process -> those of a type that are alive, with one scan inside of a context."""
from __future__ import annotations

import gc

from torch import nn

from hpml_compiler.runtime.process.live_objects import live_objects, one_scan


class Marked(nn.Linear):
    pass


def test_one_scan_finds_what_was_there_and_is_still_alive(monkeypatch):
    scans, whole = [], gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda: scans.append(1) or whole())
    stays, goes = Marked(2, 2), Marked(2, 2)
    with one_scan():
        assert {*live_objects(Marked)} == {stays, goes}
        del goes
        made = Marked(2, 2)
        assert live_objects(Marked) == [stays] and live_objects(nn.Linear, exact=True).count(stays) == 0
        assert any(each is stays.weight for each in live_objects(nn.Parameter))
        with one_scan():
            assert live_objects(Marked) == [stays]
        assert len(scans) == 1
    assert {*live_objects(Marked)} == {stays, made} and len(scans) == 2
