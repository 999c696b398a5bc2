"""Pages of the site: links point to files, and tables are complete."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpml_compiler import cli
from hpml_compiler.options import Options

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if not {"_build", "notebooks"} & set(page.relative_to(DOCS).parts))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_lead_to_files(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)", text)
    assert not [link for link in links if not (page.parent / link).exists()]


def test_options_of_other_libraries_name_options_that_exist():
    for page in (DOCS / "coming_from").glob("*.md"):
        named = set(re.findall(r'[`{]"(\w+)": ', page.read_text(encoding="utf-8")))
        assert named - {"dp", "tp", "pp", "cp", "node"} <= {*Options.model_fields}, page


def test_tables_are_complete(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "_ext")
    import reference_tables

    options, commands = ("\n".join(lines()) for lines in (reference_tables.options, reference_tables.commands))
    assert all(f"| `{name}` |" in options for name in Options.model_fields)
    assert all(f"**hpml {command.name}**" in commands for command in cli.app.registered_commands)
    assert "| `graph_hash` | `str` |" in "\n".join(reference_tables.plan_fields())
