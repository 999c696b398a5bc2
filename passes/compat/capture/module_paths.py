"""Canonical module paths in a Dynamo graph, however the `forward` of the model is reached.

Dynamo writes where it found a module: `L['self'].model.layers.3`. Where `forward` is wrapped, as by a decorator that takes
`(*args, **kwargs)`, that is `L['args'][0].model.layers.3`, through a function's closure or a bound method it is longer still,
and torch 2.11 writes `layers.3.forward.args[0].norm` where `forward` is a `functools.partial` of the module.
"""
from __future__ import annotations

import re

from torch.fx import GraphModule

_ROOT = re.compile(r"^([LG]\['\w+'\])((?:\[\w+\]|\['\w+'\])+)")
_ROUNDABOUT = re.compile(r"(?:\.(?!_modules\b)\w+)?(?:\.(?:func|__func__|__wrapped__))*"
                         r"(?:\.__self__|\.__closure__\[\d+\]\.cell_contents)|\.forward\.args\[0\]")


def straighten(gm: GraphModule) -> None:
    """Write the paths in the module stacks of a graph's calls as if each `forward` was a plain method. An index that all
    modules of a variable share is the model's place among arguments; where there are several, the modules are in a list."""
    stacks = [stack for node in gm.graph.nodes if (stack := node.meta.get("nn_module_stack"))]
    paths = {path for stack in stacks for path, _ in stack.values()}
    places: dict[str, set[str]] = {}
    short: dict[str, str] = {}
    for path in paths:
        short[path] = _ROUNDABOUT.sub("", path)
        if root := _ROOT.match(short[path]):
            places.setdefault(root[1], set()).add(root[2])
    for path, straight in short.items():
        root = _ROOT.match(straight)
        if root and len(places[root[1]]) == 1:
            short[path] = root[1] + straight[root.end():]
    if any(path != straight for path, straight in short.items()):
        for node in gm.graph.nodes:
            if stack := node.meta.get("nn_module_stack"):
                node.meta["nn_module_stack"] = {key: (short[path], kind) for key, (path, kind) in stack.items()}
