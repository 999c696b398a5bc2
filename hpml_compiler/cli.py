"""The `hpml` command. Each public module in `hpml_compiler.commands` is a subcommand."""
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
    help="Split an unmodified PyTorch training script over the available devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _root() -> None:
    """Root of the command line; keeps the subcommand's name required even if only one is registered."""


def _register_commands() -> None:
    """Call `register(app)` of every public module in `hpml_compiler.commands`.

    These modules import torch and the passes inside their commands only, so that `hpml --help` is fast.
    """
    for module in pkgutil.iter_modules(commands.__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{commands.__name__}.{module.name}").register(app)


_register_commands()


DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
INTERRUPTED, NO_READER = 128 + signal.SIGINT, 128 + signal.SIGPIPE
"""Exit codes, by the conventions of shells."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 ok, 2 bad input, 3 infeasible, 4 missing dependency, 1 a bug of hpml,
    130 after Ctrl-C, 141 if stdout was closed.

    With HPML_DEBUG=1 in the environment an error keeps its traceback.
    """
    # Traces are millions of small objects that live to the end; frequent garbage collection would take a tenth of the time.
    gc.set_threshold(*SELDOM)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print ? for characters that the terminal cannot show
            stream.reconfigure(errors="replace")
    sys.exit(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    """Run one command and return its exit code; errors are printed to stderr."""
    try:
        code = app(args=None if arguments is None else list(arguments), prog_name="hpml", standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as error:  # raised by typer, which handles a closed pipe by itself
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
        reported = _as_hpml_error(error)
        print(f"hpml: {reported}", file=sys.stderr)
        return reported.exit_code
    if code == INTERRUPTED:
        print("hpml: interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _as_hpml_error(error: Exception) -> HpmlError:
    """Convert any exception to an HpmlError: usage errors and full disks to BadInput, all others to a report of a bug."""
    if isinstance(error, HpmlError):
        return error
    format_message = getattr(error, "format_message", None)
    if format_message is not None:  # a usage error; typer's parser classes are private
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "hpml"
        return BadInput(format_message().rstrip("."), command, f"`{command} --help` lists arguments and options")
    if isinstance(error, OSError) and error.errno in DISK:
        _give_up_stdout()
        return BadInput(f"cannot write: {error.strerror}", error.filename or "standard output",
                        "free space there, or write to another disk")
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return HpmlError(f"this is a bug of hpml: {type(error).__name__}: {error}", f"{frame.filename}, line {frame.lineno}",
                     "please report it with the output under HPML_DEBUG=1")


def _nobody_reads() -> int:
    _give_up_stdout()
    return NO_READER


def _give_up_stdout() -> None:
    """Discard the rest of stdout; otherwise Python flushes it at exit and prints an error."""
    if sys.stdout is sys.__stdout__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    main()
