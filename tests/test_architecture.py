"""Layers of both packages, names, sizes of folders, files and functions, late imports, private torch behind passes/compat."""
from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator

import networkx
import pytest

from tests.helpers.imports import PACKAGES, ROOT, Import, import_graph, imports, loads, module_name, own_module, sources
from tests.helpers.module_state import module_state

LAYERS = {
    "passes": (
        ("errors", "moved_modules", "registrations", "session_state"),
        ("compat", "filesystem", "solver"),
        ("annotations", "base", "frozen", "json_records", "manager", "pass_result", "registry"),
        ("hardware", "op_rules"),
        ("batch_balance", "graph"),
        ("replicas",),
        ("cost_model", "serialization", "tracing"),
        ("simulation",),
        ("checkpointing", "sharding"),
        ("analyses",),
        ("pipeline",),
        ("transforms",),
        ("presets",),
    ),
    "hpml_compiler": (
        ("cli_target", "plans", "run_records", "units"),
        ("runtime", "visualize"),
        ("demo", "plan_api"),
        ("option_values",),
        ("options",),
        ("optimizer_transient",),
        ("simulate",),
        ("pages", "planner"),
        ("energy", "integrations"),
        ("monitor",),
        ("session",),
        ("run_recording",),
        ("checkpoints", "run_reports", "weights", "profile", "instruments"),
        ("compile", "api", "elastic"),
        ("backend", "instruments.calibration"),
        ("commands",),
        ("cli",),
    ),
}
"""The modules and folders at the top of each package, from the ground up: each may import lower layers, none of its own layer
or of a higher one. The modules of the pass contract may import each other."""

CONTRACT = 2
"""The layer of passes/ whose modules may import each other."""

MOST_MODULES = 12
ALIKE = {
    "hpml_compiler/commands": "one module per command",
    "passes/op_rules/families": "one module per family of operators",
}
"""Folders of more than MOST_MODULES, whose modules are all of one kind."""

LATE = {
    "torch": "seconds: the command line answers --help, and finds wrong arguments, without it",
    "torch._dynamo": "a second", "torch._inductor": "two seconds", "torch.utils.tensorboard": "optional",
    "torch._functorch._aot_autograd": "sympy", "torch._functorch.config": "sympy", "torch._functorch.partitioners": "sympy",
    "torch.fx.experimental.symbolic_shapes": "sympy", "torch.distributed.pipelining": "torch._dynamo",
    "torch.distributed.tensor": "0.3 s that only ranks need",
    "torch.distributed.elastic": "only `hpml run` needs it", "torch.distributed.run": "only `hpml run` needs it",
    "highspy": "one of several solvers", "pulp": "0.2 s", "networkx": "0.2 s", "numpy": "0.1 s", "sympy": "0.5 s",
    "pydantic": "0.1 s", "rich": "0.1 s, for people only", "matplotlib": "0.5 s", "graphviz": "pictures only",
    "accelerate": "optional", "lightning": "optional", "pytorch_lightning": "optional", "pynvml": "optional",
    "safetensors": "optional", "transformers": "optional",
}
"""What may be imported inside a function, or for type checkers alone, and why: it takes that long, or need not be there. So
may a module of ours that brings in something of these which its importer does without."""

LONG = {
    "hpml_compiler/runtime/dtensor/placed_tensor.py": "one class that stands for a tensor in all of torch's functions",
}
"""Files of more than MOST_LINES, and why."""

STATE = {"state": "passes.session_state", "PASSES": "passes.registry", "OPERATORS": "passes.op_rules.rule_table"}
"""Objects at the top of a module that functions change: the state of the session that is open, of which there is one in a
process, and what importing a module registers. All other state ends with the session."""

MOST_LINES, MOST_LINES_OF_A_FUNCTION = 300, 60


