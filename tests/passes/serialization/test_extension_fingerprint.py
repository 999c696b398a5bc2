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
    before = dict(rule_table.OPERATORS)

    def of(source, **environment):
        for name, value in environment.items():
            monkeypatch.setitem(os.environ, name, value)
        path = tmp_path / "outside_rules.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("outside_rules", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "outside_rules", module)
        rule_table.OPERATORS.clear()
        rule_table.OPERATORS.update(before)
        # not through Python's cache of compiled files, which looks at whole seconds
        exec(compile(source, str(path), "exec"), module.__dict__)
        return extension_fingerprint_of()

    with rule_table.OPERATORS.temporary():
        yield of


def test_a_fingerprint_follows_what_rules_from_outside_say(told):
    assert extension_fingerprint_of() == ""
    first = told(SOURCE)
    assert first and told(SOURCE) == first
    assert told(SOURCE.replace('["rv"], ["rv"]', '["rx"], ["rx"]')) != first
    assert told(SOURCE, OUTSIDE_BLOCKED="r") != first  # the same source, with another constant


@pytest.mark.parametrize("facts", ["{'flops': N}", "{'sizes': N}", "{'view': V}", "{'recomputable': N < 7}", "{'fusion': F}",
                                   "{'heavy': N < 7}", "{'flops': lambda x, out_val: N}", "{'local': partial(print, N)}"])
def test_a_fingerprint_follows_all_that_is_registered(told, facts):
    """The source of the two is the same; numbers and texts in it come from the environment."""
    source = f"""
import os
from functools import partial
from passes.op_rules.rule_table import rule
def registered(N, V, F):
    rule("outside::mix", **{facts})
registered(int(os.environ["N"]), os.environ["V"], os.environ["F"])
"""
    first = told(source, N="6", V="part", F="none")
    assert first and told(source, N="6", V="part", F="none") == first != told(source, N="7", V="whole", F="fuses")
