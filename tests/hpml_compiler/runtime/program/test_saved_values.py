"""Backward of a step whose loss is outside -> each saved value is freed while it runs, after its last use."""
from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpml_compiler.runtime.program.microbatch_loop import LoopCalls, MicrobatchLoop, SplitForwardBackward
from hpml_compiler.runtime.program.pipeline_step import PipelineLoop
from hpml_compiler.runtime.program.stage_executor import BoxedCall, StageCallables
from passes.graph.loops.loop_parts import GraphFragment, PrologueEpilogue
from passes.pipeline.pipeline_schedule import ScheduleAction
from passes.transforms.pipeline.stage_io import StageIO

NOTHING = GraphFragment(None)
LOOP = PrologueEpilogue((NOTHING, NOTHING), (), (), (), (), (NOTHING, NOTHING), (), ())
SAVED = 3
STAGE = StageIO(0, given=(), received=(), read=(), sent=(), own_sent=(), outputs=(), gradients=(), received_back=(),
                read_back=(), sent_back=(), own_sent_back=(), fakes={})


def looped(backward: Any) -> MicrobatchLoop:
    calls = LoopCalls((None, None), lambda arguments: [], backward, (None, None), tuple(range(SAVED)))
    return MicrobatchLoop(LOOP, calls, 2)


def pipelined(backward: Any) -> PipelineLoop:
    names = tuple(f"saved_{k}" for k in range(SAVED))
    actions = [ScheduleAction("backward", 0, k) for k in range(2)]
    table: Any = SimpleNamespace(microbatches=2, stages=1, ranks=[0], actions=[actions])
    messages: Any = SimpleNamespace(finish=lambda: None, agree=lambda failed: None, device=torch.device("cpu"),
                                    share=lambda *_: [])
    stage = StageCallables(STAGE, BoxedCall(backward, (), ()), BoxedCall(backward, names, ()), saved=names)
    calls = LoopCalls((None, None), lambda arguments: [], None, (None, None))
    return PipelineLoop(LOOP, calls, table, 0, {0: stage}, messages, {}, {}, {})


@pytest.mark.parametrize("loop", [looped, pipelined])
def test_a_saved_value_is_freed_after_its_last_use(loop):
    freed: list[bool] = []

    def backward(arguments: list[Any]) -> list[Any]:
        while arguments:
            last = weakref.ref(arguments.pop())
            freed.append(last() is None)
        return []

    step = SplitForwardBackward(loop(backward), 0, [torch.zeros(1)] * 2 * SAVED)
    step.backward([torch.zeros(1) for _ in range(2 * SAVED)])
    assert freed == [True] * 2 * SAVED
