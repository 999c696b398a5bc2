"""Key of a Dynamo graph in the graph cache: equal for graphs that are traced, planned and rewritten in the same way."""
from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from hpml_compiler.compile.inputs.graph_inputs import GraphInputs
from hpml_compiler.options import Options
from hpml_compiler.planner.graph.memory_budget import StepContext
from hpml_compiler.plans.cache import plan_database
from hpml_compiler.runtime.placements.single_rank_placement import owner_of
from passes import compat
from passes.graph.fx_nodes import memory_of
from passes.graph.graph_signature import GraphInput
from passes.hardware.cluster import Cluster
from passes.pass_result import attribute_of
from passes.serialization.extension_fingerprint import extension_fingerprint_of

_MODULES = ("torch", "builtins", "_operator", "operator", "math")
_CONSTANTS = (int, float, complex, bool, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
              type(None), type(...))
_CALLS_OF_GRAPHS = ("tag_activation_checkpoint", "wrap")
"""Operators that call graphs among their arguments. Others refer to kernels of a user by their number in a table."""
LARGEST_CONSTANT_BYTES = 2**20


class Uncacheable(Exception):
    """The text of the graph does not determine its behavior, so it has no cache key."""


@dataclass(frozen=True)
class CacheInputs:
    """Inputs of a Dynamo graph for the cache. values: the script's arguments. examples: full tensors, as they are traced.
    described: the inputs for the planner. details: other facts about them, the same on all ranks."""

    values: Sequence[Any]
    examples: Sequence[Any]
    described: Sequence[GraphInput]
    details: tuple[Any, ...] = ()

    @staticmethod
    def of(inputs: GraphInputs, values: Sequence[Any]) -> CacheInputs:
        """Call this before the graph is traced, since tracing changes the descriptions of its inputs."""
        owners = [owner_of(value) for value in values]
        return CacheInputs(values, inputs.examples, [*inputs.described],
                           (sorted(inputs.rows), sorted(inputs.gathered), inputs.mesh, owners))


def graph_key(gm: GraphModule, given: CacheInputs, options: Options, cluster: Cluster, earlier: Sequence[str],
              sharing: StepContext | None = None) -> str:
    """The graph's key, the same on all ranks that have the same graph. earlier: keys of the session's graphs before it.
    sharing: the state that it shares with them under a memory budget.

    Raises Uncacheable.
    """
    settings = compat.settings_of_tracing()
    if settings is None:
        raise Uncacheable("hooks on saved values")
    plan = options.load_plan()
    return plan_database.digest_of([
        _canonical_text(gm), [_described(x, example) for x, example in zip(given.values, given.examples, strict=True)],
        _sharing(given.examples), given.described, given.details,
        json.dumps(options.model_copy(update={"plan": None}).to_json(), sort_keys=True),
        None if plan is None else plan.model_dump_json(), cluster, *_ranks(),
        list(earlier), None if sharing is None else sharing.fingerprint, settings, platform.node(), platform.processor(),
        os.cpu_count(), torch.get_num_threads(), os.environ.get("HPML_QUICK_PROFILE", "1"),
        torch.cuda.get_device_name() if torch.cuda.is_available() else "", torch.__version__,
        plan_database.planners_code(), extension_fingerprint_of()])


def _ranks() -> tuple[int, str, str]:
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    return (dist.get_world_size(), here, dist.get_backend_config()) if dist.is_initialized() else (1, "", "")


def _canonical_text(gm: GraphModule) -> str:
    if "_checkpoint_context_fn" in gm.meta:
        raise Uncacheable("a checkpointed region has a context_fn")
    if any(size is None for node in gm.graph.find_nodes(op="placeholder") for size in _sizes(node.meta.get("example_value"))):
        raise Uncacheable("an input with symbolic sizes")
    lines = []
    for node in gm.graph.nodes:
        args, kwargs = (map_aggregate(x, _fingerprint) for x in (node.args, node.kwargs))
        lines.append(f"{node.name} = {node.op} {_target(gm, node)} {args} {kwargs}")
    return "\n".join(lines)


def _target(gm: GraphModule, node: Node) -> str:
    """Text for a node's target; raises Uncacheable for code that is not torch's, whose name does not determine its behavior."""
    if node.op in ("placeholder", "output", "call_method"):
        return str(node.target)
    if node.op == "get_attr":
        return _attribute(attribute_of(gm, node))
    if node.op != "call_function":
        raise Uncacheable(f"{node.op} {node.target}")
    target: Any = node.target
    module, name = str(getattr(target, "__module__", "")), getattr(target, "__qualname__", getattr(target, "__name__", ""))
    if isinstance(target, compat.HigherOrderOperator) and target.name() not in _CALLS_OF_GRAPHS:
        raise Uncacheable(f"the operator {target.name()}")
    if isinstance(target, compat.OpOverload | type(torch.ops.aten.add)):
        if str(target).split(".")[0] not in ("aten", "prims", "_c10d_functional"):
            raise Uncacheable(f"the operator {target}")
        return str(target)
    if module.split(".")[0] in _MODULES or getattr(torch, name, None) is target or getattr(
            getattr(target, "__objclass__", None), "__module__", None) in ("torch", "torch._C"):
        return f"{module} {name} {target!r}" if isinstance(target, type) else f"{module} {name}"
    raise Uncacheable(f"the function {module}.{name}")


def _attribute(value: Any) -> str:
    if isinstance(value, GraphModule):
        return "{" + _canonical_text(value) + "}"
    if type(value) is torch.Tensor and value.device.type == "cpu" and not compat.is_fake(value) and (
            value.numel() * value.element_size() <= LARGEST_CONSTANT_BYTES):
        return hashlib.sha256(repr((value.dtype, value.shape, value.tolist())).encode()).hexdigest()
    raise Uncacheable(f"a constant of type {type(value).__name__}")


def _fingerprint(x: Any) -> Any:
    if isinstance(x, Node):
        return f"%{x.name}"
    if isinstance(x, _CONSTANTS):
        return repr(x)
    if isinstance(x, torch.SymInt) and (number := compat.static_int(x)) is not None:
        return repr(number)
    raise Uncacheable(f"an argument of type {type(x).__name__}")


def _sharing(examples: Sequence[Any]) -> list[int]:
    """For each input, the first one that shares its memory: AOTAutograd traces aliases otherwise if the graph mutates one."""
    memory = [memory_of(example) for example in examples]
    return [k if each is None else memory.index(each) for k, each in enumerate(memory)]


def _described(given: Any, example: Any) -> tuple[Any, ...]:
    """given: an argument of the script. example: the full tensor, as it is traced; its sizes are guarded on."""
    if isinstance(example, int | torch.SymInt) and (number := compat.static_int(example)) is not None:
        return type(given).__name__, number
    if not isinstance(given, torch.Tensor) or not isinstance(example, torch.Tensor) or example.layout is not torch.strided:
        raise Uncacheable(f"an input of type {type(given).__name__}")
    return (example.ndim, _sizes(example), example.dtype, example.device, type(given).__name__, given.requires_grad,
            given.is_leaf, example.is_conj(), example.is_neg(), given.is_inference())


def _sizes(value: Any) -> list[int | None]:
    """Sizes, strides and offset of a tensor; None for those that are not constant."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return []
    return [compat.static_int(size) for size in (*value.shape, *value.stride(), value.storage_offset())]
