"""Sphinx configuration: `make docs` builds the site into docs/_build/html, with warnings as errors, also offline."""
from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_ext")]

project = "hpml"
author = "the hpml authors"
copyright = "2026, the hpml authors"
release = importlib.metadata.version("hpml-compiler")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "sphinx.ext.mathjax", "sphinx_copybutton",
              "generated_tables"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["_build", "_ext", "README.md"]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # the notebooks hold their outputs, which tests compare
suppress_warnings = ["myst.strikethrough", "misc.highlighting_failure"]

autodoc_typehints = "description"
autodoc_member_order = "bysource"
smartquotes = False  # code in help texts keeps its quotes

html_theme = "pydata_sphinx_theme"
html_title = "hpml"
html_theme_options = {
    "show_prev_next": False,
    "navigation_with_keys": False,
    "navbar_align": "left",
    "secondary_sidebar_items": ["page-toc"],
    "show_nav_level": 2,
}


def _reachable(url: str) -> bool:
    """True if torch's documentation answers. Without it, links into it are plain text."""
    if os.environ.get("HPML_DOCS_OFFLINE"):
        return False
    try:
        urllib.request.urlopen(url + "objects.inv", timeout=3).close()
    except OSError:
        return False
    return True


_TORCH = "https://docs.pytorch.org/docs/stable/"
intersphinx_mapping = {"torch": (_TORCH, None)} if _reachable(_TORCH) else {}


def setup(app: object) -> None:
    """Pages of the notebooks are copies: Sphinx reads nothing outside of docs/."""
    shutil.copytree(ROOT / "notebooks", ROOT / "docs" / "notebooks", dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
