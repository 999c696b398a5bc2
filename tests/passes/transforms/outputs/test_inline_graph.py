"""A Dynamo graph that is one call in another graph becomes part of it, with its module stacks and the names of its inputs."""
from __future__ import annotations

import torch
from torch import nn

from passes import compat
from passes.transforms.outputs.inline_graph import inline_graph


def test_a_call_becomes_the_calls_of_its_graph():
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), torch.ones(2, 4)
    inner, sources, named = [], [], []

    def keep(gm, _):
        inner.append(gm)
        sources.extend(compat.input_sources(gm))
        named.extend(map(compat.source_name, sources))
        return gm.forward

    torch.compile(model, backend=keep)(x)
    (gm,) = inner
    leaf = compat.as_one_call(lambda *args: tuple(gm(*args)))
    found = []

    def inlined(outer, _):
        before = [node.target for node in outer.graph.nodes if node.op == "call_function"]
        assert leaf in before and torch.tanh not in before
        inline_graph(outer, leaf, gm, sources)
        found.append((outer, [compat.source_name(source) for source in compat.naming_sources(outer)]))
        return outer.forward

    given = [{"weight": model[0].weight, "bias": model[0].bias}.get(s.split("'")[-2], x) for s in named]
    loss = torch.compile(lambda scale, *args: (leaf(*args)[0] * scale).sum(), backend=inlined)(torch.tensor(2.0), *given)
    torch.testing.assert_close(loss, (model(x) * 2).sum())
    (outer, names), = found
    calls = [node for node in outer.graph.nodes if node.op.startswith("call")]
    assert [node.meta["example_value"].shape for node in calls] == [(2, 3), (2, 3), (2, 3), ()]
    assert all("nn_module_stack" in node.meta for node in calls[:2])
    assert {*named} <= {*names}
