"""Outputs beside the loss are computed when they are read, and are then what eager code has, bit for bit."""
from __future__ import annotations

import copy
import io
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import hpml_compiler
import hpml_compiler.compile.wrapper.deferred_outputs as wrapper
from hpml_compiler.runtime.outputs.deferred_output import DeferredOutput
from passes.errors import HpmlError
from passes.transforms.outputs import split_outputs
from tests.helpers.peaks import least_peak
from tests.hpml_compiler.runtime.common import Doubled

ROWS, WIDTH, WORDS = 64, 8, 512
X = torch.arange(ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH).sin()
Y = torch.arange(ROWS) * 7 % WORDS


@dataclass
class Found:
    loss: torch.Tensor
    logits: torch.Tensor
    extra: Any = None


pytree.register_pytree_node(Found, lambda found: ([found.loss, found.logits, found.extra], None),
                            lambda leaves, _: Found(*leaves))


class Net(nn.Module):
    """Kinds: a plain head; soft-capped logits in another dtype; a second head that the loss does not read; dropout before the
    head; a frozen trunk; logits that the loss changes in place; logits twice, as one object and through a cast that
    changes nothing."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.body, self.head = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WORDS).double()
        self.other = nn.Linear(WIDTH, WORDS).double() if kind == "two" else None
        if kind == "frozen":
            self.body.requires_grad_(False)

    def forward(self, x, y):
        hidden = torch.tanh(self.body(x))
        if self.kind == "dropout":
            hidden = F.dropout(hidden, 0.5, self.training)
        logits = self.head(hidden)
        if self.kind == "capped":
            logits = torch.tanh(logits / 3).float() * 3
        loss = F.cross_entropy(logits, y)
        if self.kind == "in_place":
            logits.mul_(2)
        return Found(loss, logits, self.other(hidden) if self.other is not None else logits if self.kind == "twice"
                     else logits.double() if self.kind == "same" else None)


@dataclass
class Loop:
    """A model, the call that runs it, and its optimizer."""

    call: Any
    model: nn.Module

    def __post_init__(self) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.1, weight_decay=0.5)

    def forward(self, scale: float = 1.0) -> Found:
        return self.call(X * scale, Y)

    def step(self, found: Found) -> None:
        found.loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def unread(loop):
    return [loop.forward().loss]


def at_once(loop):
    logits = loop.forward().logits
    return [logits, logits.is_leaf, logits.grad_fn is None, logits.data_ptr() == 0, logits.argmax(-1)]


def after_backward(loop):
    found = loop.forward()
    found.loss.backward()
    return [found.logits.softmax(-1)]


def after_step(loop):
    found = loop.forward()
    loop.step(found)
    return [found.logits.detach().numpy().copy(), found.logits[3]]


def after_next_forward(loop):
    first = loop.forward()
    second = loop.forward(2.0)
    loop.step(second)
    third = loop.forward(3.0)
    return [first.logits, third.logits, second.logits]


def changed_by_hand(loop):
    found = loop.forward()
    found.loss.backward()
    with torch.no_grad():
        for parameter in loop.model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)
    return [found.logits]


def changed_through_data(loop):
    found, before = loop.forward(), loop.forward()
    loop.model.head.weight.data.mul_(2)
    after = loop.forward()
    loop.model.head.weight.data = loop.model.head.weight.data * 3
    alias = loop.model.head.weight.data
    last = loop.forward()
    last.loss.backward()
    alias.zero_()
    return [found.logits, before.logits.detach(), after.logits, last.logits]


def without_backward(loop):
    found = loop.forward()
    for parameter in loop.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    loop.optimizer.step()
    return [found.logits]


def in_threads(loop):
    found, seen = loop.forward(), []
    threads = [threading.Thread(target=lambda: seen.append(found.logits.sum().item())) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return seen


def pickled(loop):
    file, found = io.BytesIO(), loop.forward()
    torch.save({"logits": found.logits, "detached": found.logits.detach()}, file)
    file.seek(0)
    return [*torch.load(file).values(), copy.deepcopy(found.logits.detach()), copy.copy(found.logits)]


def collected(loop):
    every, loose = [], []
    for k in range(6):
        found = loop.forward(1.0 + k)
        every.append(found.logits.detach())
        loose.append(found)
        loop.step(found)
    return [torch.cat(every), *(each.logits for each in loose), *(each.extra for each in loose)]


def in_other_modes(loop):
    found = loop.forward()
    with torch.no_grad():
        one = found.logits
        needs = (one * 2).requires_grad, one.requires_grad
    second = loop.forward()
    with torch.inference_mode():
        total = second.logits.sum()
    (one.sum() + second.logits.sum()).backward()
    return [one, needs, total.clone()]


def as_an_object(loop):
    found, other = loop.forward(), loop.forward()
    both = {found.logits: 1}
    same = pytree.tree_map(lambda x: x, found)
    return [torch.equal(found.logits, other.logits), len(repr(other.logits)), found.logits in both, same.logits is found.logits,
            isinstance(found.logits, torch.Tensor), found.logits.shape, len(found.logits), found.logits.device == X.device,
            found.logits.requires_grad, found.logits.dim(), found.logits.detach().requires_grad, found.logits.double()[0],
            float(f"{found.logits[0, 0]:.3f}"), bool((other.logits == found.logits).all())]


def gradient_arrives(loop):
    found = loop.forward()
    (found.loss + found.logits.square().mean()).backward()
    return []


def gradients_in_turn(loop):
    for k in range(4):
        found = loop.forward(1.0 + k)
        (found.logits.sin().sum() if k % 2 else found.loss).backward()
        loop.optimizer.step()
    return []


def backward_again(loop):
    found = loop.forward()
    found.loss.backward(retain_graph=True)
    found.logits.sin().sum().backward(retain_graph=True)
    torch.autograd.backward([found.logits], [torch.ones_like(found.logits)])
    return []


def asked_gradients(loop):
    found = loop.forward()
    by = torch.autograd.grad(found.logits.square().sum(), [p for p in loop.model.parameters() if p.requires_grad],
                             retain_graph=True, allow_unused=True)
    at = torch.autograd.grad(found.logits.sin().sum(), found.logits, retain_graph=True)
    found.logits.retain_grad()
    found.logits.register_hook(lambda gradient: gradient * 2)
    found.logits.sum().backward()
    return [*by, *at, found.logits.grad]


def changed_in_place(loop):
    found = loop.forward()
    found.loss.backward()
    apart, view = found.logits.detach(), found.logits.detach()[2]
    same = found.logits.mul_(2)
    view.zero_()
    return [same is found.logits, found.logits, apart]


def scaled(loop):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    found = loop.forward()
    scaler.scale(found.loss).backward()
    scaler.step(loop.optimizer)
    scaler.update()
    return [found.logits.detach()]


def given_to_a_compiled_function(loop):
    accuracy = torch.compile(lambda logits: (logits.argmax(-1) == Y).double().mean() + logits.sum() * 0, backend="aot_eager",
                             fullgraph=True)
    values = []
    for _ in range(2):
        found = loop.forward()
        values.append(accuracy(found.logits))
        (found.loss + values[-1]).backward()
    return values


def with_a_compiled_step(loop):
    optimizer, values = torch.optim.SGD(loop.model.parameters(), lr=0.1), []
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for k in range(3):
        values.append(loop.forward(1.0 + k))
        values[-1].loss.backward()
        step()
    return [found.logits for found in values]


def by_compiled_autograd(loop):
    values = []
    with torch._dynamo.config.patch(compiled_autograd=True):
        for k in range(3):
            values.append(loop.forward(1.0 + k))
            torch.compile(lambda loss: loss.backward(), backend="eager")(values[-1].loss)
            loop.optimizer.step()
    return [found.logits for found in values]


def weakly_referenced(loop):
    found = loop.forward()
    reference = weakref.ref(found.logits)
    first = found.logits.sin().sum()
    first.backward()
    return [first, found.logits[1], found.logits.T.shape, reference() is found.logits]


def read_in_every_call(loop):
    values = []
    for k in range(5):
        found = loop.forward(1.0 + k)
        values.append(found.logits.detach() * 1)
        loop.step(found)
    return values


def of_many_sizes(loop):
    values = []
    for rows in (64, 48, 32, 40):
        found = loop.call(X[:rows], Y[:rows])
        values += [found.logits.shape, found.logits.stride(), found.logits.requires_grad]
        loop.step(found)
        values.append(found.logits.detach())
    return values


def in_a_checkpoint(loop):
    values = []
    for k in range(3):
        found = loop.forward(1.0 + k)
        for reentrant in (False, True):
            values.append(checkpoint(lambda logits: logits.square().mean(), found.logits, use_reentrant=reentrant))
        (found.loss + values[-1] + values[-2]).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return values


def of_a_checkpointed_call(loop):
    loss_of_logits = torch.compile(lambda logits: (logits / 3).tanh().square().mean(), backend="eager")
    values = []
    for _ in range(6):
        for around in (lambda found: loss_of_logits(found.logits), lambda found: found.loss + found.logits.square().mean()):
            values.append(checkpoint(lambda x, around=around: around(loop.call(x, Y)), X, use_reentrant=False))
            values[-1].backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    return values


def in_an_autograd_function(loop):
    found = loop.forward()
    total = Doubled.apply(found.logits).sin().sum()
    (found.loss + total).backward()
    return [total]


SCENES = (unread, at_once, after_backward, after_step, after_next_forward, changed_by_hand, changed_through_data,
          without_backward, of_many_sizes, in_threads, pickled, collected, in_other_modes, as_an_object, gradient_arrives,
          gradients_in_turn, backward_again, asked_gradients, changed_in_place, scaled, given_to_a_compiled_function,
          with_a_compiled_step, by_compiled_autograd, weakly_referenced, read_in_every_call, in_a_checkpoint,
          in_an_autograd_function)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small outputs are deferred, too, and those that are read are soon computed in forward."""
    monkeypatch.setattr(wrapper, "WORTH", 1e-3)
    monkeypatch.setattr(split_outputs, "LEAST_BYTES", 1024)
    torch._dynamo.reset()


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="hpml", options={"compiler": "eager", **options})


