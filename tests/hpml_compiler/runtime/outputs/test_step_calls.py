"""The script's loss as a part of the step: losses, gradients and parameters equal to one device's eager run, whatever the
script does between the model and backward."""
from __future__ import annotations

import copy
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import hpml_compiler
from hpml_compiler.compile.wrapper import loss_of_script
from hpml_compiler.runtime.outputs.deferred_output import watch_deferred
from hpml_compiler.runtime.outputs.loss_memory import LossMemories
from hpml_compiler.runtime.outputs.output_wrapper import OutputUses
from hpml_compiler.runtime.outputs.recorded_output import watch_autograd
from hpml_compiler.runtime.watchdog.barrier_check import RankDiverged
from passes.errors import HpmlError, Infeasible
from passes.session_state import state_of
from tests.helpers.frozen import fresh
from tests.hpml_compiler.runtime.common import Doubled, full

X = torch.linspace(-1, 1, 64 * 16, dtype=torch.float64).view(64, 16).sin()
Y = torch.arange(64) % 40
SOFT = torch.linspace(-3, 3, 64 * 256).double().view(64, 256).sin().softmax(-1)
IN_STEP, ALONE = "in the step", "alone"


class Net(nn.Module):
    def __init__(self, drop: float = 0.0, norm: bool = False, out: int = 256) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(16, 32).double(), nn.Linear(32, out).double()
        self.norm = nn.BatchNorm1d(32).double() if norm else nn.Identity()
        self.drop = drop

    def forward(self, x):
        return self.head(self.norm(F.dropout(torch.tanh(self.body(x)), self.drop, self.training)))


class Loop:
    """A training loop. call: the compiled model, or the model itself."""

    def __init__(self, scene, call, model, rank):
        self.scene, self.call, self.model, self.rank = scene, call, model, rank
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        self.kept, self.k = [], 0

    def run(self, steps):
        found = []
        for self.k in range(steps):
            found += self.scene(self)
            if not (self.scene is accumulated and self.k % 2):
                self.optimizer.step()
                self.optimizer.zero_grad()
        found += [*self.kept, *self.model.state_dict().values(), torch.rand(3)]
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: full(t).detach().clone(), found)


def plain(t):
    loss = F.cross_entropy(t.call(X), Y)
    loss.backward()
    return [loss]


def kept_logits(t):
    z = t.call(X)
    loss = F.cross_entropy(z, Y)
    loss.backward()
    with torch.no_grad():
        right = (z.argmax(-1) == Y).double().mean()
    t.kept.append(z.detach()[:2])
    return [loss, right, z.max(), z.logsumexp(-1).mean().item()]


def metrics_first(t):
    z = t.call(X)
    with torch.no_grad():
        right = (z.argmax(-1) == Y).double().mean().item()
    loss = F.cross_entropy(z, Y)
    loss.backward()
    return [loss, right]


def metrics_between(t):
    z = t.call(X)
    loss = F.cross_entropy(z, Y)
    if t.rank == 0:
        str(loss)
    with torch.no_grad():
        right = (z.argmax(-1) == Y).double().mean().item()
    found = z.detach().sum(0).numpy().copy()
    (loss / 2).backward()
    return [loss.item(), right, torch.tensor(found), (z.argmax(-1) == Y).sum()]


def warm_up(t):
    z = t.call(X)
    loss = F.cross_entropy(z, Y)
    if t.k >= 4:
        loss = loss + 0.1 * F.mse_loss(z.softmax(-1), SOFT)
    loss.backward()
    return [loss]


def several(t):
    z = t.call(X)
    first, second = F.cross_entropy(z, Y), (z ** 2).mean()
    loss = first + 0.1 * second + 1e-3 * t.model.head.weight.square().sum()
    loss.backward()
    return [loss, first.item(), second]


def evaluated(t):
    found = plain(t)
    if t.k % 2:
        t.model.eval()
        with torch.no_grad():
            found.append(F.cross_entropy(t.call(X), Y))
        t.model.train()
    return found


def twice(t):
    z = t.call(X)
    F.cross_entropy(z, Y).backward(retain_graph=True)
    F.mse_loss(z.softmax(-1), SOFT).backward()
    return []


def of_two_sizes(t):
    rows = 32 if t.k % 2 else 64  # Dynamo captures the second with symbolic sizes
    loss = F.cross_entropy(t.call(X[:rows]), Y[:rows])
    loss.backward()
    return [loss]


