"""What earlier launches decided to keep: looked up by the tape of the graph, and walked anew before it is believed."""
from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch
from pydantic import ValidationError
from torch.fx import GraphModule

from hpml_compiler.options import Options
from hpml_compiler.planning.room import Room
from hpml_compiler.plans import plan_file
from hpml_compiler.plans.cache_warnings import warn_of_cache
from hpml_compiler.plans.fields import Record
from passes.annotations import read
from passes.errors import BadInput
from passes.keeping.keys import KEPT, TAPE, KeptNodes
from passes.partition.obey_kept import ObeyKept
from passes.presets import obeying

log = logging.getLogger("hpml")


class RememberedKept(Record):
    """Names of what was kept and, of these, offloaded, with what a walk counted then."""

    names: tuple[str, ...]
    offloaded: tuple[str, ...]
    peak_bytes: int
    again_us: float


def remembered_kept(joint: GraphModule, room: Room, options: Options, strict: bool,
                    decide: Callable[[], KeptNodes]) -> KeptNodes:
    """decide: what to keep of a graph that has its tape, in this room. What it answers, or once answered of the same tape in
    the same room, if a walk counts the same today."""
    if not plan_file.is_on():
        return decide()
    key = _key(joint, room, options, strict)
    try:
        text = plan_file.get(key)
    except BadInput as error:
        warn_of_cache("what earlier launches kept cannot be read", error)
        return decide()
    if text is not None and (kept := _obeyed(joint, room, text)) is not None:
        log.info("what is kept was decided in an earlier launch; HPML_CACHE=0 searches anew")
        return kept
    kept = decide()
    entry = RememberedKept(names=tuple(sorted(kept.names)), offloaded=tuple(sorted(kept.offloaded)),
                           peak_bytes=kept.peak_bytes, again_us=kept.again_us)
    try:
        plan_file.put(key, entry.model_dump_json())
    except BadInput as error:
        warn_of_cache("what is kept cannot be noted for the next launch", error)
    return kept


def _key(joint: GraphModule, room: Room, options: Options, strict: bool) -> str:
    tape = read(TAPE, joint)
    parts = tape.runs, tape.storages, sorted(tape.returned), sorted(tape.gradients), tape.stand_ins, tape.early
    asked = room.left, round(room.after), round(room.between), strict, options.model_copy(update={"plan": None}).to_json()
    return plan_file.digest_of(["kept", parts, asked, torch.__version__, plan_file.planners_code()])


def _obeyed(joint: GraphModule, room: Room, text: str) -> KeptNodes | None:
    try:
        found = RememberedKept.model_validate_json(text)
        obeying(ObeyKept(frozenset(found.names), frozenset(found.offloaded), room.left, round(room.after)))(joint)
    except (ValidationError, BadInput):
        log.warning("what an earlier launch kept is damaged: it is decided anew")
        return None
    kept = read(KEPT, joint)
    same = kept.peak_bytes == found.peak_bytes and math.isclose(kept.again_us, found.again_us, rel_tol=1e-9)
    return kept if same else None
