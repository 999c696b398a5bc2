"""A model wrapped in DDP or FSDP, in either order -> one device's gradients, or an error that says so."""
from __future__ import annotations

import copy
import functools
import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import hpml_compiler
from hpml_compiler.integrations import ddp_fsdp_guard
from hpml_compiler.integrations.ddp_shim import SplitDDP
from hpml_compiler.session import session
from tests.hpml_compiler.runtime.common import assert_close, full

X = torch.linspace(-1, 1, 8 * 6, dtype=torch.float64).view(8, 6).sin()
Y = torch.linspace(1, -1, 8 * 4, dtype=torch.float64).view(8, 4).cos()
compile_it = functools.partial(torch.compile, backend="hpml", options={"compiler": "eager"})


class WithLoss(nn.Module):
    """Returns its loss, as models of transformers do, and one row of logits for each of the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()

    def forward(self, x, y=None):
        logits = self.net(x)
        return {"logits": logits} if y is None else {"loss": F.mse_loss(logits, y), "logits": logits}


def afresh() -> None:
    torch._dynamo.reset()
    session.reset()


def after_first_call(model: nn.Module) -> nn.Module:
    compiled = compile_it(model)
    compiled(X, Y)["loss"].backward()
    model.zero_grad()
    return DDP(compiled)


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="hpml", options={"compiler": "eager"})
    return DDP(model)


WRAPS = {
    "DDP(compiled)": lambda model: DDP(compile_it(model)),
    "compiled(DDP)": lambda model: compile_it(DDP(model)),
    "DDP(compiled) after its first call": after_first_call,
    "DDP(model) after model.compile()": compiled_in_place,
}


def train(model, call, rows, scale=1.0):
    """What a script sees: losses, then the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(4):
        x, y = X.roll(step, 0)[rows], Y.roll(step, 0)[rows]
        optimizer.zero_grad()
        loss = call(x, y) * scale
        loss.backward()
        seen += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 0.5)]
        optimizer.step()
    return seen


def loss_inside(model, x, y):
    return model(x, y)["loss"]


def loss_outside(model, x, y):
    return F.mse_loss(model(x)["logits"], y)


def rows_of(rank: int) -> slice:
    return slice(4 * rank, 4 * rank + 4)


def same_as_one_device(rank):
    for number, (name, wrap) in enumerate(WRAPS.items()):
        loss = (loss_inside, loss_outside)[number % 2]
        afresh()
        reference = WithLoss()
        model = copy.deepcopy(reference)
        if name.endswith("first call"):
            reference(X, Y)  # moves BatchNorm's statistics as well
        expected = train(reference, functools.partial(loss, reference), slice(None))
        actual = train(model, functools.partial(loss, wrap(model)), rows_of(rank))
        assert hpml_compiler.last_plan().graphs, "the backend was used"
        if loss is loss_outside:  # losses of own rows; norms are the same on all ranks
            actual = [mean_over_ranks(seen) for seen in actual]
        for ours, theirs in zip(actual, expected, strict=True):
            assert_close(ours, theirs, atol=1e-9)
        for ours, theirs in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
            assert ours[0] == theirs[0]
            assert_close(ours[1], theirs[1], atol=1e-9)


def mean_over_ranks(value):
    value = full(value).clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def test_ddp_trains_on_the_global_batch(launch):
    launch(same_as_one_device, world_size=2, timeout_s=100)


def details(rank):
    # rank 0's weights and buffers are everybody's
    torch.manual_seed(rank)
    model = nn.Linear(6, 4).double()
    wrapped = DDP(compile_it(model))
    assert isinstance(wrapped, SplitDDP) and list(wrapped.state_dict()) == ["module._orig_mod.weight", "module._orig_mod.bias"]
    torch.manual_seed(0)
    reference = nn.Linear(6, 4).double()
    assert_close(model.weight, reference.weight)
    # a loss that differs from rank to rank: the gradient is that of the mean, accumulated under no_sync too
    rows = rows_of(rank)
    with wrapped.no_sync():
        (wrapped(X[rows]).square().sum() * (rank + 1)).backward()
    wrapped(X[rows]).sum().backward()
    mean = sum((reference(X[rows_of(r)]).square().sum() * (r + 1) + reference(X[rows_of(r)]).sum()) / 2 for r in range(2))
    mean.backward()
    assert_close(model.weight.grad, reference.weight.grad, atol=1e-9)
    # uneven rows, in evaluation
    wrapped.eval()
    with torch.no_grad():
        uneven = slice(0, 3) if rank == 0 else slice(3, 8)
        assert_close(wrapped(X[uneven]), full(model(X[uneven])), atol=1e-9)
    # rows that are distributed already are the global batch
    batch = hpml_compiler.distribute_batch(X, rows="same")
    assert wrapped(batch).shape[0] == 8
    assert not isinstance(DDP(nn.Linear(2, 2)), SplitDDP)  # others are left alone


