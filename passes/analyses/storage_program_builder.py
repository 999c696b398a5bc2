"""Build the storage program (`passes.simulation.memory.storage_program`) of the joint graph that one rank runs."""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from passes.analyses.flops import FLOPS
from passes.analyses.inductor_fusion import is_costly, is_fusing, is_inlined, scratch_bytes
from passes.annotations import read, write
from passes.base import AnalysisPass
from passes.checkpointing.checkpoint_keys import STORAGE_PROGRAM
from passes.checkpointing.layers.layer_folding import fold_layers
from passes.checkpointing.pinned_recomputation import Pins, pin_recomputation
from passes.cost_model.cost_terms import Kernel, Prices, copy, price
from passes.graph.fx_nodes import BACKWARD_ON_PURPOSE, WAIT, is_collective, memory_of
from passes.graph.graph_signature import input_position
from passes.graph.module_blocks import assign_blocks
from passes.graph.user_checkpointing import UserPolicy, user_policy_of
from passes.json_records import FrozenMap
from passes.op_rules.call_rules import spec_of
from passes.op_rules.opaque_calls import leaves_of
from passes.op_rules.recomputable import is_recomputable, uses_rng
from passes.op_rules.rule_table import operator_of, packet_name
from passes.registry import register
from passes.simulation.memory.storage_program import Microbatches, ProgramOp, Storage, StorageProgram

LEAST_OFFLOADED_BYTES = 4096
RECEIVE, SEND = "receive", "send"
"""Names of operations of a pipeline stage that its graph does not have."""
INLINED_SHARE = 0.25
"""Cost of computing a result inside another kernel, as a fraction of writing it."""


@register
@dataclass(frozen=True)
class BuildStorageProgram(AnalysisPass):
    """Writes `STORAGE_PROGRAM`. forward_outputs: how many of the outputs are forward's. prices: of the device; times are 0
    without. offload_us: what moving so many bytes out of the device's memory and back takes; None where that is not to be.
    device: the type of what runs the graph, "" if that is where its tensors are, as they were traced. fuses: whether what
    compiles the graph computes light operations in the kernels of their readers. written: positions, or names, of the inputs
    that each call changes when forward is over: what was computed from one cannot be computed again. axis_of: number of the
    mesh axis by name of the process group, for the time of collectives; one of another group is never run again. lists: blocks
    of the graph that stand for `layers` layers, of each list of them (`passes.checkpointing.layers`). microbatches: what
    others of these hold meanwhile, where the graph is what each of them runs. received: names of inputs that a pipeline stage
    receives for each microbatch; None if the graph is not that of a stage, whose outputs are sent on or collected. recompute,
    gathers_again: see `pin_recomputation`."""

    name = "build_storage_program"
    requires = (FLOPS,)
    provides = (STORAGE_PROGRAM,)

    forward_outputs: int = 0
    prices: Prices | None = None
    fuses: bool = True
    written: frozenset[int | str] = frozenset()
    axis_of: FrozenMap[str, int] = FrozenMap()
    offload_us: Callable[[int], float] | None = None
    device: str = ""
    lists: tuple[tuple[str, ...], ...] = ()
    layers: int = 0
    microbatches: Microbatches = Microbatches()
    received: frozenset[str] | None = None
    recompute: Pins = ()
    gathers_again: bool = False

    def run(self, graph_module: GraphModule) -> None:
        program = replace(_StorageProgramReader(graph_module, self).program(), microbatches=self.microbatches)
        program = pin_recomputation(program, self.recompute, self.received is not None, self.gathers_again)
        write(STORAGE_PROGRAM, graph_module, fold_layers(program, self.lists, self.layers) if self.lists else program)


