"""Plans of a small GPT, written by hand as a solver would: the input of the tests of plans and of their pictures.

And the plan of a run on ranks."""
from __future__ import annotations

import torch.distributed as dist

from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.plans.schema import (
    GraphPlan,
    HopPlan,
    MemoryBytes,
    MeshAttempt,
    OperationPlan,
    ParameterPlan,
    PredictedCost,
    Redistribution,
    ReplicatedValue,
    SolverReport,
)
from hpml_compiler.session import session

MESH = {"dp": 2, "tp": 4}
DIMS = "8 batch, 16 sequence, 64 features"
ROWS, HIDDEN = ["S(0)", "R"], ["S(0)", "S(2)"]


def plan_of_ranks() -> Plan:
    """The plan of the last graphs, made on rank 0 and sent to the others: it takes seconds, and is the same on all ranks."""
    sent: list[Plan | None] = [session.last_plan() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(sent)
    (plan,) = sent
    assert plan is not None
    return plan


def parameter(shape: list[int], placements: list[str], dims: str = "") -> ParameterPlan:
    whole, held = 4, 4
    for size in shape:
        whole, held = whole * size, held * size
    for axis, placement in zip(MESH.values(), placements, strict=False):
        held //= axis if placement.startswith("S") else 1
    return ParameterPlan(shape=shape, dtype="float32", placements=placements, trainable=True, bytes_whole=whole,
                         bytes_per_device=held, dims=dims)


def operation(op: str, block: str, class_id: int | str, inputs, outputs, us: float, sources, backward=False):
    heavy = op.split(".")[1] in ("fc", "proj", "mm")
    return OperationPlan(op=op, block=block, backward=backward, class_id=class_id, inputs=inputs, outputs=outputs,
                         predicted_us=us, sources=sources, kind="matmul" if heavy else "pointwise",
                         dims=[DIMS] * len(outputs))


def all_reduce(value: str, consumer: str, axis: str, multiplicity: int = 1, source=("S(0)", "P"), target=("S(0)", "R")):
    hop = HopPlan(collective="all_reduce", axis=axis, bytes=1024, predicted_us=5.0)
    return Redistribution(value=value, shape=[8, 16, 64], dtype="float32", consumer=consumer, source=source,
                          target=target, hops=[hop], multiplicity=multiplicity)


def gpt_graph(layers: int = 3, listed: int | None = None, column: str = "S(0)", name: str = "GPT") -> GraphPlan:
    """Embedding, `layers` feed-forward blocks split column/row over tp, head left whole; loss and its backward.

    listed: how many layers' operations the graph lists; the last of them stands for all the rest.
    """
    listed = layers if listed is None else listed
    rest = layers - listed + 1
    up = {"S(0)": HIDDEN, "R": ROWS}[column]
    parameters = {"wte.weight": parameter([100, 64], ["R", "R"], "100 vocabulary, 64 features")}
    for i in range(layers):
        parameters[f"h.{i}.ln.weight"] = parameter([64], ["R", "R"], "64 features")
        parameters[f"h.{i}.fc.weight"] = parameter([256, 64], ["R", column], "256 columns, 64 rows")
        parameters[f"h.{i}.proj.weight"] = parameter([64, 256], ["R", "S(1)" if column == "S(0)" else "R"],
                                                      "64 columns, 256 rows")
    operations = {"embedding": operation("aten.embedding", "wte", 0, [["R", "R"]], [ROWS], 2.0, ["wte.weight"])}
    moves, value = [], "embedding"
    for i in range(listed):
        times = rest if i == listed - 1 else 1
        c = "last" if times > 1 else "each"
        for op, inputs, outputs, us, sources in (
            ("ln", [ROWS, ["R", "R"]], [ROWS], 1.0, [value, f"h.{i}.ln.weight"]),
            ("fc", [ROWS, ["R", column]], [up], 10.0, [f"ln_{i}", f"h.{i}.fc.weight"]),
            ("gelu", [up], [up], 1.0, [f"fc_{i}"]),
            ("proj", [up, ["R", "S(1)"]], [["S(0)", "P"]], 10.0, [f"gelu_{i}", f"h.{i}.proj.weight"]),
            ("add", [ROWS, ROWS], [ROWS], 1.0, [value, f"proj_{i}"]),
        ):
            block = f"h.{i}" + ("" if op == "add" else f".{op}")
            operations[f"{op}_{i}"] = operation(f"aten.{op}", block, f"{op}_{c}", inputs, outputs, us, sources)
        moves.append(all_reduce(f"proj_{i}", f"add_{i}", "tp", times))
        value = f"add_{i}"
    operations["head"] = operation("aten.mm", "", "head", [ROWS, ["R", "R"]], [ROWS], 20.0, [value, "wte.weight"])
    for i in reversed(range(listed)):
        operations[f"proj_grad_{i}"] = operation(
            "aten.mm", f"h.{i}.proj", "grad_last" if i == listed - 1 and rest > 1 else "grad_each",
            [HIDDEN, ROWS], [["P", "S(1)"]], 10.0, [f"gelu_{i}", "head"], backward=True)
        times = rest if i == listed - 1 else 1
        moves.append(all_reduce(f"proj_grad_{i}", "", "dp", times, ("P", "S(1)"), ("R", "S(1)")))
    multiplicity = {each: rest for each in ("ln_last", "fc_last", "gelu_last", "proj_last", "add_last", "grad_last")}
    return GraphPlan(
        graph_hash=f"{name}-{layers}-hash", name=name, training=True, mesh=MESH, parameters=parameters,
        operations=operations, redistributions=moves,
        left_whole=[ReplicatedValue(name="head", reason="dim 1 (100) is not a multiple of tp=4; sort has no rule")],
        predicted=PredictedCost(step_time_us=22.0 + 48.0 * layers, compute_us=22.0 + 33.0 * layers,
                                communication_us=10.0 * layers, optimizer_us=5.0 * layers),
        memory=MemoryBytes(parameters=1000, gradients=1000, optimizer=2000, activations=5 * 2**20, peak=6 * 2**20),
        solver=SolverReport(status="optimal", cost=22.0 + 48.0 * layers, bound=21.9 + 48.0 * layers,
                            gap=0.001, variables=300, binaries=40, constraints=70, seconds=0.2, solver="HiGHS"),
        seconds={"trace": 1.0, "annotate": 0.5, "solve": 0.25, "rewrite": 0.0},
        multiplicity=multiplicity if rest > 1 else {},
    )


def gpt_plan(layers: int = 3, listed: int | None = None, column: str = "S(0)") -> Plan:
    return Plan(torch_version="2.13.0+cpu", world_size=8, cluster="1x8:h100-80g", mesh=MESH,
                options={"memory_budget": 2**30}, graphs=[gpt_graph(layers, listed, column)],
                rejected=[MeshAttempt(mesh={"dp": 8}, cost=400.0, bound=None, reason="27% slower")])
