"""Load the TARGET of a command: "file.py:function" or "module:function", called without arguments for (model, batch)."""
from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from passes.errors import BadInput

EXAMPLE = "give FILE.py:FUNCTION or MODULE:FUNCTION, such as models.py:gpt"


def load_target(target: str) -> tuple[Any, Any]:
    """Load the (model, batch) that `target` names: a torch.nn.Module, and a dict of keyword arguments, a tuple or list of
    positional ones, or one tensor. Raises BadInput for anything else, including errors in the user's code.

    The folder of a file is put first on sys.path and stays there, as for `python file.py`, since the model may import
    its neighbors later. Modules are also searched in the current folder, as for `python -m module`.
    """
    source, colon, name = target.rpartition(":")
    if not (colon and source and name.isidentifier()):
        raise BadInput(what=f"{target!r} is not a target", where="TARGET", next_step=EXAMPLE)
    is_file = source.endswith(".py") or "/" in source
    module = _import_file(Path(source)) if is_file else _import_module(source)
    function = _function(module, name, source)
    model, batch = _pair(_run(function, f"{source}:{name}"), target)
    return model, batch


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        neighbors = sorted(each.name for each in path.parent.glob("*.py")) if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, neighbors, n=1)
        raise BadInput(what=f"there is no file {path}", where=f"TARGET, from the folder {Path.cwd()}",
                       next_step=f"did you mean {path.parent / close[0]}?" if close else EXAMPLE)
    _put_on_path(path.resolve().parent)
    # a unique name: the user's models.py must not replace another module called models
    name = f"hpml_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise BadInput(what=f"{path} is not a Python file", where="TARGET", next_step=EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up classes there
    try:
        _guarded(lambda: spec.loader.exec_module(module), f"importing {path}", str(path))  # type: ignore[union-attr]
    except BadInput:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    _put_on_path(Path.cwd())
    try:
        found = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):
        found = None
    if found is None:
        raise BadInput(what=f"there is no module {name!r}", where=f"TARGET, from the folder {Path.cwd()} and sys.path",
                       next_step=f"give the file, {name.replace('.', '/')}.py:FUNCTION, or install the module")
    return _guarded(lambda: importlib.import_module(name), f"importing {name}", name)


def _put_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _guarded(action: Callable[[], Any], doing: str, where: str) -> Any:
    """Run the user's code and raise BadInput for its exceptions, including SystemExit (a script without a main guard)."""
    try:
        return action()
    except SystemExit as error:
        raise BadInput(what=f"{doing} ended the process (exit {error.code})", where=where,
                       next_step='put the script part under `if __name__ == "__main__":`') from error
    except Exception as error:
        line = _innermost_line(error)
        raise BadInput(what=f"{doing} failed: {type(error).__name__}: {error}", where=line or where,
                       next_step="fix the code there, or set HPML_DEBUG=1 for the traceback") from error


def _innermost_line(error: Exception) -> str:
    """File and line of the user's code that raised: the innermost frame outside site-packages."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frames = inspect.getinnerframes(error.__traceback__, context=0) if error.__traceback__ else []
    for frame in reversed(frames):
        if "site-packages" not in frame.filename and not frame.filename.startswith("<") and frame.filename != __file__:
            return f"{frame.filename}, line {frame.lineno}"
    return ""


def _function(module: ModuleType, name: str, source: str) -> Callable[[], Any]:
    functions = sorted(each for each, value in vars(module).items()
                       if inspect.isfunction(value) and value.__module__ == module.__name__)
    if not hasattr(module, name):
        close = difflib.get_close_matches(name, functions, n=1)
        raise BadInput(what=f"{source} has no {name!r}", where="TARGET",
                       next_step=f"did you mean {source}:{close[0]}?" if close
                       else f"its functions are {', '.join(functions) or 'none'}")
    function = getattr(module, name)
    if not callable(function):
        raise BadInput(what=f"{name!r} is a {type(function).__name__}, not a function", where=source,
                       next_step=f"its functions are {', '.join(functions) or 'none'}")
    required = [each.name for each in inspect.signature(function).parameters.values()
                if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    if required:
        raise BadInput(what=f"{name} needs the arguments {', '.join(required)}, but is called without any",
                       where=source, next_step="give them defaults, or name a function that calls it")
    return function


def _run(function: Callable[[], Any], where: str) -> Any:
    return _guarded(function, f"calling {where}", where)


def _pair(result: Any, target: str) -> tuple[Any, Any]:
    import torch

    next_step = "return (model, batch): a torch.nn.Module, and a dict, tuple or list of its arguments, or one tensor"
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        size = f" of {len(result)}" if isinstance(result, (tuple, list)) else ""
        raise BadInput(what=f"{target} returned a {type(result).__name__}{size}, not (model, batch)", where="TARGET",
                       next_step=next_step)
    model, batch = result
    if not isinstance(model, torch.nn.Module):
        raise BadInput(what=f"{target} returned a {type(model).__name__} as the model", where="TARGET",
                       next_step=next_step)
    if not isinstance(batch, (Mapping, tuple, list, torch.Tensor)):
        raise BadInput(what=f"{target} returned a {type(batch).__name__} as the batch", where="TARGET",
                       next_step=next_step)
    return model, batch
