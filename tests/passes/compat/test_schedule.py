"""Kernels and what they wait for -> their order."""
from __future__ import annotations

import torch
from torch._inductor.codegen.cpp import CppScheduling

from passes.compat.schedule import as_in_graph, first_come


def test_of_what_can_run_the_first_in_the_graph_runs_next():
    assert first_come([30, 10, 20], [set(), set(), set()]) == [1, 2, 0]


def test_what_waits_does_not_bring_forward_what_it_waits_for():
    """0 stands first and waits for 3, which stands last: the others run before, and 1 does not wait with it."""
    assert first_come([0, 5, 6, 9], [{3}, set(), {1}, set()]) == [1, 2, 3, 0]


def test_settings_of_inductor_are_what_they_were_afterwards():
    usual, reuse = CppScheduling.ready_to_flush, torch._inductor.config.allow_buffer_reuse
    with as_in_graph():
        assert CppScheduling.ready_to_flush is not usual and not torch._inductor.config.allow_buffer_reuse
    assert CppScheduling.ready_to_flush is usual and torch._inductor.config.allow_buffer_reuse == reuse
