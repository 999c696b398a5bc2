"""`hpml explain`: why a node or parameter is placed as it is; cost formulas of a step; its cost at other sizes."""
from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hpml_compiler.cli_target import load_target
from hpml_compiler.commands._at_work import at_work
from hpml_compiler.commands.plan import checked_options, peak_of
from hpml_compiler.visualize.picture_files import picture_format
from passes.errors import BadInput, shortened
from passes.filesystem.text_files import check_writable, write_file
from passes.json_records import read_json

MOST_DIGITS = 12  # of a size: formulas sum products of several sizes


def register(app: typer.Typer) -> None:
    app.command("explain")(explain)


def explain(
    target: Annotated[str, typer.Argument(
        metavar="PLAN.json|FORMULAS.json|TARGET",
        help="A plan that `hpml plan --save` wrote, formulas that --save wrote, or FILE.py:FUNCTION as for `hpml plan`.")],
    name: Annotated[str | None, typer.Argument(
        help="A parameter, as model.layers.0.weight, a node of the graph, stages, microbatches or schedule; with --grow or "
             "--what-if also a block.")] = None,
    grow: Annotated[bool, typer.Option("--grow", help="Show cost formulas over batch, sequence and axis sizes.")] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZE=N", help="Show time and bytes at another size (batch=64, dp=4); repeatable."),
    ] = None,
    dim: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=N", help="Give input dims of size N this name; by default, batch and sequence."),
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="For a TARGET: NODESxDEVICES:DEVICE, or a JSON file.")] = None,
    fix: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="For a TARGET: pin an option (plan=PLAN.json) or an axis (dp=2); repeatable."),
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the formulas to this JSON file.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw which device has which part of NAME into this file (.svg).")] = None,
    alternatives: Annotated[bool, typer.Option(
        "--alternatives", help="For a parameter, node, stages, microbatches or schedule of a TARGET: plan another.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Show the contents of a device's memory at its peak.")] = False,
) -> None:
    """Explain the placement and cost of NAME; or show cost formulas; or the memory peak."""
    check_writable(save, "the formulas")
    _check_svg(svg, name)
    if alternatives and (name is None or target.endswith(".json")):
        raise BadInput("alternatives are solved for one decision about a model", "--alternatives",
                       "give FILE.py:FUNCTION and the name of a parameter or node, stages, microbatches or schedule")
    if memory and (name is not None or grow or what_if or save):
        raise BadInput("--memory explains a whole plan", "explain", "leave out NAME, --grow, --what-if and --save")
    formulas_wanted = bool(grow or what_if or save)
    if target.endswith(".json"):
        cost = _read(target, name, formulas_wanted, memory, svg)
    else:
        cost = _make(target, name, formulas_wanted, cluster, fix or [], _sizes(dim or [], "--dim"), memory, svg,
                     alternatives)
    if cost is None:
        return
    sizes = _sizes(what_if or [], "--what-if")
    if save is not None:
        from hpml_compiler.instruments.cost_formulas.formula_file import save as write

        write(cost, save)
    from hpml_compiler.instruments.cost_formulas import cost_growth
    from hpml_compiler.visualize.terminal import wrapped

    texts = [cost_growth.growth(cost, name)] if grow or not (sizes or save) else []
    texts += [cost_growth.what_if(cost, name, **sizes)] if sizes else []
    print(wrapped("\n\n".join(texts)), end="\n" if texts else "")


def _check_svg(svg: Path | None, name: str | None) -> None:
    check_writable(svg, "the grid")
    if svg is not None and (name is None or picture_format(svg, "the grid") != "svg"):
        raise BadInput("--svg draws the grid of NAME into a file that ends in .svg", str(svg), "give NAME and --svg FILE.svg")


def _read(path: str, name: str | None, formulas_wanted: bool, memory: bool, svg: Path | None) -> Any:
    """Read formulas from a file and return them; for a plan, explain NAME or its memory and return None."""
    from hpml_compiler.instruments.cost_formulas.formula_file import is_formulas, load

    if is_formulas(read_json(path)):
        if memory:
            raise BadInput("a file of formulas has no memory timeline", path, "give a plan that `hpml plan --save` wrote")
        return load(path)
    from hpml_compiler.plan_api.model_plan import Plan

    found = Plan.load(path)
    if formulas_wanted:
        raise BadInput("a plan has no cost formulas", path,
                       f"give the model: `hpml explain TARGET --fix plan={path} --grow`")
    _say(found, name, memory, svg)
    return None


def _say(found: Any, name: str | None, memory: bool, svg: Path | None) -> None:
    from hpml_compiler.visualize.explanation import explain_svg
    from hpml_compiler.visualize.memory_explanation import memory_text
    from hpml_compiler.visualize.plan_table import stages_text
    from hpml_compiler.visualize.terminal import columns

    if name is None and not memory and any(graph.pipeline is not None for graph in found.step_graphs):
        print(stages_text(found))
        return
    print(memory_text(found, peak_of(found)) if memory else found.explain(_required(name), columns()))
    if svg is not None:
        write_file(svg, explain_svg(found, _required(name)), "the grid")


def _make(target: str, name: str | None, formulas_wanted: bool, cluster: str | None, fixes: list[str],
          dims: dict[str, int], memory: bool, svg: Path | None, alternatives: bool) -> Any:
    """Build the formulas of a target; or explain NAME or its memory, and return None."""
    if not formulas_wanted and not memory:
        _required(name)
    options = checked_options(fixes, {} if cluster is None else {"cluster": cluster})
    with at_work() as progress:
        progress("loading the model")
        from hpml_compiler import api
        from hpml_compiler.instruments.cost_formulas.formula_builder import formulas
        from hpml_compiler.plan_api.model_plan import Plan
        from hpml_compiler.visualize.terminal import columns, wrapped

        model, batch = load_target(target)
        progress("planning")
        rest = dict(options)
        place = rest.pop("cluster", None)
        if formulas_wanted:
            return formulas(model, batch, cluster=place, dims=dims or None, **rest)
        found = api.plan(model, batch, cluster=place, **rest)
    if not isinstance(found, Plan):
        raise BadInput("a plan for groups of different devices places a node once per group", target,
                       "explain one group, or run `hpml plan` to see the groups")
    _say(found, name, memory, svg)
    if name is not None and alternatives:
        from hpml_compiler.commands._alternatives import alternatives_text

        def replan(**changed: Any) -> Plan:
            again = api.plan(model, batch, cluster=place, **{**rest, **changed})
            assert isinstance(again, Plan), "one kind of devices was planned for"
            return again

        with at_work() as progress:
            progress("solving alternatives")
            text = alternatives_text(found, name, replan)
        print(wrapped(text, columns()))
    return None


def _required(name: str | None) -> str:
    if name is None:
        raise BadInput("NAME is missing", "explain", "name a node or parameter, or give --grow or --what-if batch=64")
    return name


def _sizes(texts: list[str], option: str) -> dict[str, int]:
    """Parse `["batch=64"]` to {"batch": 64}."""
    sizes: dict[str, int] = {}
    for text in texts:
        name, equals, number = (part.strip() for part in text.partition("="))
        if not (name and equals and number.isascii() and number.isdecimal()):
            raise BadInput(f"{shortened(repr(text))} is not NAME=NUMBER", option, f"write {option} batch=64")
        if len(number) > MOST_DIGITS:
            raise BadInput(f"{name} is too large", f"{option} {shortened(text)}",
                           f"give a number of at most {MOST_DIGITS} digits")
        if name in sizes:
            raise BadInput(f"{name} is given twice", f"{option} {text}", "leave one of them out")
        sizes[name] = int(number)
    return sizes
