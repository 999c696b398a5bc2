"""A rule from outside, before and after an edit -> its fingerprint; none without one."""
from __future__ import annotations

import importlib.util
import os
import sys

import pytest

from passes.op_rules import rule_table
from passes.serialization.extension_fingerprint import extension_fingerprint_of

SOURCE = """
import os
from passes.op_rules.base import make_rule
from passes.op_rules.rule_table import rule
BLOCKED = os.environ.get("OUTSIDE_BLOCKED", "v")
@rule("outside::mix")
def mix(call):
    return make_rule(call, ["rv"], ["rv"], blocked=[BLOCKED])
"""


@pytest.fixture
def told(tmp_path, monkeypatch):
    """The fingerprint with a module of this source and environment."""
    rule_table.load()
    before = dict(rule_table.RULES)

    def of(source, **environment):
        for name, value in environment.items():
            monkeypatch.setitem(os.environ, name, value)
        path = tmp_path / "outside_rules.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("outside_rules", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "outside_rules", module)
        rule_table.RULES.clear()
        rule_table.RULES.update(before)
        # not through Python's cache of compiled files, which looks at whole seconds
        exec(compile(source, str(path), "exec"), module.__dict__)
        return extension_fingerprint_of()

    with rule_table.RULES.temporary():
        yield of


def test_a_fingerprint_follows_what_rules_from_outside_say(told):
    assert extension_fingerprint_of() == ""
    first = told(SOURCE)
    assert first and told(SOURCE) == first
    assert told(SOURCE.replace('["rv"], ["rv"]', '["rx"], ["rx"]')) != first
    assert told(SOURCE, OUTSIDE_BLOCKED="r") != first  # the same source, with another constant
