"""The arrows between packages: hpml_compiler -> passes -> torch, siblings apart, private torch behind compat.py."""
from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SIBLINGS = ("analysis", "partition", "transform")
ABOVE_SCHEDULE = (*SIBLINGS, "rules", "solve", "shares")
COMPAT = "passes/compat.py"


def _sources(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"no Python file under {package}/"
    return files


def _module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def imports(tree: ast.AST, module: str) -> Iterator[tuple[int, str, str]]:
    """(line, dotted name, name it is bound to) of every import in the source of `module`, relative ones resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                yield node.lineno, alias.name, bound if alias.asname else f"={bound}"
        elif isinstance(node, ast.ImportFrom):
            parts = module.removesuffix(".__init__").split(".")
            up = node.level - (1 if module.endswith(".__init__") else 0)
            prefix = ".".join(parts[: len(parts) - up]) if node.level else ""
            source = ".".join(filter(None, [prefix, node.module]))
            for alias in node.names:
                yield node.lineno, f"{source}.{alias.name}", alias.asname or alias.name
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value, ""


def private_torch(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every use of functorch or of a private name in a torch module, by import or attribute."""
    bound: dict[str, str] = {}
    for line, name, local in imports(tree, module):
        if local.startswith("="):
            bound[local[1:]] = local[1:]
        elif local:
            bound[local] = name
        if _is_private(name):
            yield line, name
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            name = _dotted(node, bound)
            if name is not None and _is_private(name):
                yield node.lineno, name


def _dotted(node: ast.expr, bound: dict[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in bound:
        return None
    return ".".join([bound[node.id], *reversed(parts)])


def _is_private(name: str) -> bool:
    parts = name.split(".")
    if parts[0] == "functorch":
        return True
    if parts[0] != "torch" or parts[1:2] == ["ops"]:  # torch.ops.aten._softmax is an op's public name
        return False
    for part in parts[1:]:
        if part[:1].isupper():  # a class: its own underscores are not a module's
            return False
        if part.startswith("_") and not part.startswith("__"):
            return True
    return False


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_the_toolkit_does_not_import_the_driver():
    wrong = [f"{file.relative_to(ROOT)}:{line}: imports {name}" for file in _sources("passes")
             for line, name, _ in imports(ast.parse(file.read_text()), _module_name(file))
             if _within(name, "hpml_compiler")]
    assert not wrong, "passes/ must be usable without hpml_compiler/; move what both need into passes/:\n" + \
        "\n".join(wrong)


@pytest.mark.parametrize("sibling", SIBLINGS)
def test_siblings_meet_only_in_annotations(sibling):
    others = [f"passes.{other}" for other in SIBLINGS if other != sibling]
    wrong = [f"{file.relative_to(ROOT)}:{line}: imports {name}" for file in _sources(f"passes/{sibling}")
             for line, name, _ in imports(ast.parse(file.read_text()), _module_name(file))
             if any(_within(name, other) for other in others)]
    assert not wrong, f"passes/{sibling} may read rules, annotations and the other modules of passes/ itself, but " \
        "not its siblings; hand results over as annotations:\n" + "\n".join(wrong)


def test_the_schedule_knows_no_pass_and_no_torch():
    """What runs when follows from numbers alone, so that the planner, the simulator and the runtime can all ask."""
    above = ["torch", *(f"passes.{room}" for room in ABOVE_SCHEDULE)]
    wrong = [f"{file.relative_to(ROOT)}:{line}: imports {name}" for file in _sources("passes/schedule")
             for line, name, _ in imports(ast.parse(file.read_text()), _module_name(file))
             if any(_within(name, other) for other in above)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", ["passes", "hpml_compiler"])
def test_private_torch_modules_only_in_compat(package):
    wrong = [f"{file.relative_to(ROOT)}:{line}: uses {name}" for file in _sources(package)
             if file.relative_to(ROOT).as_posix() != COMPAT
             for line, name in private_torch(ast.parse(file.read_text()), _module_name(file))]
    assert not wrong, f"private torch names change between releases; give each a name in {COMPAT}, with a comment " \
        "why, and import that:\n" + "\n".join(wrong)


@pytest.mark.parametrize(("source", "found"), [
    ("import torch._dynamo", "torch._dynamo"),
    ("from torch import _inductor", "torch._inductor"),
    ("from torch.distributed._tensor import Shard", "torch.distributed._tensor.Shard"),
    ("import torch\ntorch._C._get_accelerator()", "torch._C._get_accelerator"),
    ("import torch.distributed as dist\ndist._functional_collectives.all_reduce", "torch.distributed._functional_"
     "collectives.all_reduce"),
    ("import functorch", "functorch"),
    ("import importlib\nimportlib.import_module('torch._higher_order_ops')", "torch._higher_order_ops"),
    ("def f():\n    from torch._guards import TracingContext", "torch._guards.TracingContext"),
])
def test_private_torch_is_found(source, found):
    assert found in [name for _, name in private_torch(ast.parse(source), "passes.example")]


@pytest.mark.parametrize("source", [
    "import torch\ntorch.ops.aten._softmax.default",
    "import torch\ntorch.__version__",
    "import torch\ntorch.Tensor._make_wrapper_subclass",
    "from torch.fx import Node\nNode._private",
    "import mine\nmine._dynamo",
])
def test_public_torch_is_left_alone(source):
    assert not list(private_torch(ast.parse(source), "passes.example"))


@pytest.mark.parametrize(("source", "module", "found"), [
    ("from ..solve import ilp", "passes.analysis.flops", "passes.solve.ilp"),
    ("from . import flops", "passes.analysis.__init__", "passes.analysis.flops"),
    ("from .flops import count", "passes.analysis.bytes", "passes.analysis.flops.count"),
    ("from .. import partition", "passes.analysis.__init__", "passes.partition"),
])
def test_relative_imports_are_resolved(source, module, found):
    assert [name for _, name, _ in imports(ast.parse(source), module)] == [found]