class _StorageProgramReader:
    def __init__(self, gm: GraphModule, options: BuildStorageProgram):
        self.gm, self.forward_outputs = gm, options.forward_outputs
        self.prices, self.fuses, self.written = options.prices, options.fuses, options.written
        self.axis_of = options.axis_of
        self.offload_us, self.device, self.received = options.offload_us, options.device, options.received
        self.changed: set[int] = set()  # storages that are mutated after forward
        self.storages: list[Storage] = []
        self.runs: list[ProgramOp] = []
        self.number: dict[int, int] = {}  # index of each storage, by memory
        self.bases: list[str] = []  # for each storage, the node that is saved for it, of which views are made
        self.said: list[UserPolicy] = []  # for each storage, the script's policy for it or for a view of it
        self.backward: set[Node] = set()
        self.blocks = assign_blocks(gm)

    def program(self) -> StorageProgram:
        for node in self.gm.graph.nodes:
            if node.op == "placeholder" or node.op == "get_attr":
                self._given(node)
            elif node.op == "call_function":
                self._call(node)
        outputs = list(self.gm.graph.output_node().args[0])
        returned = frozenset(self._numbers(outputs[: self.forward_outputs]))
        gradients = frozenset(self._numbers(outputs[self.forward_outputs:]))
        there = {s for s, storage in enumerate(self.storages) if storage.input_phase == "forward"}
        if self.received is not None:  # nobody has them until backward: they are sent on, or collected, when forward is over
            self.runs.append(ProgramOp(SEND, False, 0.0, tuple(returned - there), ()))
            returned = frozenset[int]()
        named = tuple(replace(storage, name=base, pinned=said)
                      for storage, base, said in zip(self.storages, self.bases, self.said, strict=True))
        return StorageProgram(tuple(self.runs), named, returned - there, gradients - there)

    def _numbers(self, values: Any) -> Iterator[int]:
        for node in values:
            if isinstance(node, Node):
                for _, leaf in leaves_of(node.meta.get("val")):
                    if (where := memory_of(leaf)) is not None and where in self.number:
                        yield self.number[where]

    def _given(self, node: Node) -> None:
        tangent = node.op == "placeholder" and "tangent" in str(node.target)
        if tangent:
            self.backward.add(node)
        where = memory_of(node)
        if where is not None and where not in self.number:
            self.number[where] = len(self.storages)
            received = self.received is not None and node.name in self.received
            maker = len(self.runs) if received else None
            given = "" if received else "backward" if tangent else "forward"
            self.storages.append(Storage(node.name, _nbytes(node.meta["val"]), maker, given))
            if received:
                self.runs.append(ProgramOp(f"{RECEIVE} {node.name}", False, 0.0, (), (self.number[where],), repeatable=False))
            self.bases.append(node.name)
            self.said.append("")
            if input_position(node) in self.written or node.name in self.written:
                self.changed.add(self.number[where])

    def _call(self, node: Node) -> None:
        if node.meta.get("partitioner_tag") == BACKWARD_ON_PURPOSE or any(x in self.backward for x in node.all_input_nodes):
            self.backward.add(node)
        self._place(node)
        if node not in self.backward and user_policy_of(node) == "keep":
            for number in self._numbers([node]):
                self.said[number] = "keep"

    def _place(self, node: Node) -> None:
        """Add new storages, and the op that writes them."""
        reads = tuple(dict.fromkeys(self._numbers(node.all_input_nodes)))
        if node.target is operator.getitem:
            for number in self._numbers([node]):
                self.bases[number] = self.bases[number] or node.name
            return
        leaves = [leaf for _, leaf in leaves_of(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]
        if node.target is WAIT:  # the result of a wait is that of the collective
            (leaf,) = leaves
            self.number.setdefault(memory_of(leaf), reads[0])
            self.bases[reads[0]] = node.name
            maker = self.storages[reads[0]].maker
            if maker is not None and self.runs[maker].workspace_bytes:
                self.runs.append(
                    ProgramOp(node.name, node in self.backward, 0.0, reads, (), block=self.blocks[node], waits_for=maker))
            return
        if operator_of(node.target).view and reads:  # passes that replace its base leave its memory unchanged
            for leaf in leaves:
                self.number.setdefault(memory_of(leaf), reads[0])
            return
        new = {memory_of(leaf): leaf for leaf in leaves if memory_of(leaf) not in self.number}
        if leaves and not new:
            return  # a view, too
        makes = []
        pointwise, fusing = self.fuses and is_inlined(node.target), self.fuses and is_fusing(node)
        for where, leaf in new.items():
            self.number[where] = len(self.storages)
            makes.append(len(self.storages))
            self.bases.append(node.name if isinstance(node.meta["val"], torch.Tensor) else "")
            self.said.append(self._said(node, reads))
            self.storages.append(Storage(
                "", _nbytes(leaf), len(self.runs), "", self._save_us(leaf, pointwise), self._offload_us(leaf),
                gathered=self._gathers_inputs(node, reads)))
        self.runs.append(ProgramOp(
            node.name, node in self.backward, self._us(node, leaves, pointwise), reads, tuple(makes),
            self._is_repeatable(node) and not self.changed.intersection(reads), pointwise, fusing,
            pointwise and (self.device or leaves[0].device.type) == "cpu" and is_costly(node.target), self.blocks[node],
            _workspace(node, leaves, self.device), "reduce_scatter" in packet_name(node.target),
            scratch_bytes=scratch_bytes(node),
            multiplies_activations="bmm" in packet_name(node.target) and not any(self.storages[s].input_phase for s in reads),
            of_backward=node.meta.get("partitioner_tag") == "is_backward", draws=uses_rng(node),
            seeded=packet_name(node.target) in ("random_at", "inductor_random")))

    def _gathers_inputs(self, node: Node, reads: tuple[int, ...]) -> bool:
        return "all_gather" in packet_name(node.target) and all(self.storages[s].input_phase for s in reads)

    def _is_repeatable(self, node: Node) -> bool:
        return is_recomputable(node) and (
            not is_collective(node.target) or packet_name(node.target) in COLLECTIVES and _group(node) in self.axis_of)

    def _said(self, node: Node, reads: tuple[int, ...]) -> UserPolicy:
        """Backward results computed from recomputed values are recomputed, too: they may need no gradient, as 1 - tanh²
        does."""
        if node in self.backward:
            return ""
        derived = node.meta.get("partitioner_tag") == "is_backward" and any(self.said[s] == "again" for s in reads)
        return user_policy_of(node) or ("again" if derived else "")

    def _us(self, node: Node, leaves: list[torch.Tensor], pointwise: bool) -> float:
        """Time of a call. A heavy call is a kernel by itself. A light one that is inlined only adds arithmetic to its readers'
        kernels; any other is a pass over its operands."""
        if self.prices is None or not leaves:
            return 0.0
        if is_collective(node.target):
            return self._collective_us(node, leaves) if self._is_repeatable(node) else 0.0
        operands = [x.meta["val"] for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)]
        nbytes = float(sum(map(_nbytes, operands)) + sum(map(_nbytes, leaves)))
        if operator_of(node.target).heavy:
            kernel = Kernel(read(FLOPS, node), nbytes, spec_of(leaves[0]).dtype, operator_of(node.target).kind)
            return float(price(kernel, self.prices))
        if pointwise:
            nbytes = INLINED_SHARE * sum(map(_nbytes, leaves))
        return float(copy(nbytes, self.prices) - copy(0.0, self.prices))

    def _collective_us(self, node: Node, leaves: list[torch.Tensor]) -> float:
        kind = COLLECTIVES[packet_name(node.target)]
        moved = sum(map(_nbytes, leaves)) if kind == "all_gather" else _nbytes(node.args[0].meta["val"])
        return float(self.prices.collective(kind, self.axis_of[_group(node)], moved))

    def _save_us(self, leaf: torch.Tensor, pointwise: bool) -> float:
        """Time of reading it in backward; and of writing it, if it would otherwise stay inside a kernel."""
        if self.prices is None:
            return 0.0
        return float((copy(_nbytes(leaf), self.prices) - copy(0.0, self.prices)) * (2 if pointwise else 1))

    def _offload_us(self, leaf: torch.Tensor) -> float:
        """Finite for a storage that is large enough to be worth a copy."""
        nbytes = leaf.numel() * leaf.element_size()
        if self.offload_us is None or nbytes < LEAST_OFFLOADED_BYTES or nbytes != _nbytes(leaf):
            return math.inf
        return self.offload_us(nbytes)


