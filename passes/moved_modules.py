"""Documented modules under their old import paths, with a deprecation warning."""
from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "passes.analysis": "passes.analyses",
    "passes.analysis.shapes": "passes.analyses.shapes",
    "passes.machine": "passes.hardware",
    "passes.machine.cluster": "passes.hardware.cluster",
    "passes.rules": "passes.op_rules",
    "passes.rules.base": "passes.op_rules.base",
    "passes.rules.table": "passes.op_rules.rule_table",
    "passes.tracing.trace": "passes.tracing.joint_trace",
}


class MovedModules(MetaPathFinder, Loader):
    """Imports the module of the new path in place of one of an old path."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, loader_state={}) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = MOVED[spec.name]
        warnings.warn(f"{spec.name} is {new} now", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        spec.loader_state["spec"] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state["spec"]  # which import has replaced


def install_finder() -> None:
    """Before other finders: an old package stands for a new one, in whose folder they would find its modules once more."""
    if not any(isinstance(each, MovedModules) for each in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