def accumulated(t):
    loss = F.cross_entropy(t.call(X), Y) / 2
    loss.backward()
    return [loss.detach()]


def scaled(t):
    t.scaler = getattr(t, "scaler", None) or torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    loss = F.cross_entropy(t.call(X), Y)
    t.scaler.scale(loss).backward()
    t.scaler.unscale_(t.optimizer)
    norm = nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
    t.scaler.step(t.optimizer)
    t.scaler.update()
    return [loss, norm, t.scaler.get_scale()]


def noisy(t):
    z = t.call(X)
    loss = F.mse_loss(z, torch.randn_like(z) if t.model.drop and t.scene is noisy else SOFT)
    loss.backward()
    return [loss]


def dropped(t):
    return plain(t)


def normed(t):
    return plain(t)


def changed_target(t):
    z, target = t.call(X), Y.clone()
    target.fill_(t.k)
    loss = F.cross_entropy(z, target)
    loss.backward()
    target.zero_()
    return [loss]


def changed_parameter(t):
    z = t.call(X)
    with torch.no_grad():
        t.model.head.bias.mul_(0.9)
    loss = F.cross_entropy(z, Y)
    loss.backward()
    return [loss]


def changed_view(t):
    z = t.call(X)
    t.model.head.bias.detach().view(16, 16).t().mul_(0.9)
    loss = F.cross_entropy(z, Y)
    loss.backward()
    return [loss]


def again(t):
    loss = F.cross_entropy(t.call(X), Y)
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss]


def asked(t):
    loss = F.cross_entropy(t.call(X), Y)
    for p, g in zip(t.model.parameters(), torch.autograd.grad(loss, list(t.model.parameters())), strict=True):
        p.grad = g
    return [loss]


def asked_between(t):
    z = t.call(X)
    by, = torch.autograd.grad(F.cross_entropy(z, Y), z, retain_graph=True)
    z.backward(by)
    return [by]


def asked_after(t):
    z = t.call(X)
    loss = F.cross_entropy(z, Y)
    loss.backward(retain_graph=True)
    by, = torch.autograd.grad(loss, z)
    return [loss, by]


def hooked(t):
    z = t.call(X)
    z.register_hook(lambda g: 2 * g)
    F.cross_entropy(z, Y).backward()
    return []


def failing(t):
    try:
        z = t.call(X)
        if t.k == 3:
            raise KeyError
        loss = F.cross_entropy(z, Y)
        loss.backward()
    except KeyError:
        return []
    return [loss]


def saved(t):
    z = t.call(X)
    state = copy.deepcopy({k: full(v).clone() for k, v in t.model.state_dict().items()})
    loss = F.cross_entropy(z, Y)
    loss.backward()
    return [loss, *state.values()]


def own_loop(t):
    z = t.call(X)
    p = z.log_softmax(-1)
    loss = -(p.gather(1, Y[:, None]).squeeze(1) * (Y > 3)).sum() / (Y > 3).sum()
    assert loss.requires_grad and loss.shape == () and p.shape == z.shape
    loss.backward()
    return [loss, p.mean().detach(), p[0]]


def checkpointed(t):
    loss = torch.utils.checkpoint.checkpoint(lambda z: F.cross_entropy(z, Y), t.call(X), use_reentrant=False)
    loss.backward()
    return [loss]


def small_and_large(t):
    z = t.call(X)
    small, large = (z * SOFT).sum(-1), z @ SOFT.T
    loss = F.cross_entropy(torch.cat([small[:, None], large, z], 1), Y)
    loss.backward()
    return [loss, small.detach()]


def two_calls(t):
    t.layer = getattr(t, "layer", None) or nn.Linear(256, 256).double()
    one, other = t.layer(t.call(X)), t.layer(t.call(X.flip(0)))
    loss = F.mse_loss(one, SOFT) + F.mse_loss(other, SOFT)
    loss.backward()
    return [loss]


def taken_between(t):
    t.size_of = vars(t).get("size_of") or torch.compile(lambda z: z.square().mean(), backend="eager")
    z = t.call(X)
    apart = (z - SOFT).abs()
    loss = t.size_of(z) + apart.mean()
    loss.backward()
    return [loss]


