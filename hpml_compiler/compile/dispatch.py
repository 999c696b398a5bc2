"""Which way a Dynamo graph goes through the compiler: on one device, through stages of a pipeline, or split over all ranks."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from hpml_compiler.compile import session
from hpml_compiler.compile.compiler import Compilation
from hpml_compiler.compile.one_device import one_device
from hpml_compiler.compile.pipelined import PipelinedGraph
from hpml_compiler.compile.refused import refuse
from hpml_compiler.monitor import tensorboard
from hpml_compiler.options import Options
from hpml_compiler.runtime import lost_ranks
from hpml_compiler.runtime.at import at
from hpml_compiler.runtime.devices import settle
from hpml_compiler.runtime.garbage import collected_seldom
from hpml_compiler.runtime.missing_gradients import without_missing
from hpml_compiler.runtime.world import ensure_process_group
from hpml_compiler.runtime.wrappers import refuse_other_wrappers, watch_compiled_modules
from passes import compat


@collected_seldom()
def compile_graph(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    compat.warn_if_untested()
    world = ensure_process_group()
    watch_compiled_modules()  # the backend may have been imported before Dynamo
    options.check_mesh(world)
    if options.tensorboard is not None:
        tensorboard.check_installed()
    if options.compiler == "inductor" and not torch.cuda.is_available():
        compat.warm_cpp_compiler()
    options = options.with_plan(world)
    if world == 1:
        return without_missing(gm, example_inputs)(one_device(gm, example_inputs, options))
    stages = options.stage_ranks > 1
    refuse_other_wrappers(example_inputs)
    lost_ranks.start()
    with at(f"compiling graph_{len(session.current().graphs)}"):
        settle(example_inputs)
        refuse(gm)
        if stages:
            return PipelinedGraph(gm, example_inputs, options).compile()
        return Compilation(gm, example_inputs, options).compile()