COLLECTIVES = {"all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
               "all_gather_into_tensor_coalesced": "all_gather", "all_to_all_single": "all_to_all"}
"""Names, in prices, of the functional collectives that the rewrite inserts."""


def _workspace(node: Node, leaves: list[torch.Tensor], device: str) -> int:
    """Memory of a collective besides its result. gloo, the CPU backend, gathers into a buffer that it copies from,
    and reduces a copy of the scattered operand, which its thread frees at the next collective, unlike the buffer (measured,
    torch 2.13); NCCL has its buffers from the start."""
    if not is_collective(node.target) or not leaves or (device or leaves[0].device.type) != "cpu":
        return 0
    name = packet_name(node.target)
    if "all_gather" in name:  # a coalesced one also concatenates its operands
        sent = [x.meta["val"] for x in node.all_input_nodes] if len(leaves) > 1 else []
        return sum(map(_nbytes, [*leaves, *sent]))
    return _nbytes(node.args[0].meta["val"]) if "reduce_scatter" in name else 0


def _group(node: Node) -> str:
    """The name of a collective's process group, which is its last argument."""
    return str(node.args[-1])


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes of the underlying storage, as far as the tensor itself reaches."""
    if not tensor.numel():
        return 0
    reach = 1 + sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride()))
    return int(reach) * tensor.element_size()
