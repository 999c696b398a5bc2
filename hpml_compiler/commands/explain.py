"""`hpml explain PLAN.json NAME`: where a node or parameter of a saved plan lives, why, and at what cost."""
from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("explain")(explain)


def explain(
    path: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan that `hpml plan --save` wrote.")],
    name: Annotated[str, typer.Argument(help="A parameter, as model.layers.0.weight, or a node of the graph.")],
) -> None:
    """Say where NAME lives, why, and what it costs."""
    from hpml_compiler.plan import Plan

    print(Plan.load(path).explain(name))
