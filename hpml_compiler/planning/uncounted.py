"""What a run can do and a plan does not count yet."""
from __future__ import annotations

from hpml_compiler.options import Options
from passes.errors import BadInput


def refuse_uncounted(options: Options) -> None:
    """Raises BadInput for options of which a plan would be wrong."""
    others = {axis: size for axis, size in (options.mesh or {}).items() if axis != "pp" and size > 1}
    if options.stage_ranks > 1 and others:
        raise BadInput(f"a plan does not count stages that are split on other axes yet: {others}", "options['mesh']",
                       "give pp alone, or leave it out; a run takes both, as in options={\"mesh\": {\"pp\": 2, \"tp\": 2}}")
