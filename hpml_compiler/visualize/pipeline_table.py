"""Pipeline stages as a table: compute times, memory and sends of each."""
from __future__ import annotations

from rich import box
from rich.table import Table

from hpml_compiler.plans.pipeline_records import PipelinePlan, SentPlan, StagePlan
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.visualize.formatting import format_bytes, format_us
from hpml_compiler.visualize.terminal import as_text


def stage_table(pipe: PipelinePlan) -> Table:
    """Table with a row per stage; times are per microbatch."""
    table = Table(box=box.SIMPLE, title_justify="left", title=(
        f"{len(pipe.stages)} stages on {pipe.ranks} ranks under {pipe.schedule}, {pipe.microbatches} microbatches: "
        f"{format_us(pipe.step_us)} a step, bubble {100 * pipe.bubble:.1f} %"))
    for name in ("stage", "rank", "blocks", "parameters", "forward + backward", "saved x in flight", "sends"):
        table.add_column(name)
    for k, stage in enumerate(pipe.stages):
        table.add_row(
            str(k), str(stage.rank), _blocks(stage), f"{len(stage.parameters)}, {format_bytes(stage.parameter_bytes)}",
            f"{format_us(stage.forward_us)} + {format_us(stage.backward_us)}",
            f"{format_bytes(stage.saved_bytes)} x {stage.in_flight}", "\n".join(map(_sent, stage.sends)))
    return table


def stages_text(graph: GraphPlan) -> str:
    """The stage table as plain text. Raises AssertionError for a graph without a pipeline."""
    assert graph.pipeline is not None, graph.name
    return as_text(stage_table(graph.pipeline))


def stage_labels(pipe: PipelinePlan) -> list[str]:
    """Label of each stage's frame in a drawing; times are per microbatch."""
    return ["\n".join((
        f"stage {k} on rank {stage.rank}: forward {format_us(stage.forward_us)}, backward {format_us(stage.backward_us)}",
        f"peak memory {format_bytes(stage.memory_bytes)}, {stage.in_flight} of {pipe.microbatches} microbatches in flight",
        *(f"sends {_sent(sent)}" for sent in stage.sends))) for k, stage in enumerate(pipe.stages)]


def _blocks(stage: StagePlan) -> str:
    return stage.blocks[0] if len(stage.blocks) == 1 else f"{stage.blocks[0]} to {stage.blocks[-1]}"


def _sent(sent: SentPlan) -> str:
    return f"{sent.value} to the {'previous' if sent.backward else 'next'} stage, {format_bytes(sent.bytes)}"
