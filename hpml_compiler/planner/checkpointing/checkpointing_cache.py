"""Cache of checkpointing decisions: looked up by the graph's storage program, and simulated again before use."""
from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch
from pydantic import ValidationError
from torch.fx import GraphModule

from hpml_compiler.options import Options
from hpml_compiler.planner.graph.memory_budget import BudgetShare
from hpml_compiler.plans.cache import plan_database
from hpml_compiler.plans.cache.cache_warnings import warn_of_cache
from hpml_compiler.plans.record_fields import Record
from passes.annotations import read
from passes.checkpointing.checkpoint_keys import CHECKPOINT_DECISION, STORAGE_PROGRAM, CheckpointDecision
from passes.checkpointing.obey_checkpointing import ObeyCheckpointing
from passes.errors import BadInput
from passes.presets import obeying_checkpointing

log = logging.getLogger("hpml")


class CachedCheckpointing(Record):
    """Names of the saved and the offloaded values of a decision, with its peak and recomputation time as simulated then."""

    names: tuple[str, ...]
    offloaded: tuple[str, ...]
    peak_bytes: int
    again_us: float


def cached_checkpointing(joint: GraphModule, share: BudgetShare, options: Options, strict: bool,
                         decide: Callable[[], CheckpointDecision]) -> CheckpointDecision:
    """The cached decision for this storage program and budget share, if a simulation still gives the same figures; else the
    result of `decide`. joint: a graph with its storage program. decide: solves the checkpointing problem."""
    if not plan_database.is_on():
        return decide()
    key = _key(joint, share, options, strict)
    try:
        text = plan_database.get(key)
    except BadInput as error:
        warn_of_cache("cached checkpointing decisions cannot be read; hpml searches again", error)
        return decide()
    if text is not None and (kept := _obeyed(joint, share, text)) is not None:
        log.info("the checkpointing decision is read from the plan cache; set HPML_CACHE=0 to search again")
        return kept
    kept = decide()
    entry = CachedCheckpointing(names=tuple(sorted(kept.names)), offloaded=tuple(sorted(kept.offloaded)),
                                peak_bytes=kept.peak_bytes, again_us=kept.recompute_us)
    try:
        plan_database.put(key, entry.model_dump_json())
    except BadInput as error:
        warn_of_cache("the checkpointing decision cannot be cached; the next launch searches again", error)
    return kept


def _key(joint: GraphModule, share: BudgetShare, options: Options, strict: bool) -> str:
    program = read(STORAGE_PROGRAM, joint)
    parts = (program.runs, program.storages, sorted(program.returned), sorted(program.gradients), program.stand_ins,
             program.early,
             program.microbatches)
    asked = share.available, round(share.after), round(share.between), strict,
    options.model_copy(update={"plan": None}).to_json()
    return plan_database.digest_of(["kept", parts, asked, torch.__version__, plan_database.planners_code()])


def _obeyed(joint: GraphModule, share: BudgetShare, text: str) -> CheckpointDecision | None:
    try:
        found = CachedCheckpointing.model_validate_json(text)
        obeying_checkpointing(ObeyCheckpointing(frozenset(found.names), frozenset(found.offloaded), share.available,
                                                round(share.after)))(joint)
    except (ValidationError, BadInput):
        log.warning("the cached checkpointing decision is corrupt; hpml searches again")
        return None
    kept = read(CHECKPOINT_DECISION, joint)
    same = kept.peak_bytes == found.peak_bytes and math.isclose(kept.recompute_us, found.again_us, rel_tol=1e-9)
    return kept if same else None
