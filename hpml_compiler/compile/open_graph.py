"""A graph whose options leave decisions open: where it does not fit, where stages are faster by measured prices, or where a
part of the mesh is pinned, they are searched for, and it is compiled once more.

Rank 0 searches on the graph that was traced, as `hpml plan` does (`hpml_compiler.planner.joint`). All ranks then compile the
graph as if the answer had been pinned, and so the graphs that share its parameters. Later launches read the answer from the
plan cache, before anything is traced.
"""
from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from pydantic import ValidationError
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from hpml_compiler.compile.inputs.graph_inputs import GraphInputs
from hpml_compiler.compile.open_axes import as_placed, open_axes
from hpml_compiler.options import Options
from hpml_compiler.planner.graph.memory_budget import StepContext
from hpml_compiler.planner.joint.chosen_configuration import ChosenConfiguration
from hpml_compiler.planner.joint.open_decisions import leaves_axes_open
from hpml_compiler.planner.step_decision import DecidedStep
from hpml_compiler.plans.cache import plan_database
from hpml_compiler.plans.cache.cache_warnings import warn_of_cache
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.runtime.consistency.rank_sync import from_rank_0
from hpml_compiler.runtime.process.world_group import this_rank, world_size
from hpml_compiler.session import session
from hpml_compiler.session.step_memory import step_context
from passes import compat
from passes.analyses.microbatch_dims import fitting_microbatches
from passes.errors import BadInput, Infeasible
from passes.graph.graph_copy import copy_graph
from passes.hardware.cluster import Cluster
from passes.tracing.joint_trace import JointTrace

if TYPE_CHECKING:
    from hpml_compiler.planner.captured_model import CapturedModel

log = logging.getLogger("hpml")
Call = Callable[..., Any]


class GraphBeingCompiled(Protocol):
    """The parts of a graph's compiler that a search starts from."""

    gm: GraphModule
    given: Sequence[Any]
    inputs: GraphInputs
    options: Options
    cluster: Cluster
    sharing: StepContext | None
    alone: bool
    name: str


class ConfigurationsFound(Exception):
    """Configurations under which a graph may fit, the best first: raised on all ranks, in place of compiling it. refusal: why
    it does not fit as the options say, if that was tried. fits: whether it does."""

    def __init__(self, found: tuple[ChosenConfiguration, ...], refusal: Infeasible | None = None, fits: bool = False) -> None:
        super().__init__("the graph is compiled with other options")
        self.found, self.refusal, self.fits = found, refusal, fits


