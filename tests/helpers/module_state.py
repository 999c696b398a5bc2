"""State of modules, read from their source: names bound at the top of a module that functions rebind or change."""
from __future__ import annotations

import ast
from collections.abc import Iterator, Set

CHANGES = frozenset((
    "add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "insert", "intersection_update", "pop",
    "popitem", "popleft", "put", "remove", "reverse", "set", "setdefault", "sort", "symmetric_difference_update", "update"))
"""Methods that change lists, dicts, sets, deques, queues, events and context variables."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def module_state(tree: ast.Module, modules: Set[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """(line, name) where a function changes what this module, or another of this repository, has bound at its top, or a class.
    modules: names that modules are imported as, so that a call such as `database.put(...)` changes nothing by itself."""
    bound = set(_bound(tree.body))
    yield from ((node.lineno, name) for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names)
    for function in (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)):
        own = _locals(function)
        for node in ast.walk(function):
            for target in _changed(node):
                name = _root(target)
                if name in bound and name not in own and not (isinstance(node, ast.Call) and name in modules):
                    yield target.lineno, name


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    """Names of values and classes, here or imported from a module."""
    for node in body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
        elif isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("passes", "hpml_compiler"):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from _bound([*node.body, *getattr(node, "orelse", ()), *getattr(node, "finalbody", ())])


def _locals(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    """Names that a function binds, its arguments included."""
    found = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    found |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return found - {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}


def _changed(node: ast.AST) -> Iterator[ast.expr]:
    """Objects that a statement or a call changes."""
    targets: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = [each for target in node.targets for each in getattr(target, "elts", [target])]
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    yield from (target.value for target in targets if isinstance(target, (ast.Attribute, ast.Subscript)))
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            yield node.func.value
        elif isinstance(node.func, ast.Name) and node.func.id in ("delattr", "next", "setattr") and node.args:
            yield node.args[0]


def _root(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