SCENES = {plain: IN_STEP, kept_logits: IN_STEP, metrics_first: ALONE, metrics_between: IN_STEP, warm_up: IN_STEP,
          several: IN_STEP, evaluated: IN_STEP, twice: ALONE, of_two_sizes: IN_STEP, accumulated: IN_STEP, scaled: IN_STEP,
          noisy: ALONE, dropped: IN_STEP, normed: ALONE, changed_target: IN_STEP, changed_parameter: ALONE, again: IN_STEP,
          asked: IN_STEP, asked_between: ALONE, asked_after: ALONE, hooked: ALONE, failing: IN_STEP, saved: IN_STEP,
          own_loop: IN_STEP, checkpointed: ALONE, small_and_large: IN_STEP, two_calls: ALONE, taken_between: ALONE,
          changed_view: ALONE}
USES = {plain: (1, set()), kept_logits: (7, {"argmax", "max", "logsumexp"}), metrics_first: (7, {"argmax"})}
"""Calls, of 7, in which the logits are made, and functions that the script calls on them; with a mesh of two ranks."""


def run_scenes(rank, options, names, told=False):
    torch._functorch.config.donated_buffer = False  # as a script must that runs a compiled model's backward twice
    for scene, how in SCENES.items():
        if names and scene.__name__ not in names:
            continue
        start, made = time.perf_counter(), {"drop": 0.5 if scene in (noisy, dropped) else 0.0, "norm": scene is normed}
        expected, model = Net(**made), Net(**made)
        torch.manual_seed(7)
        want = Loop(scene, expected, expected, 0).run(7)
        hpml_compiler.reset()
        call = torch.compile(model, backend="hpml", options={"compiler": "eager", "monitor": False, **options})
        torch.manual_seed(7)
        found = Loop(scene, call, model, rank).run(7)
        torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-12,
                                   msg=lambda told, scene=scene: f"{scene.__name__}: {told}")
        memory = state_of(LossMemories)[0]
        if told:
            print(f"{scene.__name__:20} {time.perf_counter() - start:.1f} s, {len(memory.losses)} losses, "
                  f"{memory.successes} learned, {memory.failures} failed, {memory.stopped!r}")
        assert {bool(each.losses) for each in state_of(LossMemories)} == {how == IN_STEP}, (scene.__name__, memory.stopped)
        if not options.get("mesh"):
            continue
        if scene in USES and options == {"mesh": {"dp": 2}}:
            use = next(iter(memory.uses.values()))
            where = {line.split(" at ")[0] for line in (*use.reads, *use.gathers)}
            assert (use.calls, use.made, where) == (7, *USES[scene]), (scene, use)
            assert all(" at test_step_calls.py:" in line for line in (*use.reads, *use.gathers)), use
        shown = {graph.name for graph in hpml_compiler.last_plan().step_graphs}
        alone = {each.name for each in state_of(LossMemories)}
        fits = shown and shown.isdisjoint(alone) and len(shown) <= len(alone)  # of two sizes, the latest counts
        assert fits if how == IN_STEP else shown >= alone, scene.__name__


ALL = [scene.__name__ for scene in SCENES]


@pytest.mark.parametrize(("options", "names"), [
    ({"mesh": {"dp": 2}}, ALL[::2]), ({"mesh": {"dp": 2}}, ALL[1::2]),
    ({"mesh": {"tp": 2}, "loss_chunks": 4}, ["plain", "kept_logits"]),
    ({"mesh": {"dp": 2}, "recompute": "full"}, ["several"]),
    ({"mesh": {"dp": 2}, "zero": 3, "microbatches": 4}, ["several", "of_two_sizes"]),
    ({"mesh": {"pp": 2}, "microbatches": 4, "schedule": "1f1b"}, ["kept_logits", "warm_up", "dropped"])])
def test_every_scene_is_as_on_one_device(launch, options, names):
    launch(run_scenes, world_size=2, args=(options, names), timeout_s=300)


@pytest.mark.parametrize(("options", "names"), [
    ({"loss_chunks": 4}, [*ALL[::3], "of_two_sizes"]), ({"microbatches": 4}, ["several"]),
    ({"loss_chunks": 4, "memory_budget": "4MB"}, ["kept_logits"])])
def test_on_one_device_the_loss_is_part_of_the_step_where_that_frees_memory(options, names):
    torch._dynamo.reset()  # loads the module of the next line
    with torch._functorch.config.patch(donated_buffer=False):
        run_scenes(0, options, names)


def read_first(t):
    z = t.call(X)
    z.mean().item()
    F.cross_entropy(z, Y).backward()
    return []


