"""Parse options from the command line's `--fix KEY=VALUE`."""
from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from hpml_compiler.options import Options
from hpml_compiler.plans.validation_errors import did_you_mean
from passes.errors import BadInput, shortened
from passes.hardware.cluster import MOST_DEVICES


def parse_fixes(fixes: Sequence[str]) -> dict[str, Any]:
    """Parse `--fix KEY=VALUE`: KEY is the name of an option, or else a mesh axis; VALUE is JSON, or else text.

    `["dp=2", "tp=4", "memory_budget=24GiB"]` gives `{"mesh": {"dp": 2, "tp": 4}, "memory_budget": "24GiB"}`. Values are
    checked by `Options.parse`. Raises BadInput for anything that is not KEY=VALUE, and for a repeated key.
    """
    options: dict[str, Any] = {}
    axes: dict[str, int] = {}
    for fix in fixes:
        key, equals, text = (part.strip() for part in fix.partition("="))
        if not (key and equals and text):
            raise BadInput(what=f"{shortened(repr(fix))} is not KEY=VALUE", where="--fix", next_step="write --fix dp=2")
        if key in options or key in axes:
            raise BadInput(what=f"{key} is given twice", where=f"--fix {fix}", next_step="leave one of them out")
        if key in Options.model_fields:
            options[key] = _json_or_text(text)
        elif re.fullmatch(r"\d+", text, re.ASCII) and not did_you_mean(key, Options.model_fields):
            axes[key] = int(text) if len(text) < 20 else MOST_DEVICES + 1  # too many; Python refuses to read long numbers
        else:
            close = did_you_mean(key, Options.model_fields)
            raise BadInput(what=f"{key!r} is not an option{close}, and {shortened(fix)} is not AXIS=SIZE",
                           where=f"--fix {fix}", next_step="the options are " + ", ".join(Options.model_fields)
                           + '; an axis takes an integer, as in dp=2 or, for any name, mesh={"NAME": 2}')
    if axes:
        mesh = options.get("mesh", {})
        if not isinstance(mesh, dict) or set(mesh) & set(axes):
            raise BadInput(what=f"mesh={mesh} and {axes} cannot be combined", where="--fix",
                           next_step="pin the axes one by one, or the mesh as a whole")
        options["mesh"] = {**mesh, **axes}
    return options


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise BadInput("the value is nested too deeply", f"--fix {shortened(text)}",
                       "options are numbers, text, or objects of these") from error
    except ValueError:
        return text