def test_ddp_in_detail(launch):
    launch(details, world_size=2)


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.head = inner, nn.Linear(4, 2).double()

    def forward(self, x):
        return self.head(self.inner(x))


def says(call) -> str:
    afresh()
    try:
        call()
    except Exception as error:
        return str(error)
    return "nothing was refused"


def sharded_after(model):
    compiled = compile_it(model)
    compiled(X).sum().backward()
    fully_shard(compiled)
    compiled(X).sum().backward()


def fsdp1(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def in_place_inside(wrap):
    def call():
        model = linear()
        wrapped = wrap(model)
        (wrapped or model).compile(backend="hpml")
        (wrapped or model)(X).sum().backward()
    return call


class Linear(nn.Linear):
    """Dynamo does not stop for a forward of torch's own."""

    def forward(self, x):
        return super().forward(x)


def linear():
    return Linear(6, 4).double()


class Transposed(nn.Linear):
    def __init__(self):
        super().__init__(6, 5, dtype=torch.float64)

    def forward(self, x):
        return super().forward(x).t()


class Mine(DDP):
    pass


REFUSED = {
    "DDP of a part": (lambda: DDP(Outer(compile_it(linear()))), "leave DDP out"),
    "a kind of DDP": (lambda: Mine(compile_it(linear())), "leave it out"),
    "mixed precision": (lambda: DDP(compile_it(linear()), mixed_precision=1), "torch.autocast"),
    "join": (lambda: DDP(compile_it(linear())).join(), "hpml_compiler.distribute"),
    "comm hook": (lambda: DDP(compile_it(linear())).register_comm_hook(None, None), "register_comm_hook"),
    "no row for a row": (lambda: DDP(compile_it(Transposed()))(X[:4]), "cannot be told"),
    "own and global rows": (lambda: DDP(compile_it(nn.Bilinear(6, 4, 2).double()))(
        hpml_compiler.distribute_batch(X, rows="same"), Y), "for all inputs"),
    "FSDP1(compiled)": (lambda: fsdp1(compile_it(linear())), "leave the wrapper out"),
    "compiled(FSDP1)": (lambda: compile_it(fsdp1(linear())), "leave the wrapper out"),
    "fully_shard(compiled)": (lambda: fully_shard(compile_it(linear()))(X), "leave the wrapper out"),
    "fully_shard(compiled) later": (lambda: sharded_after(linear()), "leave the wrapper out"),
    "compiled(fully_shard)": (lambda: compile_it(fully_shard(linear()))(X), "leave the wrapper out"),
    "fully_shard(model).compile()": (in_place_inside(fully_shard), "leave the wrapper out"),
    "step around DDP": (lambda: compile_it(lambda model, x: model(x).sum())(DDP(linear()), X), "leave the wrapper out"),
    "Trainer's count": (lambda: DDP(compile_it(linear()))(X, num_items_in_batch=torch.tensor(3)), "one_device"),
}


def refusals(rank):
    wrong = {name: said for name, (call, words) in REFUSED.items() if words not in (said := says(call))}
    assert not wrong, "\n".join(f"{name}: {said}" for name, said in wrong.items())


def test_what_is_refused_says_so(launch):
    launch(refusals, world_size=2)


def forgotten(rank):
    gc.collect()
    gc.disable()
    assert "leave the wrapper out" in says(lambda: fully_shard(compile_it(linear()))(X))
    assert ddp_fsdp_guard._wrappers(), "what was refused waits to be collected"
    afresh()
    compile_it(linear())(X).sum().backward()


def test_a_wrapper_that_is_forgotten_but_not_collected_yet_is_in_nobodys_way(launch):
    launch(forgotten, world_size=2)


def test_on_one_rank_ddp_is_left_alone(launch):
    launch(alone, world_size=1)


def alone(rank):
    model = DDP(compile_it(linear()))
    assert type(model) is DDP
    model(X).sum().backward()
    assert model.module._orig_mod.weight.grad is not None
