"""Small models of transformers -> no heavy operation that has splits of its own loses all of them in its group.

What follows the gradients of queries and of keys in a model with rotary positions reads the same cosines, but another part of
them where only the queries are split: the backward of attention was then whole on every rank.
"""
from __future__ import annotations

import pytest
import torch
import transformers

from hpml_compiler.options import Options
from hpml_compiler.planner.traced_model import TracedModel
from passes.sharding.grouping.op_groups import groups_of
from passes.sharding.strategies.group_strategies import strategies_on_axis

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
         "max_position_embeddings": 64, "use_cache": False}
CONFIGS = {
    "GPTNeoX": (transformers.GPTNeoXConfig, {}), "Llama": (transformers.LlamaConfig, {"num_key_value_heads": 2}),
    "Bert": (transformers.BertConfig, {"is_decoder": True}),
}
WAYS = 8
"""Of an axis, which the four heads do not divide by."""


@pytest.mark.parametrize("name", CONFIGS)
def test_a_group_leaves_its_heavy_operations_a_split(name):
    kind, more = CONFIGS[name]
    model = transformers.AutoModelForCausalLM.from_config(kind(**SMALL, **more))
    ids = torch.zeros(2, 64, dtype=torch.long)
    (annotated,) = TracedModel(model, {"input_ids": ids, "labels": ids}, Options.parse({"trace_all_layers": True})).whole
    graph = annotated.graph

    def divides(v, p):
        return not isinstance(p, tuple) or graph.values[v].factors[p[0]][p[1]] % WAYS == 0

    heavy, lost = 0, []
    for group in groups_of(graph):
        for op in group.heavy(graph):
            own = [s for s in op.strategies if s.splits
                   and all(map(divides, (*op.inputs, *op.outputs), s.inputs + s.outputs))]
            if own:
                heavy += 1
                joints = strategies_on_axis(group, graph, WAYS, lambda nbytes: 1.0, 1e-3, 1e-6)
                if not any(joint.operations[group.operations.index(op.index)].strategy.splits for joint in joints):
                    lost.append(op.name)
    assert heavy and not lost
