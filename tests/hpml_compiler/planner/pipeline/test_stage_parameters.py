"""Parameters of a pipeline's stages -> each on the rank whose stages read it, with its gradient and optimizer state, in all
that a script does with them what one device gives."""
from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

import hpml_compiler
from hpml_compiler.runtime.placements.single_rank_placement import owner_of
from tests.hpml_compiler.compile.test_pipeline_parallel import Tied, batch
from tests.hpml_compiler.runtime.common import full

OPTIONS = {"mesh": {"pp": 2}, "compiler": "eager", "microbatches": 2}
ZBV = {**OPTIONS, "schedule": "zbv", "virtual_stages": 2}


def model_of(kind=Tied):
    torch.manual_seed(0)
    return kind().double()


def same(ours, theirs):
    torch.testing.assert_close(full(ours).detach(), full(theirs).detach(), rtol=1e-9, atol=1e-11)


def same_model(ours, theirs):
    for (name, a), (other, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other and (a.grad is None) == (b.grad is None), name
        same(a, b)
        if b.grad is not None:
            same(a.grad, b.grad)


def lines(model, call, optimizer, split):
    """What a script does, line by line; yields values. split: stages are, where gradients at other outputs are refused."""
    call(*batch())[0].backward()
    yield nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    call(*batch(6))[0].backward()  # another size: another graph
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()
    first, second = call(*batch())[0], call(*batch())[0]
    (first + second + 1e-3 * sum(p.square().sum() for p in model.parameters())).backward()
    yield first + second
    optimizer.step()
    optimizer.zero_grad()
    loss, logits = call(*batch())
    (loss if split else loss + logits.square().mean()).backward()  # a gradient at another output
    optimizer.step()
    model.eval()
    with torch.no_grad():
        yield call(*batch(4))[1]
    call(*batch(4))[0].backward()
    model.train()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9).add_(p.grad.abs().mean())
        model.blocks[2][0].weight[3] = 0.25
        yield sum(p.abs().max() for p in model.parameters())
    yield model.blocks[3][0].weight.T @ model.blocks[0][0].weight


def as_on_one_device(rank, options):
    theirs = model_of()
    ours = copy.deepcopy(theirs)
    found = []
    for model, call in ((ours, torch.compile(ours, backend="hpml", options=options)), (theirs, theirs)):
        torch.manual_seed(3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5)
        found.append(list(lines(model, call, optimizer, len(options["mesh"]) > 1)))
    for a, b in zip(*found, strict=True):
        same(a, b)
    same_model(ours, theirs)
    same_model(copy.deepcopy(ours), theirs)
    state = hpml_compiler.full_state_dict(ours)
    if rank == 0:
        for name, value in theirs.state_dict().items():
            same(state[name], value)
    with torch.no_grad():
        for p in theirs.parameters():
            p.neg_()
    ours.load_state_dict(theirs.state_dict())
    same_model(ours, theirs)


@pytest.mark.parametrize(("ranks", "options"), [
    (2, OPTIONS), (2, ZBV), (4, {**OPTIONS, "mesh": {"pp": 2, "dp": 2}, "zero": 3})])
def test_a_script_does_with_them_what_it_does_on_one_device(launch, ranks, options):
    launch(as_on_one_device, ranks, (options,))


def shares(rank, options):
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    torch.compile(model, backend="hpml", options=options)(*batch())[0].backward()
    optimizer.step()
    by_torch = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, p in model.named_parameters():
        same(by_torch[name], p)
    found = {}
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor) and isinstance(p.grad, DTensor)
        state = optimizer.state[p]
        parts = [each._local_tensor for each in (p, p.grad, state["exp_avg"], state["exp_avg_sq"])]
        assert len({part.shape for part in parts}) == 1
        found[name] = owner_of(p), parts[0].numel() / p.numel(), sum(part.untyped_storage().nbytes() for part in parts)
    return found


@pytest.mark.parametrize(("options", "of_table", "of_blocks"), [(OPTIONS, None, (0, 0, 1, 1)), (ZBV, 0, (0, 1, 1, 0))])
def test_each_is_on_one_rank_but_what_several_read(launch, options, of_table, of_blocks):
    """The table is looked up in the first stage and multiplied by in the last."""
    first, second = launch(shares, 2, (options,))
    for name in first:
        owner, here, _ = first[name]
        assert owner == second[name][0] == (of_table if name == "table.weight" else of_blocks[int(name.split(".")[1])])
        assert (here, second[name][1]) == ((1, 1) if owner is None else (1 - owner, owner))
        assert all((each[name][2] == 0) == (each[name][1] == 0) for each in (first, second))


class Half(nn.Module):
    """Its numbers of few bits need a loss scale."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        with torch.autocast("cpu", torch.float16):
            for block in self.blocks:
                x = x + block(x).tanh()
        return x.float().square().mean() * 1e-6


def scaled(rank):
    theirs = model_of(Half).float()
    ours = copy.deepcopy(theirs)
    for model, call in ((ours, torch.compile(ours, backend="hpml", options=OPTIONS)), (theirs, theirs)):
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=10.0), torch.amp.GradScaler("cpu", init_scale=2.0**20)
        for k in range(3):
            optimizer.zero_grad()
            x = torch.linspace(-1, 1, 64).view(8, 8) + (float("inf") if k == 1 else 0.0)
            scaler.scale(call(x)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**19  # one step was left out, on all ranks
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(full(a), b, rtol=1e-2, atol=1e-3)


def test_a_loss_scale_meets_all_stages(launch):
    launch(scaled, 2)


def saved(rank, folder):
    model = model_of()
    torch.compile(model, backend="hpml", options=OPTIONS)(*batch())[0].backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    expected = {name: full(p).clone() for name, p in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    for name, p in model.state_dict().items():
        same(p, expected[name])
    return {name: value.tolist() for name, value in expected.items()}


def test_a_sharded_checkpoint_is_loaded_by_any_number_of_ranks(launch, tmp_path):
    expected, _ = launch(saved, 2, (str(tmp_path / "state"),))
    model = model_of()
    dcp.load({"model": model.state_dict()}, checkpoint_id=str(tmp_path / "state"))
    for name, value in model.state_dict().items():
        assert value.tolist() == expected[name]
