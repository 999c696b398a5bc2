"""What a run can do and a plan does not count yet."""
from __future__ import annotations

from hpml_compiler.options import Options
from passes.errors import BadInput


def refuse_uncounted(options: Options) -> None:
    """Raises BadInput for options of which a plan would be wrong."""
    if options.stage_ranks > 1:
        raise BadInput("a plan does not count stages of a pipeline yet", "options['mesh']",
                       "leave the axis pp out; a run takes it, as in options={\"mesh\": {\"pp\": 2}}")