@pytest.mark.parametrize(("scene", "kib", "chunks", "told"), [
    (plain, 300, 8, None), (read_first, 300, 8, "the script reads an output before its loss; without it, the step needs at"),
    (plain, 128, 8, r"cannot be compiled \(Infeasible: .*; without it"), (plain, 430, 1, "")])
def test_a_budget_counts_from_the_step_on_that_has_the_loss(scene, kib, chunks, told, monkeypatch, caplog):
    """told: what is said where it cannot be met. The graph alone needs 422 KiB; with its loss 264 in chunks, else 454."""
    monkeypatch.setattr(loss_of_script, "frees_memory", lambda gm, options: True)
    torch._dynamo.reset()
    hpml_compiler.reset()
    expected, model = Net(), Net()
    call = torch.compile(model, backend="hpml", options={
        "compiler": "eager", "optimizer": "sgd", "memory_budget": kib * 1024, "loss_chunks": chunks, "microbatches": 1})
    loops = [Loop(scene, *each, 0) for each in ((expected, expected), (call, model))]
    for each in loops:
        each.optimizer = torch.optim.SGD(each.model.parameters(), 0.1)
    if told:
        with pytest.raises(Infeasible, match=told):
            loops[1].run(7)
        return
    want, found = [each.run(4)[:-1] for each in loops]
    torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-12)
    memory = state_of(LossMemories)[0]
    if told is None:
        assert "the first step, which records the loss, takes at least that much" in caplog.text and memory.losses
        assert hpml_compiler.last_plan().peak.bytes <= kib * 1024
    else:  # the loss stays outside, and the graph alone is within the budget
        assert "Infeasible: the step needs at least" in memory.stopped and not memory.losses


def loss_again(z):
    return F.cross_entropy(z, Y)


def by_checkpoint(reentrant):
    return lambda t: [_backward(torch.utils.checkpoint.checkpoint(loss_again, t.call(X), use_reentrant=reentrant))]


def by_function(t):
    return [_backward(F.cross_entropy(Doubled.apply(t.call(X)), Y))]


def by_compiled_function(t):
    t.loss_of = vars(t).get("loss_of") or torch.compile(loss_again, backend="eager")
    return [_backward(t.loss_of(t.call(X)))]


def _backward(loss):
    loss.backward()
    return loss


TAKEN_BY = {"hooks": (by_checkpoint(False), "cross_entropy takes its outputs under hooks of saved tensors, as torch.utils."),
            "reentrant": (by_checkpoint(True), "a read of an output comes before its loss"),
            "function": (by_function, "a read of an output comes before its loss"),
            "compiled": (by_compiled_function, "a compiled function takes an output of it")}


@pytest.mark.parametrize("how", TAKEN_BY)
def test_what_autograd_or_a_compiled_function_takes_is_computed_first(how):
    """Also in a process that has deferred outputs, later than recorded ones."""
    scene, told = TAKEN_BY[how]
    watch_autograd()
    watch_deferred()
    torch._dynamo.reset()
    hpml_compiler.reset()
    want = Loop(scene, model := Net(), model, 0).run(4)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    call = torch.compile(model := Net(), backend="hpml", options={"compiler": "eager", "microbatches": 2})
    torch.testing.assert_close(Loop(scene, call, model, 0).run(4)[:-1], want[:-1], rtol=1e-11, atol=1e-12)
    assert told in state_of(LossMemories)[0].described()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1 + (how == "compiled")


def test_a_parameter_that_is_freed_before_the_loss_is_an_error():
    torch._dynamo.reset()
    hpml_compiler.reset()
    call = torch.compile(model := Net(), backend="hpml", options={"compiler": "eager", "microbatches": 2})
    Loop(plain, call, model, 0).run(3)
    assert state_of(LossMemories)[0].losses

    z = call(X)
    model.head.bias.untyped_storage().resize_(0)

    with pytest.raises(HpmlError, match="cannot be computed any more: an input or parameter was freed since"):
        F.cross_entropy(z, Y)


def adversarial(make, judge, real):
    """Two models, of which one takes what the other returns."""
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (make, judge)]
    found = []
    for _ in range(5):
        fake = make(X)
        of_fake, of_real = judge(fake.detach()), judge(real)
        loss = F.softplus(of_fake).mean() + F.softplus(-of_real).mean()
        loss.backward()
        optimizers[1].step()
        other = F.softplus(-judge(fake)).mean()
        optimizers[0].zero_grad()
        other.backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        found += [loss.item(), other.item()]
    return found


