"""Directives for the tables of `reference_tables`: `hpml-options`, `hpml-commands` and `hpml-plan-fields`."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

import reference_tables
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Table(SphinxDirective):
    """A directive without content, which stands for generated Markdown."""

    has_content = False
    lines: ClassVar[Callable[[], Iterator[str]]]

    def run(self) -> list[nodes.Node]:
        parent = nodes.container()
        text = StringList([*type(self).lines()], source=self.env.docname)
        self.state.nested_parse(text, self.content_offset, parent)
        return parent.children


def setup(app: Sphinx) -> dict[str, bool]:
    for name, lines in (("hpml-options", reference_tables.options), ("hpml-commands", reference_tables.commands),
                        ("hpml-plan-fields", reference_tables.plan_fields)):
        app.add_directive(name, type(name, (Table,), {"lines": staticmethod(lines)}))
    return {"parallel_read_safe": True}