def seen(scene: Any, kind: str, wrap: Any) -> list[Any]:
    model = Net(kind)
    loop = Loop(wrap(model), model)
    torch.manual_seed(1)
    found = scene(loop)
    return [*found, *(p.grad for p in model.parameters()), *model.parameters(), torch.get_rng_state()]


def assert_same(actual: list[Any], expected: list[Any], scene: Any) -> None:
    """Bit for bit, but where two gradients are added in another order."""
    adds = scene in (gradient_arrives, given_to_a_compiled_function, with_a_compiled_step, in_a_checkpoint,
                      in_an_autograd_function)
    torch.testing.assert_close(actual, expected, rtol=1e-5 if adds else 0, atol=1e-9 if adds else 0)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_outputs_are_those_of_eager(scene):
    expected, actual = seen(scene, "plain", lambda model: model), seen(scene, "plain", compiled)

    assert_same(actual, expected, scene)


@pytest.mark.parametrize("kind", ["capped", "two", "dropout", "frozen", "twice", "same"])
@pytest.mark.parametrize("scene", [unread, after_step, changed_by_hand, gradient_arrives, backward_again, collected],
                         ids=lambda s: s.__name__)
def test_in_every_kind_of_head(kind, scene):
    expected, actual = seen(scene, kind, lambda model: model), seen(scene, kind, compiled)

    assert_same(actual, expected, scene)


