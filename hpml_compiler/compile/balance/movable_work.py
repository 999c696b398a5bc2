"""Work of the ranks along one axis that can move between them: rows of the batch along dp, blocks along pp."""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hpml_compiler.compile.inputs.moved_parameters import StageMoves, share_memory
from hpml_compiler.options import Options
from hpml_compiler.planner.pipeline.pp_axis import PP_AXIS, has_stages, schedule_of
from hpml_compiler.runtime.placements.single_rank_placement import owner_of
from hpml_compiler.session import session
from passes.batch_balance.row_moves import RowMove, WorkMove, best_move
from passes.pipeline.stage_assignment import StageAssignment
from passes.session_state import state_of

if TYPE_CHECKING:
    from passes.pipeline.stage_moves import StageMove

ROWS_AXIS = "dp"


class MovableWork(ABC):
    """The work of one compiled graph by rank along `axis`. options: of the graph."""

    axis: str

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def best(self, windows: Sequence[Sequence[float]]) -> WorkMove | None:
        """The move after which the slowest rank takes least; None if there is none. windows: seconds by coordinate."""

    @abstractmethod
    def after(self, move: Any, frame: str, args: Sequence[Any]) -> Options | None:
        """Options to compile the graph again for this call; None if Dynamo compiles it again in the next one. frame: of the
        graph."""

    @abstractmethod
    def words(self, move: Any) -> str:
        """Description of a move, for the log."""

    def obstacle(self, args: Sequence[Any]) -> str:
        """The reason why work cannot move, the same on all ranks; "" if it can. args: of the next call."""
        return ""


class MovableRows(MovableWork):
    axis = ROWS_AXIS

    def __init__(self, options: Options, rows: tuple[int, ...]) -> None:
        super().__init__(options)
        self.rows = rows

    def best(self, windows: Sequence[Sequence[float]]) -> RowMove | None:
        move = best_move(self.rows, windows, self.options.microbatches)
        return move if move.rows != self.rows else None

    def after(self, move: RowMove, frame: str, args: Sequence[Any]) -> Options:
        return self.options.model_copy(update={"rows": {ROWS_AXIS: move.rows}})

    def words(self, move: RowMove) -> str:
        return f"rows along {ROWS_AXIS} move from {_sum(self.rows)} to {_sum(move.rows)}"


class MovableBlocks(MovableWork):
    """Blocks by pipeline stage. Parameters move with them, while Dynamo compiles the script's graph again, in the next call."""

    axis = PP_AXIS

    def __init__(self, options: Options, stages: StageAssignment) -> None:
        super().__init__(options)
        self.stages = stages
        self.ranks = schedule_of(options, options.microbatches).ranks

    def best(self, windows: Sequence[Sequence[float]]) -> StageMove | None:
        from passes.pipeline.stage_moves import best_cut  # here: it needs the solvers, which a launch need not import

        move = best_cut(self.stages, self.ranks, windows)
        return move if move is not None and move.ends != self.stages.ends else None

    def after(self, move: StageMove, frame: str, args: Sequence[Any]) -> None:
        state_of(CutSpeeds)[tuple((self.options.mesh or {}).items())] = move.speeds
        state_of(StageMoves).ask(frame, _owned(args))

    def words(self, move: StageMove) -> str:
        return f"blocks by stage change from {_sizes(self.stages.ends)} to {_sizes(move.ends)}"

    def obstacle(self, args: Sequence[Any]) -> str:
        shared = share_memory(_owned(args))
        return "tensors of the script share memory with parameters of the stages, and could not follow them" if shared else ""


class CutSpeeds(dict[tuple[tuple[str, int], ...], tuple[float, ...]]):
    """Speeds of ranks by which pipelines were cut anew, by the axes of their mesh: for graphs that are compiled later."""

    is_of_models = True


def shares_of(name: str, options: Options) -> MovableWork | None:
    """The work of a graph in training that can move; None if there is none."""
    current = session.current()
    if has_stages(options.mesh):
        stages = current.stages.get(name)
        return None if stages is None or not stages.units.ends else MovableBlocks(options, stages)
    plan = next((each for each in current.graphs if each.name == name), None)
    size = (options.mesh or {}).get(ROWS_AXIS, 1)
    if plan is None or plan.rows is None or not plan.training:
        return None
    unequal = plan.rows_by_rank.get(ROWS_AXIS)
    if unequal:
        return MovableRows(options, tuple(unequal))
    return None if plan.rows % size else MovableRows(options, (plan.rows // size,) * size)


def _owned(args: Sequence[Any]) -> list[Any]:
    return [x for x in args if owner_of(x) is not None]


def _sizes(ends: Sequence[int]) -> str:
    return _sum([stop - start for start, stop in pairwise((0, *ends))])


def _sum(counts: Sequence[int]) -> str:
    return "+".join(map(str, counts))
