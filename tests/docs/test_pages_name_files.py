"""docs/architecture.md and docs/glossary.md name modules -> these exist, in one of the packages."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "passes", ROOT / "hpml_compiler")


@pytest.mark.parametrize("page", ["architecture.md", "glossary.md"])
def test_modules_exist(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = set(re.findall(r"[\w./]*\w\.py\b|\b\w+(?:/\w+)*/(?=[\s`,:;|)])", text))
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / name).exists() and not any(any(folder.rglob(name)) for folder in FOLDERS)]