class OpenGraph:
    """Open decisions about one graph while it is compiled. is_open: False once that is over, and where there is nothing to
    decide, because of `why` if it is not empty. reads: whether answers of earlier launches are read. searched: whether answers
    were searched for. key: of the graph in the graph cache. traced: the joint graph before passes, and its forward outputs."""

    def __init__(self, is_open: bool, why: str = "", reads: bool = True) -> None:
        self.is_open, self.why, self.reads, self.key, self.searched = is_open, why, reads, "", False
        self.traced: tuple[GraphModule, int] | None = None

    @staticmethod
    def of(gm: GraphModule, given: Sequence[Any], options: Options) -> OpenGraph:
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        parameters = [x for x in tensors if isinstance(x, torch.nn.Parameter)]
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in parameters) or options.plan is not None:
            return OpenGraph(False)
        if any(isinstance(x, DTensor) for x in parameters):
            return OpenGraph(False, "an earlier graph, as of a smaller batch, has decided for these parameters")
        if not isinstance(options.rows, str):
            return OpenGraph(False, "options['rows'] pins the rows of each rank")
        if compat.ends_in_a_break(gm) or any(x.requires_grad and not x.is_leaf for x in tensors):
            return OpenGraph(False, "the step is several graphs, since Dynamo breaks it (TORCH_LOGS=graph_breaks shows where)")
        if world_size() > 1 and session.current().mesh is not None:
            return OpenGraph(False, "an earlier graph of this process is placed already")
        return OpenGraph(True)

    def obey(self, text: str | None, key: str) -> None:
        """Raise the answer of an earlier launch, if there is one. text: as rank 0 read it. key: of the graph."""
        self.key = key
        if self.is_open and text is not None:
            try:
                found = ChosenConfiguration.model_validate_json(text)
            except ValidationError:
                log.warning("the cached configuration is corrupt; hpml searches again")
            else:
                raise ConfigurationsFound((found,))

    @contextmanager
    def searching(self, compiler: GraphBeingCompiled, joint: GraphModule, forward_outputs: int) -> Iterator[None]:
        """Context in which the joint graph is decided about: where it does not fit, or where a part of the mesh is open, raise
        the configurations that do."""
        traced = copy_graph(joint) if self.is_open and not compiler.alone else joint
        if self.is_open and leaves_axes_open(compiler.options, world_size()):
            self.searched = True
            _look_once(compiler, traced, forward_outputs)
            raise ConfigurationsFound(from_rank_0(lambda: _searched(compiler, traced, forward_outputs, None)))
        self.traced = traced, forward_outputs
        try:
            yield
        except Infeasible as error:
            if not self.is_open:
                if self.why and this_rank() == 0:
                    log.warning("%s: hpml chooses no microbatches and stages: %s", compiler.name, self.why)
                raise
            refusal, self.searched = error.with_traceback(None), True  # its frames hold graphs
            found = from_rank_0(lambda: _searched(compiler, traced, forward_outputs, refusal))
            raise ConfigurationsFound(found, refusal) from None
        finally:
            self.traced = None

    def reconsidered(self, compiler: GraphBeingCompiled, decided: DecidedStep) -> DecidedStep:
        """The decision, which fits; where stages or microbatches are faster by measured prices, raise those configurations."""
        record, traced = decided.record, self.traced
        if not self.is_open or compiler.alone or record is None or traced is None or compiler.options.stage_ranks > 1:
            return decided
        found = from_rank_0(lambda: _faster(compiler, *traced, record))
        if not found:
            return decided
        self.searched = True
        raise ConfigurationsFound(found, fits=True)

    def read(self, key: str) -> str | None:
        """The answer of an earlier launch, unchecked."""
        if not self.is_open or not self.reads or not key or this_rank():
            return None
        try:
            return plan_database.get(_named(key))
        except BadInput as error:
            warn_of_cache("the plan cache cannot be read; hpml searches again", error)
            return None

    def keep(self, chosen: ChosenConfiguration) -> None:
        """Write the answer for later launches."""
        if self.key and this_rank() == 0:
            try:
                plan_database.put(_named(self.key), chosen.model_dump_json())
            except BadInput as error:
                warn_of_cache("this configuration cannot be cached; the next launch searches again", error)


DECIDED = OpenGraph(False)


def _named(key: str) -> str:
    return plan_database.digest_of((key, "configuration"))


def _look_once(compiler: GraphBeingCompiled, joint: GraphModule, forward_outputs: int) -> None:
    """Run the quick profile on all ranks, by which the search prices configurations, if it is wanted."""
    from hpml_compiler.compile.decide.running_ranks import look_once  # here: nothing plans where a graph is cached

    captured = _captured(compiler, joint, forward_outputs)
    look_once(lambda: captured.whole[0], compiler.options, compiler.cluster)


def _searched(compiler: GraphBeingCompiled, joint: GraphModule, forward_outputs: int, refusal: Infeasible | None,
              ) -> tuple[ChosenConfiguration, ...]:
    """Configurations under which the graph may fit. Raises BadInput and Infeasible."""
    if refusal is not None and _is_hopeless(compiler):
        raise refusal
    if refusal is not None and compiler.alone:
        return _of_one_device(compiler, refusal)
    from hpml_compiler.planner.joint.graph_search import search_graph  # here: nothing plans where a graph is cached

    return search_graph(_captured(compiler, joint, forward_outputs), compiler.cluster, refusal)


def _faster(compiler: GraphBeingCompiled, joint: GraphModule, forward_outputs: int, record: GraphPlan,
            ) -> tuple[ChosenConfiguration, ...]:
    from hpml_compiler.planner.joint.graph_search import faster_configurations  # here: as above

    return faster_configurations(_captured(compiler, joint, forward_outputs), compiler.cluster, record)


def _captured(compiler: GraphBeingCompiled, joint: GraphModule, forward_outputs: int) -> CapturedModel:
    from hpml_compiler.planner.captured_model import CapturedModel  # here: as above

    given, inputs = compiler.given, compiler.inputs
    sharing = compiler.sharing or step_context(session.current().step, compiler.gm, given, compiler.options,
                                               compiler.cluster.device.memory_bytes)
    options = compiler.options.model_copy(update={"optimizer": sharing.options.optimizer})
    leaves = frozenset(k for k, x in enumerate(given) if isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf)
    traced = JointTrace(joint, [*inputs.described], forward_outputs, 0.0, leaves)
    return CapturedModel(traced, options, _trained(inputs), sharing, quick=session.current().quick)


