"""Facts about a compiled graph that a run's figures need: rows and tokens of its inputs, and FLOPs of a call."""
from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from hpml_compiler.plans.schema import GraphPlan
from passes import compat
from passes.graph.graph_signature import graph_inputs

log = logging.getLogger("hpml")
FORWARD_AND_BACKWARD = 3.0
"""FLOPs of a training call over those of its forward: each matrix product has two in backward."""


@dataclass(frozen=True)
class GraphFacts:
    """training: a gradient is computed. rows, tokens: positions of the inputs whose dim 0, and whose elements, are counted;
    None without one. flops: of one training call on this device, for `example_rows`. dtype: of most parameters, or
    of autocast."""

    training: bool
    rows: int | None = None
    tokens: int | None = None
    flops: float = 0.0
    example_rows: int = 0
    dtype: str = "float32"

    def ran(self, args: Sequence[Any]) -> tuple[float, float, float]:
        """Samples, tokens and FLOPs of a call."""
        samples = 0 if self.rows is None else int(args[self.rows].shape[0])
        tokens = 0 if self.tokens is None else int(args[self.tokens].shape[0]) * int(args[self.tokens].shape[1])
        scale = samples / self.example_rows if self.example_rows else 1.0
        return samples, tokens, self.flops * scale

    def planned(self, plans: Sequence[GraphPlan]) -> GraphFacts:
        """The same with the FLOPs of these plans, of one device, if they train."""
        flops = sum(each.flops * plan.runs(each) for plan in plans if plan.training for each in plan.operations.values())
        return replace(self, flops=flops) if flops else self


def facts_of(gm: GraphModule, given: Sequence[Any], world: int) -> GraphFacts:
    """Facts of a graph as Dynamo traced it. Its FLOPs are those of its forward on fake tensors, in equal shares."""
    training = torch.is_grad_enabled()
    kinds = [each.kind for each in graph_inputs(gm, list(given), ())]
    batch = [k for k, (kind, value) in enumerate(zip(kinds, given))
             if kind == "batch" and isinstance(value, torch.Tensor) and value.dim()]
    rows = next(iter(batch), None)
    tokens = next((k for k in batch if given[k].dim() == 2 and given[k].dtype in (torch.int32, torch.int64)), None)
    weights = Counter(str(x.dtype).removeprefix("torch.") for x in given if isinstance(x, torch.nn.Parameter))
    kind = next((x.device.type for x in given if isinstance(x, torch.Tensor)), "cpu")
    dtype = str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if torch.is_autocast_enabled(kind) else \
        weights.most_common(1)[0][0] if weights else "float32"
    flops = FORWARD_AND_BACKWARD * _forward_flops(gm) / world if training else 0.0
    return GraphFacts(training, rows, tokens, flops, 0 if rows is None else int(given[rows].shape[0]), dtype)


def _forward_flops(gm: GraphModule) -> float:
    """FLOPs of a graph's forward; 0.0 if it cannot run on its fake tensors."""
    fakes = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    mode = next((x.fake_mode for x in fakes if compat.is_fake(x)), None)
    if mode is None:
        return 0.0
    counter = FlopCounterMode(display=False, custom_mapping={
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops})
    try:
        with mode, torch.no_grad(), counter:
            Interpreter(gm).run(*fakes)
        return float(counter.get_total_flops())
    except Exception as error:  # such as a tensor class that has no fakes: the run has no MFU
        log.debug("the FLOPs of a graph are unknown: %s", error)
        return 0.0


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)
