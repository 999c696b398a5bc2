"""A toolkit of compiler passes on torch.fx: graphs in, graphs out, usable without the rest of hpml.

    base, annotations, manager, registry    the pass contract (docs/writing_a_pass.md)
    analysis, partition, transform          the passes; they meet only in the annotations
    rules                                   the table of op rules that they read
"""
