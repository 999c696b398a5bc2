"""The `hpml` command: one module in `hpml_compiler.commands` per subcommand, found by being there."""
from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence

import typer

from hpml_compiler import commands
from passes.errors import HpmlError

app = typer.Typer(
    name="hpml",
    help="Split an unmodified PyTorch training script over the devices that are there.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _root() -> None:
    """Keeps the subcommand's name required even where only one is registered."""


def _register_commands() -> None:
    """Call `register(app)` of every public module in `hpml_compiler.commands`.

    These modules import torch and the passes only inside their commands, so that `hpml --help` answers at once.
    """
    for module in pkgutil.iter_modules(commands.__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{commands.__name__}.{module.name}").register(app)


_register_commands()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 ok, 2 bad input, 3 infeasible, 4 missing dependency.

    With HPML_DEBUG=1 in the environment an error keeps its traceback.
    """
    # Traces are millions of small objects that live to the end: looking for garbage among them takes a tenth of the time.
    gc.set_threshold(200_000, 50, 100)
    try:
        app(args=None if arguments is None else list(arguments))
    except HpmlError as error:
        if os.environ.get("HPML_DEBUG") == "1":
            raise
        print(f"hpml: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
