"""Explain the placement of a node or parameter: its placements in words, the redistributions around it and its costs."""
from __future__ import annotations

import difflib
from collections.abc import Iterator

from hpml_compiler.plans.content import PlanContent
from hpml_compiler.plans.schema import ROOT, GraphPlan, HopPlan, OperationPlan, ParameterPlan, Redistribution
from hpml_compiler.visualize.description.describe_plan import loss_words
from hpml_compiler.visualize.description.device_grid import device_grid
from hpml_compiler.visualize.description.module_classes import block_path, module_classes, owner_path
from hpml_compiler.visualize.description.placement_words import parameter_words, uses_of, value_words, words_text
from hpml_compiler.visualize.formatting import describe_placements, format_bytes, format_mesh, format_placements, format_us
from hpml_compiler.visualize.grid_views import grid_lines, grid_svg, split_name
from hpml_compiler.visualize.step_explanation import STEP_DECISIONS, explain_step
from passes.errors import BadInput
from passes.op_rules.dim_texts import parse_dims

MOST_USERS = 8


def explain(plan: PlanContent, name: str) -> str:
    """Explain the node or parameter `name` in every graph that has it, or one of STEP_DECISIONS. Raises BadInput with the
    closest names."""
    parts = []
    for graph in plan.graphs:
        lines: list[str] = []
        if name in graph.parameters:
            lines += _parameter(graph, name, graph.parameters[name])
        if name in graph.operations:
            lines += _operation(graph, graph.operations[name])
        if lines:
            lines += _loss(graph, name)
            heading = f"{name} in {graph.name}, mesh {format_mesh(graph.mesh)}"
            parts.append("\n".join([heading, *(f"  {line}" for line in [*lines, *_around(graph, name)])]))
    if not parts and name in STEP_DECISIONS and plan.step_graphs:
        return explain_step(plan, name)
    if not parts:
        raise _unknown(plan, name)
    return "\n\n".join(parts)


def explain_svg(plan: PlanContent, name: str) -> str:
    """The grid of a parameter as it is stored, or of an operation's first result, as SVG. Raises BadInput."""
    for graph in plan.graphs:
        if name in graph.parameters:
            parameter = graph.parameters[name]
            return grid_svg(name, device_grid(parameter.placements, graph.mesh), parameter.dims)
        if name in graph.operations and graph.operations[name].outputs:
            operation = graph.operations[name]
            return grid_svg(name, device_grid(operation.outputs[0], graph.mesh), operation.dims[0] if operation.dims else "")
    raise _unknown(plan, name)


def _parameter(graph: GraphPlan, name: str, parameter: ParameterPlan) -> Iterator[str]:
    yield (f"{'trainable' if parameter.trainable else 'frozen'} parameter, {parameter.dtype}{list(parameter.shape)}, "
           f"{format_bytes(parameter.bytes_whole)} unsharded, {format_bytes(parameter.bytes_per_device)} per device")
    yield "stored as"
    yield from (f"  {line}" for line in describe_placements(parameter.placements, graph.mesh) or ["one device"])
    stand_in = _stand_in(graph, name)
    uses = uses_of(graph)
    yield f"in words, stored as {words_text(value_words(parameter.placements, parameter.dims, graph.mesh))}"
    if used := uses.get(stand_in or name):
        words = parameter_words(graph, name, {name: used})
        yield f"in forward, used as {words_text(words)}"
    yield from _why_whole(graph, parameter)
    yield "the devices have"
    yield from (f"  {line}" for line in grid_lines(device_grid(parameter.placements, graph.mesh), parameter.dims))
    if stand_in:
        yield f"the operations of its block are not listed; see {stand_in} of an equal block"
        yield from _gradient(graph, parameter)
        return
    yield from _gradient(graph, parameter)
    users = [each for each, operation in graph.operations.items() if name in operation.sources]
    if users:
        more = f" and {len(users) - MOST_USERS} more" if len(users) > MOST_USERS else ""
        yield f"read by {', '.join(users[:MOST_USERS])}{more}"


def _why_whole(graph: GraphPlan, parameter: ParameterPlan) -> Iterator[str]:
    """For each axis that does not split a parameter: sizes that stand in the way, or dims that the plan leaves whole."""
    dims = parse_dims(parameter.dims) or tuple(((size, ""),) for size in parameter.shape)
    for (axis, size), place in zip(graph.mesh.items(), parameter.placements):
        if size == 1 or place != "R" or (axis == "pp" and graph.pipeline is not None):
            continue
        fit = [split_name(parameter.dims, dim, factor) for dim, row in enumerate(dims) for factor, (n, _) in enumerate(row)
               if n % size == 0]
        if fit:
            yield f"not split over {axis}, although its {' or '.join(dict.fromkeys(fit))} could be: the plan keeps it whole"
        else:
            sizes = ", ".join(" x ".join(str(n) for n, _ in row) for row in dims)
            yield f"not split over {axis}: {size} divides none of its sizes ({sizes})"


