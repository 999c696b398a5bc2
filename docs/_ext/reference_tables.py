"""Tables of the reference, as lines of Markdown, made from the code."""
from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any

import typer.main
from pydantic import BaseModel

from hpml_compiler.cli import app
from hpml_compiler.options import Options
from hpml_compiler.plans.content import PlanContent
from hpml_compiler.plans.schema import GraphPlan


def options() -> Iterator[str]:
    """The options of `torch.compile(model, backend="hpml", options=...)`."""
    yield from ("| option | default | |", "|---|---|---|")
    for name, field in Options.model_fields.items():
        default = field.get_default(call_default_factory=True)
        yield f"| `{name}` | {'' if default is None else f'`{default!r}`'} | {_cell(field.description or '')} |"


def commands() -> Iterator[str]:
    """The commands of `hpml`, each with its options."""
    group: Any = typer.main.get_command(app)
    for name, command in _single_commands(group):
        yield from (f"**hpml {name}**", "", _plain(command.help or ""), "", "| option | |", "|---|---|")
        for parameter in command.params:
            words = "`, `".join([*parameter.opts, *parameter.secondary_opts])
            shown = words if parameter.param_type_name == "option" else (parameter.name or "").upper()
            yield f"| `{shown}` | {_cell(getattr(parameter, 'help', None) or '')} |"
        yield ""


def _single_commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from _single_commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def plan_fields() -> Iterator[str]:
    """The fields of a plan's JSON, record by record."""
    for record in (PlanContent, *_records(GraphPlan)):
        text = inspect.getdoc(record) or ""
        yield from (f"**{record.__name__}**", "", _plain(text.split("\n\n")[0]), "", "| field | type |", "|---|---|")
        for name, field in record.model_fields.items():
            yield f"| `{name}` | `{_type(field.annotation)}` |"
        yield ""


def _records(record: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A record and those that it holds, each once, in order of depth."""
    queue, seen = [record], {record}
    while queue:
        yield (each := queue.pop(0))
        for field in each.model_fields.values():
            for inner in _inner(field.annotation):
                if inner not in seen:
                    seen.add(inner)
                    queue.append(inner)


def _inner(annotation: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _inner(argument)


def _type(annotation: Any) -> str:
    """A type as people write it, without what pydantic checks besides."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is typing.Literal:
        return " \\| ".join(map(repr, arguments))
    if origin in (typing.Union, types.UnionType):
        return " \\| ".join(map(_type, arguments))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_type, arguments))}]"
    names = {type(None): "None", ...: "..."}
    return names.get(annotation) or getattr(annotation, "__name__", str(annotation))


def _plain(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")
