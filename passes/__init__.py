"""A toolkit of compiler passes on torch.fx: graphs in, graphs out, usable without the rest of hpml.

    base, annotations, manager, registry                     the pass contract (docs/writing_a_pass.md)
    op_rules, graph, hardware, cost_model, solver            inputs of passes: rules, data, prices, numbers
    analyses, sharding, checkpointing, pipeline, transforms  the passes; they meet only in the annotations
    presets                                                  their order
"""
from passes.moved_modules import install_finder

install_finder()