def _gradient(graph: GraphPlan, parameter: ParameterPlan) -> Iterator[str]:
    """Lines on the parameter's gradient: its placement when computed, and the collectives that bring it to the stored one."""
    if not parameter.gradient:
        return
    names, made = [parameter.gradient], graph.operations.get(parameter.gradient)
    while made is not None and made.kind == "view" and len(made.sources) == 1:  # a reduction may lie before the views
        names.append(made.sources[0])
        made = graph.operations.get(made.sources[0])
    moves = [move for move in graph.redistributions
             if move.value in names and (not move.consumer or move.consumer in names) and move.hops]
    if not moves:
        yield f"its gradient {parameter.gradient} needs no reduction"
    for move in moves:
        hops = ", then ".join(f"{hop.collective} over {hop.axis}={graph.mesh[hop.axis]} ({_sent(hop)}, "
                               f"{format_us(hop.predicted_us)})" for hop in move.hops)
        total = f", {format_us(sum(hop.predicted_us for hop in move.hops))} in total" if len(move.hops) > 1 else ""
        yield (f"its gradient {move.value} is computed as {format_placements(move.source, graph.mesh)} and redistributed to "
               f"{format_placements(move.target, graph.mesh)} by {hops}{total}")


def _sent(hop: HopPlan) -> str:
    rest = f" in {hop.compression} instead of {format_bytes(hop.whole_bytes)}" if hop.compression else ""
    return f"{format_bytes(hop.bytes)}{rest}"


def _stand_in(graph: GraphPlan, name: str) -> str:
    """The listed parameter of an equal block that represents `name`; "" if the operations of its own block are listed."""
    path = block_path(owner_path(name))
    for each in module_classes(graph):
        for block in each.blocks:
            if block.path == path and each.blocks[0].operations and not block.operations:
                return each.blocks[0].path + name[len(path):]
    return ""


def _operation(graph: GraphPlan, operation: OperationPlan) -> Iterator[str]:
    runs = graph.runs(operation)
    yield (f"{operation.op}, {'backward' if operation.backward else 'forward'}, in {operation.block or ROOT}, "
           f"class {operation.class_id}")
    yield (f"predicted {format_us(operation.predicted_us)} per run, {runs} run{'s' if runs > 1 else ''} per step: "
           f"{format_us(operation.predicted_us * runs)} of {format_us(graph.predicted.compute_us)} compute")
    for position, output in enumerate(operation.outputs):
        yield f"placement of output {position}" if len(operation.outputs) > 1 else "placement of its output"
        yield from (f"  {line}" for line in describe_placements(output, graph.mesh) or ["not a tensor, or one device"])
        if output and position < len(operation.dims):
            yield f"  in words {words_text(value_words(output, operation.dims[position], graph.mesh))}"
    for position, placements in enumerate(operation.inputs):
        source = f" from {operation.sources[position]}" if position < len(operation.sources) else ""
        yield f"reads input {position}{source} as {format_placements(placements, graph.mesh)}"


def _loss(graph: GraphPlan, name: str) -> Iterator[str]:
    """A line on the chunks of the loss, for its head, parameters that the head reads, and operations outside of any module."""
    found, operation = graph.loss_chunks, graph.operations.get(name)
    if found is None:
        return
    head = graph.operations.get(found.head)
    read = {source for path in _views_before(graph, found.head) for source in graph.operations[path].sources} if head else set()
    if name == found.head or name in read or operation is not None and operation.block == ROOT:
        yield f"the loss is computed {loss_words(found)}"


def _views_before(graph: GraphPlan, name: str) -> list[str]:
    """An operation, and the views that it reads."""
    found = [name]
    for each in found:
        found += [x for x in graph.operations[each].sources if x in graph.operations and graph.operations[x].kind == "view"]
    return found


def _around(graph: GraphPlan, name: str) -> Iterator[str]:
    """Lines on the redistributions before and after `name`, and on the reason if it is left replicated."""
    before = [move for move in graph.redistributions if move.consumer == name]
    after = [move for move in graph.redistributions if move.value == name]
    if not before and not after and not (name in graph.parameters and _stand_in(graph, name)):
        yield ("it is read in its stored placement, without a collective" if name in graph.parameters
               else "no redistribution before or after it")
    yield from (f"before it, {describe_move(move, graph)}" for move in before)
    yield from (f"after it, {describe_move(move, graph)}" for move in after)
    yield from (f"replicated: {left.reason}" for left in graph.left_whole if left.name == name)


def describe_move(move: Redistribution, graph: GraphPlan) -> str:
    """One line on a redistribution: value, source and target placements, collectives and their costs."""
    costs = [f"{format_bytes(hop.bytes)}, {format_us(hop.predicted_us)}" for hop in move.hops]
    hops = ", then ".join(f"{hop.collective} over {hop.axis} ({cost})"
                           for hop, cost in zip(move.hops, costs, strict=True)) or "no collective"
    times = f", {move.multiplicity} times per step" if move.multiplicity > 1 else ""
    return (f"{move.value} {move.dtype}{list(move.shape)} for {move.consumer or 'the output'}: "
            f"{format_placements(move.source, graph.mesh)} to {format_placements(move.target, graph.mesh)} "
            f"by {hops}{times}")


def _unknown(plan: PlanContent, name: str) -> BadInput:
    if not plan.graphs:
        return BadInput(what="the plan has no graphs to explain", where="explain",
                        next_step="make it again with `hpml plan TARGET --save PLAN.json`")
    known = list(dict.fromkeys(each for graph in plan.graphs for each in (*graph.parameters, *graph.operations)))
    parts = [each for each in known if name and name in each]
    close = list(dict.fromkeys([*difflib.get_close_matches(name, known, n=5, cutoff=0.5), *parts]))[:8]
    advice = f"did you mean {', '.join(close)}?" if close else f"name one of {', '.join(known[:8])}, ..."
    return BadInput(what=f"the plan has no node or parameter {name!r}", where="explain",
                    next_step=advice if known else "plan a model that has operations")
