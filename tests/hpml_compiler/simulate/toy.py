"""Hand-made plans of a chain of layers on one axis, with round times, so that timelines can be worked out on paper."""
from __future__ import annotations

from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.plans.schema import (
    GraphPlan,
    HopPlan,
    MemoryBytes,
    OperationPlan,
    ParameterPlan,
    PredictedCost,
    Redistribution,
    SolverReport,
)

FORWARD_US, BACKWARD_US, GATHER_US, REDUCE_US, OPTIMIZER_US = 10.0, 20.0, 4.0, 6.0, 5.0
ROWS, WIDTH = 4, 1024  # a rank's activation: ROWS x WIDTH float32
ACTIVATION_BYTES, WEIGHT_BYTES = ROWS * WIDTH * 4, WIDTH * WIDTH * 4


def chain_plan(layers: int, *, sharded: bool = True, saved: bool = True, listed: int | None = None) -> Plan:
    """`layers` products by a weight, over dp=2: sharded weights are gathered before each use and their gradients
    scattered; else gradients are reduced. listed=1 lists the first layer for all."""
    count = layers if listed is None else listed
    runs = layers // count
    held, place = (WEIGHT_BYTES // 2, ("S(0)",)) if sharded else (WEIGHT_BYTES, ("R",))
    operations, moves = {}, []

    def operation(name, layer, us, sources, backward, nbytes, kept, output):
        operations[name] = OperationPlan(
            op="aten.mm.default", block=f"h.{layer}", backward=backward, class_id=name.rstrip("0123456789"),
            inputs=tuple(("R",) if s.startswith("h.") else ("S(0)",) for s in sources), outputs=((output),),
            predicted_us=us, sources=tuple(sources), kind="matmul", flops=1e6, bytes_moved=float(nbytes),
            result_bytes=(nbytes,), saved=(kept,))

    def gather(weight, consumer):
        if sharded:
            moves.append(move(weight, consumer, "all_gather", GATHER_US, ("S(0)",), ("R",), runs))

    def outside(name, source, backward, nbytes):
        operations[name] = OperationPlan(
            op="toy.free.default", block="(root)", backward=backward, class_id=name, inputs=(("S(0)",),),
            outputs=(("S(0)",),), predicted_us=0.0, sources=(source,), kind="view", result_bytes=(nbytes,), saved=(False,))

    outside("embedded", "x", False, ACTIVATION_BYTES)
    for layer in range(count):
        weight = f"h.{layer}.weight"
        operation(f"fwd{layer}", layer, FORWARD_US, [f"fwd{layer - 1}" if layer else "embedded", weight], False,
                  ACTIVATION_BYTES, saved, ("S(0)",))
        gather(weight, f"fwd{layer}")
    outside("loss", f"fwd{count - 1}", False, 0)
    outside("tangent", "seed", True, ACTIVATION_BYTES)
    for layer in reversed(range(count)):
        weight = f"h.{layer}.weight"
        upper = f"bwd{layer + 1}" if layer + 1 < count else "tangent"
        operation(f"bwd{layer}", layer, BACKWARD_US / 2, [upper, weight, f"fwd{layer}"], True, ACTIVATION_BYTES, False,
                  ("S(0)",))
        gather(weight, f"bwd{layer}")
        operation(f"grad{layer}", layer, BACKWARD_US / 2, [upper, f"fwd{layer}"], True, WEIGHT_BYTES, False, ("P",))
        moves.append(move(f"grad{layer}", "", "reduce_scatter" if sharded else "all_reduce", REDUCE_US, ("P",),
                          place, runs))
    outside("tail", "bwd0", True, 0)
    communication = layers * (REDUCE_US + (2 * GATHER_US if sharded else 0.0))
    compute = layers * (FORWARD_US + BACKWARD_US)
    graph = GraphPlan(
        graph_hash="toy", name="toy", training=True, mesh={"dp": 2},
        parameters={f"h.{k}.weight": ParameterPlan(shape=(WIDTH, WIDTH), dtype="float32", placements=place, trainable=True,
                                                   bytes_whole=WEIGHT_BYTES, bytes_per_device=held) for k in range(layers)},
        operations=operations, redistributions=tuple(moves), left_whole=(),
        predicted=PredictedCost(step_time_us=compute + communication + OPTIMIZER_US, compute_us=compute,
                                communication_us=communication, optimizer_us=OPTIMIZER_US),
        memory=MemoryBytes(parameters=layers * held, gradients=layers * held, optimizer=2 * layers * held, activations=0,
                           peak=4 * layers * held),
        solver=SolverReport(status="optimal", cost=None, bound=None, gap=None, variables=0, binaries=0,
                            constraints=0, seconds=0.0, solver="none"),
        seconds={},
        multiplicity={o.class_id: runs for o in operations.values() if o.block != "(root)"} if runs > 1 else {},
    )
    return Plan(torch_version="2.13.0", world_size=2, cluster="1x2:h100-80g", mesh={"dp": 2}, options={}, graphs=(graph,))


def move(value, consumer, collective, us, source, target, runs):
    hop = HopPlan(collective=collective, axis="dp", bytes=WEIGHT_BYTES, predicted_us=us)
    return Redistribution(value=value, shape=(WIDTH, WIDTH), dtype="float32", consumer=consumer, source=source,
                          target=target, hops=(hop,), multiplicity=runs)
