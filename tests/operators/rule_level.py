"""Each strategy of each rule against the whole operator, for all calls that an entry consists of. One process, no groups."""
from __future__ import annotations

import random
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from passes.compat import pytree
from passes.op_rules.rule_table import has_rule, is_pointwise, is_random, name_of
from tests.operators import database
from tests.operators.calls import calls, key_of, trace
from tests.passes.op_rules.families.harness import Run, Sample

ROUNDING = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float32: 1e-3, torch.float64: 1e-7, torch.complex64: 1e-3,
            torch.complex32: 0.02,
            torch.complex128: 1e-7}
LIMITS = {"first": 16, "others": 4}
PAIRS = 3


@dataclass
class Verdict:
    """What came of an entry. how: split, whole (nothing to split), replicated (a call has no rule), untraceable or wrong."""

    name: str
    how: str
    runs: int = 0
    unruled: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


_known: dict[tuple, tuple[str, int, str]] = {}
"""Of every call that was judged: whether it splits, how many runs were compared, and what was wrong."""
ENOUGH = 12
"""Calls of one pointwise operator on operands of the same types that are judged: all have one rule. Of others it is ten times
as many, and one of those with more elements than are LARGE."""
LARGE = 10_000
_counts: Counter[tuple] = Counter()


def judge(name: str, limits: dict[str, int] | None = None, of: dict[str, int] | None = None) -> Verdict:
    entry, limits = database.entries()[name], limits or LIMITS
    found, runs, unruled, wrong, why = Counter(), 0, set(), [], ""
    for number, dtype in enumerate(database.dtypes(entry)):
        for sample in database.samples(entry, dtype, limits["others" if number else "first"], of):
            try:
                made = calls(trace(database.function_of(entry, sample), database.tensors_of(sample)))
            except Exception as error:
                why = why or f"{dtype}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
                continue
            found["traced"] += 1
            for call in made:
                how, count, complaint = _judged(call)
                found[how] += 1
                runs += count
                if how == "replicated":
                    unruled.add(name_of(call.target))
                if complaint:
                    wrong.append(complaint)
    how = ("wrong" if wrong else "untraceable" if not found["traced"] else "replicated" if unruled
           else "split" if found["split"] else "whole")
    return Verdict(name, how, runs, sorted(unruled), list(dict.fromkeys(wrong))[:5], why)


def _judged(call: Sample) -> tuple[str, int, str]:
    key = key_of(call)
    if key not in _known:
        alike = (key[0], tuple(x[-1] for x in key[1] if isinstance(x, tuple)))
        _counts[alike] += 1
        large = sum(x.numel() for x in call.args if isinstance(x, torch.Tensor)) > LARGE
        if _counts[alike] > (1 if large else ENOUGH if is_pointwise(call.target) else 10 * ENOUGH):
            return "split", 0, ""
        _known[key] = _judge_call(call)
        return _known[key]
    how, _, complaint = _known[key]
    return how, 0, complaint


def _judge_call(call: Sample) -> tuple[str, int, str]:
    if not has_rule(call.target):
        return "replicated", 0, ""
    random.seed(0)
    leaves = pytree.tree_leaves((call.args, dict(call.kwargs)))
    types = [x.dtype if isinstance(x, torch.Tensor) else x for x in leaves if isinstance(x, (torch.Tensor, torch.dtype))]
    try:
        run = Run(call, max((ROUNDING.get(x, 0.0) for x in types), default=0.0) or 1e-7)
        if run.rule is None:
            return "replicated", 0, ""
        seen = run.check(0 if sum(x.numel() for x in run.tensors) > LARGE else PAIRS)
    except Exception as error:
        return "wrong", 0, f"{type(error).__name__}: {error}"
    splits = any("S(" in s for s in seen)
    return "split" if splits else "random" if is_random(call.target) else "whole", run.combinations, ""
