"""Steps that are timed -> nothing of a script's takes part in them."""
from __future__ import annotations

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hpml_compiler.profile.training_steps import optimizer_step


def test_hooks_for_all_optimizers_are_not_called_for_steps_that_are_timed():
    seen = []
    handles = [register_optimizer_step_pre_hook(lambda *_: seen.append("before")),
               register_optimizer_step_post_hook(lambda *_: seen.append("after"))]
    try:
        step = optimizer_step([torch.ones(2, 3)])
        step()
        assert seen == []
        mine = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
        mine.step()
        assert seen == ["before", "after"]
    finally:
        for handle in handles:
            handle.remove()
