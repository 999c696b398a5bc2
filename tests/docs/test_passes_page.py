"""docs/passes.md has a paragraph for every pass, and names files that exist."""
from __future__ import annotations

import re
from pathlib import Path

from passes import registry

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "passes.md").read_text(encoding="utf-8")


def test_every_pass_has_a_paragraph():
    own = {name for name in registry.names() if registry.lookup(name).__module__.startswith("passes.")}
    assert own
    assert own <= set(re.findall(r"^## (\w+)$", TEXT, re.MULTILINE))


def test_the_files_it_names_exist():
    paths = re.findall(r"`((?:passes|hpml_compiler)/[\w/]+(?:\.py|/))`", TEXT)
    assert len(paths) > 8
    assert not [path for path in paths if not (ROOT / path).exists()]