@pytest.mark.parametrize("options", [{"memory_budget": "1GiB"}, {"recompute": "full"}, {"microbatches": 4}],
                         ids=lambda options: next(iter(options)))
@pytest.mark.parametrize("scene", [unread, at_once, after_step, gradient_arrives, gradients_in_turn, read_in_every_call],
                         ids=lambda s: s.__name__)
def test_with_options_that_decide_what_is_saved(scene, options, monkeypatch):
    deferred = count_deferred(monkeypatch)
    expected, actual = seen(scene, "plain", lambda model: model), seen(scene, "plain", lambda m: compiled(m, **options))

    assert deferred[:1] == [True]
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


def test_a_checkpointed_call_saves_the_same_when_it_is_made_again():
    expected, actual = (seen(of_a_checkpointed_call, "two", wrap) for wrap in (lambda model: model, compiled))

    assert_same(actual, expected, of_a_checkpointed_call)


def test_a_budget_that_logits_alone_would_exceed_is_met(monkeypatch):
    monkeypatch.setattr(wrapper, "WORTH", 0.0)
    hpml_compiler.reset()
    x, y = torch.arange(256 * 32.0).view(256, 32).sin(), torch.arange(256)

    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(32, 32), nn.Linear(32, 4096, bias=False)

        def forward(self, x, y):
            logits = self.head(torch.tanh(self.body(x)))
            return F.cross_entropy(logits, y), logits

    model = Headed()
    call, optimizer = compiled(model, memory_budget="4MiB", loss_chunks=8), torch.optim.SGD(model.parameters(), 0.1)
    kept = []

    def step():  # as most loops do, which hold the logits of a step until those of the next replace them
        loss, kept[:] = (found := call(x, y))[0], found[1:]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    peak, plan = least_peak(step, model, optimizer), hpml_compiler.last_plan()

    chunks = plan.graphs[0].loss_chunks
    assert chunks is not None and chunks.count == 8 and plan.peak.bytes <= 4 * 2 ** 20
    assert peak <= 1.03 * plan.peak.bytes, (peak, plan.peak.bytes)
    for _ in range(3):  # read in each call, they do not fit into forward, and are still computed by themselves
        step()
        assert type(kept[0]) is DeferredOutput and kept[0].argmax(-1).shape == y.shape


