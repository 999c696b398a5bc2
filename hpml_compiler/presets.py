"""The order of passes: the only place where it is written."""
from __future__ import annotations

from collections.abc import Sequence

from passes.analysis.describe import Describe
from passes.analysis.find_operations import FindOperations
from passes.analysis.flops import Flops
from passes.analysis.shapes import Shapes
from passes.graph.interface import GraphInput
from passes.graph.keys import DECISION, INTERFACE, OPERATIONS
from passes.manager import PassManager
from passes.transform.bucket import Bucket
from passes.transform.collectives import MeshGroups
from passes.transform.deduplicate import Deduplicate
from passes.transform.normalize import Normalize
from passes.transform.own_gradients import OwnGradients
from passes.transform.shard import Shard


def before_planning(inputs: Sequence[GraphInput], forward_outputs: int | None) -> PassManager:
    """From a traced graph to one that can be planned."""
    return PassManager((Normalize(), Shapes(), Flops(), Describe(tuple(inputs), forward_outputs), FindOperations()))


def after_planning(groups: MeshGroups, kept_gradients: Sequence[int] = (), forward_outputs: int = 0) -> PassManager:
    """From a planned graph (which has INTERFACE, OPERATIONS, DECISION) to what this rank runs.

    kept_gradients: places among the graph's outputs of the gradients that go into `.grad`.
    """
    manager = PassManager((Shard(groups), Deduplicate(), Bucket(), OwnGradients(tuple(kept_gradients), forward_outputs)))
    manager.check(available=(INTERFACE, OPERATIONS, DECISION))
    return manager