def _trained(inputs: GraphInputs) -> dict[str, float]:
    """Bytes of the trained parameters, by name."""
    return {its.name: float(x.numel() * x.element_size()) for its, x in zip(inputs.described, inputs.examples, strict=True)
            if its.kind == "parameter" and its.trainable}


def _is_hopeless(compiler: GraphBeingCompiled) -> bool:
    """True if parameters, gradients and optimizer state do not fit, even if all of them are sharded over all devices."""
    options, memory_bytes = compiler.options, compiler.cluster.device.memory_bytes
    states = (options if compiler.sharing is None else compiler.sharing.options).resident_states
    limit = min(options.budget_bytes(memory_bytes) or memory_bytes, memory_bytes)
    return (2 + states) * sum(_trained(compiler.inputs).values()) > limit * compiler.cluster.world_size


def _of_one_device(compiler: GraphBeingCompiled, refusal: Infeasible) -> tuple[ChosenConfiguration, ...]:
    """More and more microbatches, each number at least twice the last: one device has no other choice. Raises `refusal` where
    there are none."""
    described, examples = compiler.inputs.described, compiler.inputs.examples
    shapes = [x.shape for x, its in zip(examples, described, strict=True) if its.kind == "batch"]
    rows, counts = max((shape[0] for shape in shapes if shape), default=1), [1]
    for count in range(2, rows + 1):
        if (count >= 2 * counts[-1] or count == rows) and fitting_microbatches(shapes, count, 1, speaks=False) == count:
            counts.append(count)
    if len(counts) == 1 or "microbatches" in compiler.options.model_fields_set:
        raise refusal
    return tuple(ChosenConfiguration(
        mesh=None, microbatches=count, schedule=None, virtual_stages=1, memory_budget=None,
        reason=f"{count} microbatches, since the whole batch at once does not fit ({refusal.what})") for count in counts[1:])


def with_open_decisions(gm: GraphModule, given: Sequence[Any], options: Options,
                        compile_: Callable[[GraphModule, Options, OpenGraph], Call]) -> Call:
    """Compile a graph; where it does not fit as the options say, with what they leave open decided. Raises BadInput and
    Infeasible."""
    options = options if options.plan is not None else as_placed(given, options)
    graph = OpenGraph.of(gm, given, options)
    if not graph.is_open:
        if leaves_axes_open(options, world_size()):
            raise open_axes(options, graph.why)
        return compile_(gm, options, graph)
    copy, trail = copy_graph(gm), len(session.current().trail)
    while True:
        try:
            return compile_(gm, options, graph)
        except ConfigurationsFound as answer:
            found, refusals = answer.found, [each for each in (answer.refusal,) if each is not None]
            answer_fits = answer.fits
        finally:
            graph.is_open = False  # what is compiled again while the script runs is as the options say
        for chosen in found:
            del session.current().trail[trail:]  # as in later launches
            try:
                call = compile_(copy_graph(copy), chosen.options(options), DECIDED)
            except Infeasible as error:
                refusals.append(error.with_traceback(None))
            except BadInput as error:  # as by fewer rows in a microbatch than loss_chunks
                log.info("%s: %s", chosen.reason, error.what)
            else:
                _note(graph, chosen)
                return call
        if answer_fits:
            return compile_(copy_graph(copy), options, DECIDED)
        if graph.searched:
            raise min(refusals, key=lambda each: each.smallest_budget_bytes or math.inf)
        log.info("the cached configuration does not fit any more; hpml searches again")
        gm, graph = copy_graph(copy), OpenGraph(True, reads=False)


def _note(graph: OpenGraph, chosen: ChosenConfiguration) -> None:
    """Note what was decided: in the session, for the next launch and for the user."""
    current = session.current()
    current.rejected.extend(chosen.rejected)
    if chosen.mesh is not None:
        current.chosen[chosen.axes] = chosen
    if graph.searched:
        graph.keep(chosen)
    if this_rank() == 0:
        earlier = "" if graph.searched else ", as in an earlier launch"
        log.warning("hpml chose %s%s", chosen.reason, earlier)