class Block(nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()


def of_blocks(options=None):
    torch.manual_seed(0)
    blocks = [Block(256, 256).double() for _ in range(3)]
    for block in blocks if options else ():
        block.compile(backend="hpml", options=options)
    return nn.Sequential(*blocks, nn.Linear(256, 8).double())


def losses_of_blocks(model):
    """Losses of three steps, and how many graphs were compiled after each."""
    optimizer, losses, graphs = torch.optim.SGD(model.parameters(), 0.1), [], []
    torch._dynamo.utils.counters.clear()
    for _ in range(3):
        losses.append(_backward(F.cross_entropy(model(SOFT * 256), Y % 8)).item())
        optimizer.step()
        optimizer.zero_grad()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return losses, graphs


def run_compiled_takers(rank):
    options = {"compiler": "eager", "monitor": False}
    for mesh in ("dp", "tp"):
        fresh()
        own = {**options, "mesh": {mesh: 2}}
        want, (losses, graphs) = losses_of_blocks(of_blocks())[0], losses_of_blocks(of_blocks(own))
        torch.testing.assert_close(losses, want, rtol=1e-11, atol=1e-12)
        assert graphs == [4] * 3, "those of blocks and one for the calls on the last one's output"

    fresh()
    want = Loop(plain, model := Net(), model, rank).run(3)
    torch._dynamo.utils.counters.clear()
    loop = Loop(by_compiled_function, torch.compile(model := Net(), backend="hpml", options=own), model, rank)
    loop.loss_of = torch.compile(loss_again, backend="hpml", options=own)
    torch.testing.assert_close(loop.run(3)[:-1], want[:-1], rtol=1e-11, atol=1e-12)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not any(use.gathers for use in state_of(OutputUses).values())


def test_compiled_functions_take_outputs_as_they_are_in_the_first_step(launch):
    launch(run_compiled_takers, world_size=2)


def run_rest(rank):
    options = {"compiler": "eager", "monitor": False, "mesh": {"dp": 2}}
    torch.manual_seed(1)
    judge = nn.Sequential(nn.Linear(256, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    want = adversarial(Net(), copy.deepcopy(judge), SOFT)
    found = adversarial(*[torch.compile(each, backend="hpml", options=options) for each in (Net(), judge)], SOFT)
    torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-12)

    model = Net()
    call = torch.compile(model, backend="hpml", options=options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop = Loop(plain, call, model, rank)
    loop.run(2)
    memory = state_of(LossMemories)[-1]
    assert memory.losses and hpml_compiler.last_plan().graphs[-1].name != memory.name

    def changed():
        z = call(X)
        with torch.no_grad():
            model.head.bias.add_(1)
        F.cross_entropy(z, Y)

    with pytest.raises(HpmlError, match="an input or parameter was changed in place since the model was called"):
        changed()
    z = call(X)
    known = z.shape, z.requires_grad, len(z)
    F.mse_loss(call(X), SOFT).backward()
    expected = Net()
    expected.load_state_dict({name: full(value).clone() for name, value in model.state_dict().items()})
    z = call(X)
    optimizer.step()  # before it, z is computed
    torch.testing.assert_close(full(z.detach()), expected(X).detach(), rtol=1e-11, atol=1e-12)
    assert known == ((64, 256), True, 64)

    z = call(X)
    loss = F.cross_entropy(z, Y)
    assert type(loss) is torch.Tensor
    for ask in (lambda: z.register_hook(print), z.retain_grad, lambda: torch.autograd.grad(loss, z)):
        with pytest.raises(HpmlError, match="after its loss was computed: its gradient does not pass through"):
            ask()
    loss.backward()
    loop.optimizer.step()  # before it, z is made: the script held none in the steps before
    torch.testing.assert_close(z.mean().item(), z.detach().mean().item())
    assert len(memory.losses) == 1

    for _ in range(2):
        z = call(X)
        F.cross_entropy(z, Y).backward()
        want = z.detach().mean().item()
        loop.optimizer.step()
    assert len(memory.losses) == 2 and z.mean().item() == z.detach().mean().item() == want  # as before the step
    with pytest.raises(HpmlError, match="was changed in place since"):
        z.mean().backward()

    z = call(X)
    dist.barrier()
    time.sleep(rank)
    with pytest.raises(RankDiverged, match=f"rank {rank} is alone in"):
        z.mean().item() if rank else z.tolist()


def test_two_models_and_what_would_be_wrong_is_told(launch):
    launch(run_rest, world_size=2, timeout_s=200)
