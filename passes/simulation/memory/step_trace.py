"""Memory trace of a step graph, with the values saved that the graph says."""
from __future__ import annotations

from dataclasses import replace

from passes.simulation.memory.memory_trace import MemoryTrace, simulate_memory
from passes.simulation.memory.step_graph_program import step_program
from passes.simulation.memory.storage_program import Microbatches, StorageProgram
from passes.simulation.step_graph import StepGraph


def trace_step(graph: StepGraph, device: str = "", recompute: bool = False, microbatches: int = 1) -> MemoryTrace:
    """The memory trace of a step graph, with the values saved that it says. device: type of the device, whose collectives may
    need workspace. recompute: backward recomputes repeated blocks (all of forward if there are none). microbatches: runs of
    forward and backward besides those of the graph's own loop."""
    program, kept = step_program(graph, device, recompute)
    added = program.bytes_of(program.gradients)
    if graph.microbatches > 1:
        program = replace(program, microbatches=Microbatches.of_loop(graph.microbatches, added, graph.at_once))
    elif microbatches > 1:
        program = replace(program, microbatches=Microbatches.of_loop(microbatches, added, True))
    return simulate_memory(program, _read_in_backward(program, kept))


def _read_in_backward(program: StorageProgram, kept: frozenset[int]) -> set[int]:
    """Those of the saved storages that backward reads, itself or to recompute what it reads: such as a copy, but not what it
    was made from."""
    found: set[int] = set()
    stack = [s for run in program.runs if run.backward for s in run.reads if program.is_forward(s)]
    seen = set(stack)
    while stack:
        storage = stack.pop()
        if storage in kept or not program.repeatable(storage):
            found.add(storage)
            continue
        more = {s for s in program.runs[program.maker(storage)].reads if program.is_forward(s)} - seen
        seen |= more
        stack += more
    return found
