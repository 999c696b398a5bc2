"""Imports of this repository's modules, read from their source, since running an import may find it already loaded."""
from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("passes", "hpml_compiler")


@dataclass(frozen=True)
class Import:
    """`name`: dotted, relative ones resolved. `local`: what it is bound to; `=torch` where `import torch.fx` binds `torch`.
    `inside`: in a function, or for type checkers only."""

    line: int
    name: str
    local: str
    inside: bool = False


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def imports(tree: ast.AST, module: str) -> Iterator[Import]:
    """Every import in the source of `module`."""
    inner = {id(node) for outer in ast.walk(tree) if _runs_later(outer) for node in ast.walk(outer)}
    for node in ast.walk(tree):
        inside = id(node) in inner
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                yield Import(node.lineno, alias.name, bound if alias.asname else f"={bound}", inside)
        elif isinstance(node, ast.ImportFrom):
            parts = module.removesuffix(".__init__").split(".")
            up = node.level - (1 if module.endswith(".__init__") else 0)
            prefix = ".".join(parts[: len(parts) - up]) if node.level else ""
            source = ".".join(filter(None, [prefix, node.module]))
            for alias in node.names:
                yield Import(node.lineno, f"{source}.{alias.name}", alias.asname or alias.name, inside)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield Import(node.lineno, node.args[0].value, "", inside)


def _runs_later(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or (
        isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"))


@functools.cache
def sources() -> dict[str, tuple[Path, tuple[Import, ...]]]:
    """Module -> its file and its imports, of both packages."""
    found = {}
    for file in (file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))):
        name = module_name(file)
        found[name.removesuffix(".__init__")] = file, tuple(imports(ast.parse(file.read_text()), name))
    return found


def own_module(name: str) -> str:
    """The module of this repository that an imported name lies in; "" if it is of another package."""
    while name and name not in sources():
        name = name.rpartition(".")[0]
    return name


@functools.cache
def import_graph() -> networkx.DiGraph:
    """An edge from each module to those that it imports, anywhere in its source."""
    edges = ((module, own_module(each.name)) for module, (_, found) in sources().items() for each in found)
    return networkx.DiGraph((a, b) for a, b in edges if b and a != b)


@functools.cache
def loads(module: str) -> frozenset[str]:
    """The names of other packages that importing a module of this repository loads."""
    seen: set[str] = set()
    left, names = [module], set()
    while left:
        here = left.pop()
        if here in seen or here not in sources():
            continue
        seen.add(here)
        left.append(here.rpartition(".")[0])  # a package's __init__ runs before its modules
        for each in sources()[here][1]:
            if own := "" if each.inside else own_module(each.name):
                left.append(own)
            elif not each.inside:
                names.add(each.name)
    return frozenset(names)
