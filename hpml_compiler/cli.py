"""The `hpml` command: one module in `hpml_compiler.commands` per subcommand, found by being there."""
from __future__ import annotations

import errno
import gc
import importlib
import io
import os
import pkgutil
import signal
import sys
import traceback
from collections.abc import Sequence

import typer

from hpml_compiler import commands
from hpml_compiler.runtime.process.gc_pause import SELDOM
from passes.errors import BadInput, HpmlError

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


DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
INTERRUPTED, NO_READER = 128 + signal.SIGINT, 128 + signal.SIGPIPE
"""Exit codes, as shells know them."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 ok, 2 bad input, 3 infeasible, 4 missing dependency, 1 an error of hpml itself,
    130 after Ctrl-C, 141 where nobody reads what is printed any more.

    With HPML_DEBUG=1 in the environment an error keeps its traceback.
    """
    # Traces are millions of small objects that live to the end: looking for garbage among them takes a tenth of the time.
    gc.set_threshold(*SELDOM)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character gets a ? in its place
            stream.reconfigure(errors="replace")
    sys.exit(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    """The command's exit code; what went wrong is on stderr."""
    try:
        code = app(args=None if arguments is None else list(arguments), prog_name="hpml", standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as error:  # of the command line's library, which catches a closed pipe by itself
        if isinstance(error.__context__, BrokenPipeError):
            return _nobody_reads()
        raise
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except BrokenPipeError:
        return _nobody_reads()
    except Exception as error:
        if os.environ.get("HPML_DEBUG") == "1":
            raise
        said = _as_hpml_error(error)
        print(f"hpml: {said}", file=sys.stderr)
        return said.exit_code
    if code == INTERRUPTED:
        print("hpml: interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _as_hpml_error(error: Exception) -> HpmlError:
    """What is said of an error: of a wrong use of the command, of a full disk, or, for any other, of a bug of hpml's."""
    if isinstance(error, HpmlError):
        return error
    said = getattr(error, "format_message", None)
    if said is not None:  # an error of use; typer keeps the classes of its parser to itself
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "hpml"
        return BadInput(said().rstrip("."), command, f"`{command} --help` lists arguments and options")
    if isinstance(error, OSError) and error.errno in DISK:
        _give_up_stdout()
        return BadInput(f"cannot write: {error.strerror}", error.filename or "standard output",
                        "free space there, or write to another disk")
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return HpmlError(f"this is a bug of hpml: {type(error).__name__}: {error}", f"{frame.filename}, line {frame.lineno}",
                     "please report it with what HPML_DEBUG=1 in the environment shows")


def _nobody_reads() -> int:
    _give_up_stdout()
    return NO_READER


def _give_up_stdout() -> None:
    """What is left for stdout goes nowhere: at the end, Python would try once more and complain."""
    if sys.stdout is sys.__stdout__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    main()