def count_deferred(monkeypatch) -> list[bool]:
    """Notes for each deferred graph whether it was compiled with all outputs."""
    made: list[bool] = []
    plain = wrapper.split_outputs
    monkeypatch.setattr(wrapper, "split_outputs", lambda gm: made.append((split := plain(gm)) is not None) or split)
    return made


def test_unread_outputs_are_not_computed(monkeypatch):
    deferred, model = count_deferred(monkeypatch), Net()
    loop = Loop(compiled(model), model)

    found = loop.forward()
    loop.step(found)

    assert deferred == [True] and type(found.logits) is DeferredOutput
    assert type(found.logits.detach()) is DeferredOutput
    assert found.logits.sum().item() and type(found.logits) is torch.Tensor


def test_outputs_that_are_read_in_each_call_are_computed_in_forward(monkeypatch):
    monkeypatch.setattr(wrapper, "WORTH", 0.0)
    monkeypatch.setattr(wrapper, "CALLS_UNTIL_CHECK", 4)
    model = Net()
    loop = Loop(compiled(model), model)

    kinds = []
    for call in range(8):
        found = loop.forward()
        kinds.append(type(found.logits) is DeferredOutput)
        if call < 3:
            found.logits.sum()

    assert kinds == [True, False, False, True, True, True, True, True]


@pytest.mark.parametrize("rows", [(64, 64, 64, 64), (64, 48, 32, 40)], ids=["of_one_size", "of_many_sizes"])
def test_a_compiled_function_that_takes_outputs_is_not_compiled_again(rows, monkeypatch):
    monkeypatch.setattr(wrapper, "WORTH", 1e9)
    monkeypatch.setattr(wrapper, "CALLS_UNTIL_CHECK", 2)
    model = Net()
    call, kinds = compiled(model), []
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    reader = torch.compile(lambda logits: logits.sin().sum(), backend=counter, dynamic=True)

    for size in rows:
        found = call(X[:size], Y[:size])
        kinds.append(type(found.logits) is DeferredOutput)
        assert torch.equal(reader(found.logits), found.logits.sin().sum())

    assert kinds[0] and not any(kinds[2:]) and counter.frame_count <= len(set(rows[:2]))  # Dynamo compiles the model twice


@pytest.mark.parametrize("kind", ["dropout_after", "small", "in_place", "no_loss"])
def test_outputs_that_stay(kind, monkeypatch):
    class Other(Net):
        def forward(self, x, y):
            if kind == "in_place":
                return super().forward(x, y)
            logits = self.head(torch.tanh(self.body(x)))
            if kind == "dropout_after":
                logits = F.dropout(logits, 0.5)
            loss = F.cross_entropy(logits, y, reduction="none" if kind == "no_loss" else "mean")
            return Found(loss, logits)

    if kind == "small":
        monkeypatch.setattr(split_outputs, "LEAST_BYTES", 1 << 20)
    deferred, model = count_deferred(monkeypatch), Other("in_place" if kind == "in_place" else "plain")

    found = compiled(model)(X, Y)

    assert deferred == [False] and type(found.logits) is torch.Tensor


def in_place(weight, alias):
    with torch.no_grad():
        weight.mul_(2)


def through_an_alias(weight, alias):
    alias.mul_(2)


def freed(weight, alias):
    weight.untyped_storage().resize_(0)


@pytest.mark.parametrize("change, words", [
    (in_place, "it was changed in place since"), (through_an_alias, "through another tensor"), (freed, "its memory was freed"),
], ids=lambda x: getattr(x, "__name__", ""))
def test_parameters_that_changed_before_backward_are_an_error(change, words):
    model = Net()
    alias = model.head.weight.data
    found = compiled(model)(X, Y)

    change(model.head.weight, alias)

    with pytest.raises(HpmlError, match=f"cannot be computed any more: .*{words}"):
        found.logits.sum()


def test_a_gradient_to_changed_parameters_is_an_error():
    model = Net("frozen")
    loop = Loop(compiled(model), model)
    found = loop.forward()
    loop.step(found)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.logits.sum().backward()
