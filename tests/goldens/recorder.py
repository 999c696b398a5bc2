"""Record the graphs that one rank lowers, the messages that it sends and the plans that it follows."""
from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from hpml_compiler.compile.lower.lowering import Lowering
from hpml_compiler.session import session
from passes.compat import is_fake

COLLECTIVES = ("_c10d_functional", "_dtensor", "hpml")
TIMED = {"seconds", "version", "torch_version", "created", "frame", "solve_s", "time_s"}
"""Fields of plans that differ from run to run, or from release to release."""

Record = dict[str, list[str]]


class Recorder:
    """graphs: half and digest of each graph that was lowered. collectives: operator, shape and group of each call in them.
    sends: shape, dtype and peer of each message between stages. plans: digests of the plans' records."""

    def __init__(self) -> None:
        self.record: Record = {"graphs": [], "collectives": [], "sends": [], "plans": []}

    def lowered(self, half: str, gm: GraphModule) -> None:
        lines = text_of(gm)
        self.record["graphs"].append(f"{half} {len(lines)} {digest_of(lines)}")
        self.record["collectives"] += [f"{half} {line}" for line in collectives_of(gm)]

    def plan_of(self) -> None:
        """Note the plans of the session, if there are any. What is planned only when somebody asks is planned now."""
        current = session.current()
        if current.graphs or current.unplanned:
            for graph in session.last_plan().graphs:
                self.record["plans"].append(digest_of([json.dumps(untimed(graph.model_dump(mode="json")), sort_keys=True)]))


@contextmanager
def recording() -> Iterator[Recorder]:
    """A context in which everything that this process lowers and sends is recorded."""
    recorder = Recorder()
    lower, isend = Lowering._lower, dist.isend

    def lowering(self: Lowering, half: str, gm: GraphModule, inputs: Any, **how: Any) -> Any:
        recorder.lowered(half, gm)
        return lower(self, half, gm, inputs, **how)

    def sending(tensor: torch.Tensor, dst: int | None = None, *args: Any, **kwargs: Any) -> Any:
        recorder.record["sends"].append(f"{tuple(tensor.shape)} {tensor.dtype} to {dst}")
        return isend(tensor, dst, *args, **kwargs)

    with mock.patch.object(Lowering, "_lower", lowering), mock.patch.object(dist, "isend", sending):
        yield recorder


def text_of(gm: GraphModule) -> list[str]:
    """A graph as lines that hold nothing of this process: calls by number, values by shape, strides, dtype and device."""
    numbers = {node: k for k, node in enumerate(gm.graph.nodes)}
    return [_line(gm, node, numbers) for node in gm.graph.nodes]


def collectives_of(gm: GraphModule) -> list[str]:
    found = []
    for node in gm.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "namespace", "") in COLLECTIVES:
            rest = [str(x) for x in (*node.args, *node.kwargs.values()) if not isinstance(x, (Node, list, tuple))]
            found.append(" ".join([str(node.target), *(_described(x.meta.get("val")) for x in node.all_input_nodes), *rest]))
    return found


def digest_of(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def untimed(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: untimed(value) for key, value in content.items() if key not in TIMED}
    return [untimed(item) for item in content] if isinstance(content, list) else content


def _line(gm: GraphModule, node: Node, numbers: dict[Node, int]) -> str:
    def named(given: Any) -> str:
        return re.sub(r" at 0x[0-9a-f]+", "", str(map_aggregate(given, lambda x: _argument(x, numbers))))

    value = _described(node.meta.get("val"))
    if node.op == "get_attr":
        return f"{numbers[node]} constant {_constant(gm, node)} {value}"
    target = "" if node.op in ("placeholder", "output") else _name(node.target)
    return f"{numbers[node]} {node.op} {target} {named(node.args)} {named(dict(node.kwargs))} {value}"


def _name(target: str | Callable[..., Any]) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", "") + " " + str(getattr(target, "_schema", ""))


def _argument(given: Any, numbers: dict[Node, int]) -> Any:
    return f"%{numbers[given]}" if isinstance(given, Node) else given


def _constant(gm: GraphModule, node: Node) -> str:
    value: Any = gm
    for part in str(node.target).split("."):
        value = getattr(value, part)
    if isinstance(value, GraphModule):
        return digest_of(text_of(value))
    if isinstance(value, torch.Tensor) and not is_fake(value):
        return f"{_described(value)} {digest_of([str(value.detach().cpu().tolist())])}"
    return _described(value)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(map(str, value.shape))}{list(map(str, value.stride()))}{value.device.type}"
    return str([_described(each) for each in value]) if isinstance(value, (list, tuple)) else type(value).__name__
