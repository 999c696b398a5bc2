"""Passes by name, the project's own and other packages'."""
from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass

import pytest

from passes import registry
from passes.analyses.flops import FLOPS, Flops
from passes.analyses.shapes import SHAPES, Shapes
from passes.annotations import Key
from passes.base import AnalysisPass
from passes.errors import BadInput
from passes.graph.planning_keys import DECISION


@pytest.fixture(autouse=True)
def registry_as_before():
    registry.names()  # everything the project has, so that only the test's own passes are taken back
    with registry.PASSES.temporary():
        yield


def _make_pass(pass_name: str, module: str = __name__, **attributes: object) -> type[AnalysisPass]:
    body = {"name": pass_name, "run": lambda self, graph_module: None, "__module__": module, **attributes}
    return dataclass(frozen=True)(type(pass_name.title(), (AnalysisPass,), body))


def test_the_projects_passes_are_found_by_name():
    assert registry.lookup("shapes") is Shapes
    assert registry.lookup("flops") is Flops
    assert {"shapes", "flops", "find_blocks"} <= set(registry.names())


def test_providers_of_an_annotation():
    assert "flops" in registry.providers(FLOPS)
    assert registry.providers(DECISION) == ("adopt_placements", "decide_placements", "obey_placements")
    assert registry.providers(Key("nobody_provides_this", int)) == ()
    registry.register(_make_pass("other_shapes", provides=(SHAPES,)))
    assert registry.providers(SHAPES) == ("other_shapes", "shapes")


def test_an_unknown_name_lists_what_comes_close():
    with pytest.raises(BadInput, match="(?s)no pass is called 'shape'.*did you mean shapes"):
        registry.lookup("shape")


def test_names_are_unique():
    registry.register(_make_pass("mine", module="first_module"))
    with pytest.raises(BadInput, match=r"(?s)two passes are called 'mine'.*second_module\.Mine and first_module\.Mine"):
        registry.register(_make_pass("mine", module="second_module"))


def test_a_reloaded_module_registers_again():
    registry.register(_make_pass("mine"))
    again = registry.register(_make_pass("mine"))
    assert registry.lookup("mine") is again


def test_a_pass_must_be_a_frozen_dataclass_with_a_name():
    class Bare(AnalysisPass):
        name = "bare"

        def run(self, graph_module):
            pass

    with pytest.raises(BadInput, match="(?s)a pass is a frozen dataclass.*@dataclass"):
        registry.register(Bare)
    with pytest.raises(BadInput, match="must be an identifier, got 'no name'"):
        registry.register(_make_pass("no name"))


def _install(folder, monkeypatch, entry_point: str, source: str = "") -> None:
    """A package `hpml_third_party` with one entry point, as pip would leave it."""
    (folder / "hpml_third_party.py").write_text(textwrap.dedent(source))
    info = folder / "hpml_third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hpml-third-party\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.ENTRY_POINT_GROUP}]\n{entry_point}\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "hpml_third_party", raising=False)


THIRD_PARTY = """
    from dataclasses import dataclass
    from passes.base import AnalysisPass

    @dataclass(frozen=True)
    class Theirs(AnalysisPass):
        name = "theirs"

        def run(self, graph_module):
            pass
    """


@pytest.mark.parametrize("entry_point", ["theirs = hpml_third_party:Theirs", "all_of_them = hpml_third_party"])
def test_other_packages_add_passes_by_entry_point(tmp_path, monkeypatch, entry_point):
    registers_itself = ":" not in entry_point
    source = THIRD_PARTY.replace("@dataclass", "@register\n    @dataclass") if registers_itself else THIRD_PARTY
    _install(tmp_path, monkeypatch, entry_point, "\n    from passes.registry import register" + source)
    assert "theirs" not in registry.names()
    registry.load_entry_points()
    assert registry.lookup("theirs").__module__ == "hpml_third_party"


def test_a_package_that_fails_to_load_is_named_and_left_out(tmp_path, monkeypatch):
    _install(tmp_path, monkeypatch, "theirs = hpml_third_party:Missing")
    with pytest.warns(RuntimeWarning, match="pass 'theirs' of hpml-third-party .* is left out.*Missing"):
        registry.load_entry_points()
    assert registry.lookup("shapes") is Shapes
