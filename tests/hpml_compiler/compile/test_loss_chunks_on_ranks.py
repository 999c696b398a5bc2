"""A loss in chunks on two ranks: with a batch or a vocabulary split, ZeRO, microbatches and pipeline stages, as eager."""
from __future__ import annotations

import logging
from typing import Any

import torch
from torch.fx import GraphModule

import hpml_compiler
from passes.graph.fx_nodes import is_collective
from passes.transforms.loss_chunks import chunk_loss
from tests.helpers import heads
from tests.helpers.ranks import run_ranks

CASES: list[tuple[dict[str, Any], str]] = [
    ({"mesh": {"dp": 2}, "loss_chunks": 16}, "shifted and smoothed"),  # of 4 rows of 23 tokens
    ({"mesh": {"dp": 2}, "zero": 3, "loss_chunks": 2}, "tied, shifted, capped"),
    ({"mesh": {"dp": 2}, "microbatches": 2, "loss_chunks": 2}, "bias"),
    ({"mesh": {"dp": 2}, "memory_budget": "1GiB", "loss_chunks": 4}, "two heads"),
    ({"mesh": {"tp": 2}, "loss_chunks": 12}, "shifted"),
    ({"mesh": {"tp": 2}, "loss_chunks": 8}, "smoothed"),
    ({"mesh": {"tp": 2}, "loss_chunks": 3}, "distilled and labels"),
    ({"mesh": {"pp": 2}, "microbatches": 2, "loss_chunks": 2}, "tied"),
]


def step(call: Any, model: torch.nn.Module) -> list[torch.Tensor]:
    loss = call(*heads.batch())
    (3 * loss).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *(x.full_tensor() if isinstance(x, torch.distributed.tensor.DTensor) else x for x in gradients)]


def reported(options: dict[str, Any], name: str) -> tuple[str, ...]:
    hpml_compiler.reset()
    model = heads.make(name)
    compiled = torch.compile(model, backend="hpml", options={"compiler": "eager", **options})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        compiled(*heads.batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return hpml_compiler.last_report().losses


def steps(rank: int) -> list[str]:
    """Messages about chunks of this rank, after a check of all gradients."""
    heads.WIDTH, heads.WORDS, heads.TOKENS = 16, 4096, 24  # else logits are gathered, which takes no time
    logger, said = logging.getLogger("hpml"), list[str]()
    logger.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    rewrite, idle = chunk_loss.chunk_loss, list[str]()

    def noting(gm: GraphModule, *rest: Any) -> int | None:
        made = rewrite(gm, *rest)
        if made is not None:
            idle.extend(node.name for node in gm.graph.nodes if is_collective(node.target) and not node.users)
        return made

    chunk_loss.chunk_loss = noting
    for options, name in CASES:
        torch.compiler.reset()
        hpml_compiler.reset()
        said.append(name)
        one, several = heads.make(name), heads.make(name)
        call = torch.compile(several, backend="hpml", options={"compiler": "eager", **options})
        found = step(call, several)
        for a, b in zip(found, step(one, one), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        recorded = hpml_compiler.last_plan().graphs[-1].loss_chunks
        assert recorded is not None and recorded.count == options["loss_chunks"], (options, recorded)
        if options == CASES[0][0]:
            with torch.no_grad():
                call(*heads.batch())
            assert not any("not computed in chunks" in each for each in said), "an evaluation has no gradients"
    line = f"the loss is computed in {CASES[0][0]['loss_chunks']} chunks of rows"
    assert any(line in each for each in reported(*CASES[0]))
    assert not idle, f"collectives of the loss at once, whose results nothing reads: {idle}"
    return [message for message in said if message in heads.HEADS or "chunks of rows" in message]


def test_two_ranks_equal_eager(tmp_path):
    both = run_ranks(tmp_path, steps, 2)
    for options, name in CASES:
        following = [said[said.index(name) + 1] for said in both if said.index(name) + 1 < len(said)]
        assert any(f"in {options['loss_chunks']} chunks" in message for message in following), (options, name, both)