def private_torch(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every use of functorch or of a private name in a torch module, by import or attribute."""
    bound: dict[str, str] = {}
    for each in imports(tree, module):
        if each.local.startswith("="):
            bound[each.local[1:]] = each.local[1:]
        elif each.local:
            bound[each.local] = each.name
        if _is_private(each.name):
            yield each.line, each.name
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


def _found(package: str) -> Iterator[tuple[str, str, Import]]:
    """(module, what to say of the place, import) of every import in a package."""
    for module, (file, found) in sources().items():
        if module.split(".")[0] == package:
            yield from ((module, f"{file.relative_to(ROOT)}:{each.line}: imports {each.name}", each) for each in found)


def test_the_toolkit_does_not_import_the_driver():
    wrong = [place for _, place, each in _found("passes") if each.name.split(".")[0] == "hpml_compiler"]
    assert not wrong, "passes/ must be usable without hpml_compiler/; move what both need into passes/:\n" + \
        "\n".join(wrong)


def test_the_driver_writes_no_annotation_by_hand():
    wrong = [place for _, place, each in _found("hpml_compiler") if each.name == "passes.annotations.write"]
    assert not wrong, "annotations are written by passes, which say so in `provides`:\n" + "\n".join(wrong)


def test_tests_and_the_notebook_of_the_toolkit_do_without_the_driver():
    notebook = json.loads((ROOT / "notebooks" / "02_partition_with_an_ilp.ipynb").read_text())
    files = {path: path.read_text() for path in sorted((ROOT / "tests" / "passes").rglob("*.py"))}
    files[ROOT / "notebooks" / "02.py"] = "\n".join(
        "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    wrong = [f"{file.relative_to(ROOT)}: imports {each.name}" for file, text in files.items()
             for each in imports(ast.parse(text), module_name(file)) if each.name.split(".")[0] == "hpml_compiler"]
    assert len(files) > 50 and not wrong, "the toolkit plans alone:\n" + "\n".join(wrong)


def _layer(module: str) -> tuple[int, str]:
    package, _, inner = module.partition(".")
    for name in (".".join(inner.split(".")[:2]), inner.partition(".")[0]):
        for number, names in enumerate(LAYERS[package]):
            if name in names:
                return number, name
    assert not inner, f"{module} has no place in LAYERS"
    return -1, ""


@pytest.mark.parametrize("package", LAYERS)
def test_layers(package):
    wrong = []
    for module, place, each in _found(package):
        target = own_module(each.name)
        if target.split(".")[0] == package and module != package:
            (here, top), (there, other) = _layer(module), _layer(target)
            if top != other and there >= here and not (package == "passes" and here == there == CONTRACT):
                wrong.append(place)
    assert not wrong, "see LAYERS; hand results to siblings over as annotations:\n" + "\n".join(wrong)


def test_folders_are_small():
    sizes = Counter(file.parent.relative_to(ROOT).as_posix() for file, _ in sources().values() if file.stem != "__init__")
    assert set(ALIKE) == {folder for folder, size in sizes.items() if size > MOST_MODULES}, f"at most {MOST_MODULES} modules"


def test_names_are_given_once():
    """Of modules (except `base`) and of classes, in both packages together; leading underscores do not count."""
    given: dict[str, list[str]] = {}
    for file, _ in sources().values():
        where = file.relative_to(ROOT).as_posix()
        if file.stem not in ("__init__", "base"):
            given.setdefault(f"module {file.stem.lstrip('_')}", []).append(where)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                given.setdefault(f"class {node.name.lstrip('_')}", []).append(f"{where}:{node.lineno}")
    assert len(given) > 500
    assert not {name: places for name, places in given.items() if len(places) > 1}


def test_solving_is_numbers_alone():
    wrong = [place for module, place, each in _found("passes") if module.startswith("passes.solver")
             if (target := own_module(each.name)) and not target.startswith(("passes.solver", "passes.errors"))]
    assert not wrong, "\n".join(wrong)


def _folder(module: str) -> str:
    """The folder of a module; at the top of a package, the module itself."""
    folder = module if sources()[module][0].stem == "__init__" else module.rpartition(".")[0]
    return module if folder in PACKAGES else folder


@pytest.mark.parametrize("unit", [str, _folder], ids=["modules", "folders"])
def test_no_import_circle(unit):
    graph = networkx.DiGraph((unit(a), unit(b)) for a, b in import_graph().edges if unit(a) != unit(b))
    circles = [sorted(each) for each in networkx.strongly_connected_components(graph) if len(each) > 1]
    assert not circles, "imports in functions and for type checkers count: they tie modules together as others do"


def _late(names: set[str]) -> set[str]:
    return {late for late in LATE for name in names if f"{name}.".startswith(f"{late}.")}


@pytest.mark.parametrize("package", ["passes", "hpml_compiler"])
def test_imports_inside_functions_have_a_reason(package):
    wrong = [place for module, place, each in _found(package) if each.inside
             if not _late(set(loads(own)) if (own := own_module(each.name)) else {each.name}) - _late(set(loads(module)))]
    assert not wrong, "these belong at the top of the file: they bring in nothing of LATE that is not there already:\n" + \
        "\n".join(wrong)


def test_a_graph_from_the_cache_needs_no_solver():
    assert "pulp" not in loads("hpml_compiler.compile.dispatch"), "planning took a fifth of a second of each launch to import"


@pytest.mark.parametrize("package", ["passes", "hpml_compiler"])
def test_private_torch_modules_only_in_compat(package):
    wrong = [f"{file.relative_to(ROOT)}:{line}: uses {name}" for module, (file, _) in sources().items()
             if module.split(".")[0] == package and not module.startswith("passes.compat")
             for line, name in private_torch(ast.parse(file.read_text()), module)]
    assert not wrong, "private torch names change between releases; give each a name in passes/compat, with a comment " \
        "why, and import that:\n" + "\n".join(wrong)


def test_modules_have_no_state():
    wrong = []
    for module, (file, found) in sources().items():
        modules = {each.local for each in found if own_module(each.name) == each.name}
        changed = {(line, name) for line, name in module_state(ast.parse(file.read_text()), modules)
                   if STATE.get(name) not in (module, *(each.name.rpartition(".")[0] for each in found if each.local == name))}
        wrong += [f"{file.relative_to(ROOT)}:{line}: changes {name}" for line, name in sorted(changed)]
    assert not wrong, "keep it in a class, whose object `passes.session_state.state_of` makes and the session ends:\n" + \
        "\n".join(wrong)


@pytest.mark.parametrize(("source", "found"), [
    ("calls = 0\ndef f():\n    global calls\n    calls += 1", {"calls"}),
    ("known = {}\ndef f(x):\n    known[x] = 1", {"known"}),
    ("known = []\nclass A:\n    def f(self):\n        known.append(self)", {"known"}),
    ("class A:\n    calls = 0\n    def f(self):\n        A.calls += 1", {"A"}),
    ("if True:\n    ids = count()\nf = lambda: next(ids)", {"ids"}),
    ("from passes.a import known\ndef f():\n    del known[0]", {"known"}),
    ("known = {}\ndef f(known):\n    known[0] = 1", set()),
    ("known = {}\ndef f():\n    known = {}\n    known.clear()", set()),
    ("known = {}\nknown[0] = 1\ndef f():\n    return known[0]", set()),
    ("import sys\ndef f():\n    sys.argv[0] = ''", set()),
])
def test_state_of_modules_is_found(source, found):
    assert {name for _, name in module_state(ast.parse(source))} == found


def test_files_and_functions_are_short():
    wrong = []
    for file, _ in sources().values():
        text, name = file.read_text(), file.relative_to(ROOT).as_posix()
        if (lines := text.count("\n")) > MOST_LINES and name not in LONG:
            wrong.append(f"{name}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MOST_LINES_OF_A_FUNCTION:
                    wrong.append(f"{name}: {lines} lines of {node.name}")
    assert not wrong, f"at most {MOST_LINES} lines a file (or a reason in LONG) and {MOST_LINES_OF_A_FUNCTION} a function"


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
    ("from ..solver import ilp", "passes.analyses.flops", "passes.solver.ilp"),
    ("from . import flops", "passes.analyses.__init__", "passes.analyses.flops"),
    ("from .flops import count", "passes.analyses.bytes", "passes.analyses.flops.count"),
    ("from .. import sharding", "passes.analyses.__init__", "passes.sharding"),
])
def test_relative_imports_are_resolved(source, module, found):
    assert [each.name for each in imports(ast.parse(source), module)] == [found]
