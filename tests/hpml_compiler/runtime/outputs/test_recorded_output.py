"""Losses, metrics and other calls on sharded outputs: recorded, compiled, and equal to one device's eager results."""
from __future__ import annotations

import copy
import gc
import io
import time
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import hpml_compiler
from hpml_compiler.runtime.dtensor import lazy_outputs
from hpml_compiler.runtime.dtensor.lazy_outputs import LazyOutput
from hpml_compiler.runtime.outputs.record import AllRecords
from hpml_compiler.runtime.outputs.recorded_call import CompiledRecords
from hpml_compiler.runtime.outputs.recorded_output import RecordedOutput
from hpml_compiler.runtime.outputs.step_output import StepOutput
from hpml_compiler.runtime.watchdog.barrier_check import RankDiverged
from passes.errors import HpmlError
from passes.session_state import state_of
from tests.hpml_compiler.runtime.common import Doubled, full
from tests.hpml_compiler.runtime.dtensor.test_lazy_outputs import Net, X, Y


class Outputs(Net):
    """Large logits and hidden state, without a loss."""

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return self.head(hidden), hidden


SOFT = torch.linspace(-3, 3, 256 * 512).double().view(256, 512).sin().softmax(-1)
MASK = torch.arange(256) % 3 > 0
WEIGHT = torch.linspace(0.5, 2, 512).double()


def index(z, h):
    return F.cross_entropy(z, Y), F.cross_entropy(z.view(2, 128, 512).transpose(1, 2), Y.view(2, 128), reduction="sum")


def options_of_cross_entropy(z, h):
    ignored = torch.where(MASK, Y, -100)
    return (F.cross_entropy(z, ignored, weight=WEIGHT, label_smoothing=0.1), F.cross_entropy(z, SOFT),
            F.cross_entropy(z[:-1], ignored[1:], reduction="none"))


def log_softmax(z, h):
    logp = z.log_softmax(-1)
    chosen = logp.gather(1, Y[:, None]).squeeze(1)
    return F.nll_loss(logp, Y), F.kl_div(logp, SOFT, reduction="batchmean"), -(chosen * MASK).sum() / MASK.sum()


def regression(z, h):
    return F.mse_loss(z, SOFT), F.huber_loss(z, SOFT, delta=0.1), ((2 - z).abs() ** 1.5 + 2 ** -z.abs()).mean()


def binary(z, h):
    target = (SOFT.mean() < SOFT).double()
    p = z.sigmoid()
    dice = 1 - (2 * (p * target).sum(-1) + 1) / (p.sum(-1) + target.sum(-1) + 1)
    return F.binary_cross_entropy_with_logits(z, target, pos_weight=WEIGHT), dice.mean()


def focal(z, h):
    each = F.cross_entropy(z, Y, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean(), ((1 - z.softmax(-1)).square() * z).sum(-1).mean()


def contrastive(z, h):
    one, other = F.normalize(h, dim=-1), F.normalize(h.flip(0), dim=-1)
    matrix = one @ other.T / 0.1
    both = (F.cross_entropy(matrix, torch.arange(256)) + F.cross_entropy(matrix.T, torch.arange(256))) / 2
    return both, F.triplet_margin_loss(h, h.flip(0), h.roll(1, 0))


def several_outputs(z, h):
    loss = F.cross_entropy(z, Y) + 0.1 * h.square().mean() + 1e-3 * z.logsumexp(-1).square().mean()
    loss += (h.mean() * z.mean()).exp()
    loss /= 2
    return [loss]


def mixup(z, h):
    return [part * F.cross_entropy(z, Y) + (1 - part) * F.cross_entropy(z, Y.flip(0)) for part in (0.3, 0.65)]


def smoothed_by_hand(z, h):
    target = torch.zeros_like(z).fill_(0.1 / 511).scatter_(1, Y[:, None], 0.9)
    return [torch.sum(-target * F.log_softmax(z, -1), -1).mean(), torch.full_like(z, 2.0).mul(z).mean()]


def metrics(z, h):
    with torch.no_grad():
        best = z.argmax(-1)
        top = z.topk(5, -1).indices.eq(Y[:, None]).any(-1).double().mean()
        spread = z.softmax(-1).amax(-1).mean()
        values, places = z.max(dim=-1)
        found = [(best == Y).double().mean(), top, spread, values.sum(), places.sum(), z.std(), z.norm()]
    return [F.cross_entropy(z, Y), *found]


def second_model(z, h):
    torch.manual_seed(3)
    judge = nn.Sequential(nn.Linear(512, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8)).double()
    loss = (judge(z) - judge(SOFT)).square().mean()
    loss.backward(retain_graph=True)
    return [loss, *[p.grad for p in judge.parameters()]]


def batch_statistics(z, h):
    norm = nn.BatchNorm1d(512).double()
    return [norm(z).square().sin().mean(), norm.running_mean]


def asked(z, h):
    p = z.softmax(-1)
    loss = (p * SOFT).sum()
    by = torch.autograd.grad(loss, z, retain_graph=True)
    q = z.sigmoid()
    between = torch.autograd.grad(q, [q], SOFT, retain_graph=True)
    return [loss, *by, *between, z.sin().mean()]


def penalties(z, h):
    """Second derivatives, of calls on shards and, at the end, on a gathered output."""
    scale, tangent = torch.ones((), dtype=torch.float64, requires_grad=True), torch.ones_like(z).requires_grad_()
    by, = torch.autograd.grad(F.cross_entropy(z * scale, Y), scale, create_graph=True)
    slope, = torch.autograd.grad(z.tanh(), z, tangent, create_graph=True)
    along, = torch.autograd.grad(slope.square().sum(), tangent, create_graph=True)
    cast, = torch.autograd.grad(z.float().square().mean(), z, create_graph=True)
    found = [by.square(), along.square().mean(), cast.sin().sum()]
    for _ in range(2):
        loss = F.cross_entropy(z, Y)
        by, = torch.autograd.grad(loss, z, create_graph=True)
        curvature, = torch.autograd.grad((by * SOFT).sum(), z, retain_graph=True)
        found += [loss, by.square().sum(), curvature]
        z.detach().numpy()
    return found


def hooks(z, h):
    p = z.softmax(-1)
    p.retain_grad()
    p.register_hook(lambda g: 2 * g)
    z.retain_grad()
    (p * SOFT).sum().backward(retain_graph=True)
    return [p.grad, z.grad]


def hooks_later(z, h):
    loss = F.cross_entropy(z, Y)
    z.register_hook(lambda g: 3 * g)
    z.retain_grad()
    loss.backward(retain_graph=True)
    return [loss, z.grad]


def written(z, h):
    p, rows, flat = z + 1, z[2:4], z.view(-1)
    z.mul_(2)
    rows.add_(1)
    q = z * 3
    q[0] = 0.5
    return [p.sum(), p, rows, flat, q.mean(), F.cross_entropy(z, Y)]


def shared_memory(z, h):
    p = z * 1.5
    first, other = p[0], p.detach()
    assert first.max() > 0
    with torch.no_grad():
        first[1] = 7.0
    return [p, first, other, p.square().sum()]


def changed_argument(z, h):
    small, large = torch.ones(512).double(), torch.ones(256, 512).double().tanh_().repeat(2, 1)[:256]
    scaled = z + small
    small.zero_()
    found = [scaled.square().mean(), (z * large).square().mean()]
    difference, best = torch.zeros_like(SOFT), (torch.zeros(256).double(), torch.zeros(256).long())
    with torch.no_grad():
        torch.sub(z, SOFT, out=difference)
        torch.max(z, 1, out=best)
    return [*found, difference, *best]


def copies(z, h):
    p = z.softmax(-1)
    file = io.BytesIO()
    torch.save(p.detach(), file)
    file.seek(0)
    return [torch.load(file), copy.deepcopy(p.detach()), torch.tensor(z.sigmoid().detach().numpy()), len(repr(z.tanh())),
            *[row for row in z.exp()[:3]], torch.equal(p, p), p.shape, p.dim(), p.is_contiguous(), p.mean().item()]


def functions(z, h):
    made = Doubled.apply(z.tanh())
    q = z.cos()
    torch.autograd.backward([q], [SOFT], retain_graph=True)
    rows = torch.func.vmap(lambda row: row.square().sum())(z.sin())
    return [made.square().mean(), q, rows]


def modes(z, h):
    with torch.no_grad():
        p = z.softmax(-1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.mse_loss(z.tanh(), SOFT)
    torch.manual_seed(5)
    dropped = F.dropout(z.relu(), 0.5).mean()
    return [loss, (p * z).mean(), dropped, F.dropout(z.relu(), 0.5, training=False).mean()]


def scaled(z, h):
    scale = torch.tensor(8.0).double()
    first = F.cross_entropy(z, Y)
    (first * scale).backward(retain_graph=True)
    (F.mse_loss(z, SOFT) / 2).backward(retain_graph=True)
    return [first.detach(), z.detach().mean(), first.item()]


SCENES = [index, options_of_cross_entropy, log_softmax, regression, binary, focal, contrastive, several_outputs, mixup,
          smoothed_by_hand, metrics, second_model, batch_statistics, asked, penalties, hooks, hooks_later, written,
          shared_memory, changed_argument, copies, functions, modes, scaled]


def of(scene, call, model):
    model.zero_grad()
    results = list(scene(*call(X)))
    losses = [x.sum() for x in results if isinstance(x, torch.Tensor) and x.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: full(t).detach().clone(), [
        results, [p.grad for p in model.parameters()]])


def run_scenes(rank, mesh, names, told=False):
    torch._functorch.config.donated_buffer = False  # as a script must that runs a compiled model's backward twice
    expected, model = Outputs(), Outputs()
    call = torch.compile(model, backend="hpml", options={"compiler": "eager", "mesh": mesh, "monitor": False})
    assert isinstance(call(X)[0], (LazyOutput, StepOutput))
    for scene in SCENES:
        if names and scene.__name__ not in names:
            continue
        start = time.perf_counter()
        want = of(scene, expected, expected)
        compiled = 0
        for _ in range(3):
            before = state_of(CompiledRecords).total()
            torch.testing.assert_close(of(scene, call, model), want, rtol=1e-11, atol=1e-12,
                                       msg=lambda told, scene=scene: f"{scene.__name__}: {told}")
            compiled = state_of(CompiledRecords).total() - before
        if scene is not mixup:
            assert not compiled, (scene.__name__, state_of(CompiledRecords))
        gc.collect()
        if told:
            print(f"{scene.__name__:30} {time.perf_counter() - start:.2f} s, {state_of(CompiledRecords).total()} graphs")
    assert not state_of(AllRecords).living


OVER_WORDS = ["options_of_cross_entropy", "contrastive", "metrics", "penalties", "hooks", "written", "shared_memory"]


@pytest.mark.parametrize(("axis", "names"), [("dp", []), ("tp", OVER_WORDS)])
def test_every_scene_is_as_on_one_device(launch, axis, names):
    launch(run_scenes, world_size=2, args=({axis: 2}, names), timeout_s=300)


def run_rest(rank):
    gathered, joined = [], lazy_outputs.gathered_from_parts
    lazy_outputs.gathered_from_parts = lambda local, spec: gathered.append(tuple(spec.shape)) or joined(local, spec)
    call = torch.compile(Outputs(), backend="hpml", options={"compiler": "eager", "mesh": {"dp": 2}})
    for step in range(4):
        z, _ = call(X)
        loss, held = F.cross_entropy(z.view(-1, 512), Y), z.log_softmax(-1)
        with torch.no_grad():
            right = (z.argmax(-1) == Y).double().mean()
        assert isinstance(held, RecordedOutput) and held.shape == z.shape and held.requires_grad
        if rank == 0:
            print(loss, right)
        loss.backward()
        assert not gathered or step in (0, 1)  # metrics seen for the first time; from step 1 on, the loss is inside
        gathered.clear()
        logits = weakref.ref(z)
        del z, held
        assert logits() is None  # the record holds what unread results need, no longer than these live
    (_, graph, metric, *_) = hpml_compiler.last_plan().graphs
    assert not [r for each in (graph, metric) for r in each.redistributions if r.shape == (256, 512)]

    z, _ = call(X)
    p = z.softmax(-1)
    loss = (p * SOFT).sum()
    with pytest.raises(HpmlError, match="retain_grad on a result of softmax .* gradient does not pass through"):
        p.retain_grad()
    with pytest.raises(HpmlError, match="grad on a result of softmax"):
        torch.autograd.grad(loss, [p])
    large = torch.ones(2, 256, 512).double()
    scaled = z * large
    large.zero_()
    with pytest.raises(HpmlError, match="the result of mul .* cannot be computed any more: it was changed in place"):
        scaled.sum()
    del p, scaled
    whole = torch.compile(Outputs(), backend="hpml", options={"compiler": "eager", "mesh": {"dp": 2}, "outputs": "whole"})
    assert type(whole(X)[0].exp()) is torch.Tensor
    z, _ = call(X)
    time.sleep(rank)
    alone = F.l1_loss if rank else F.mse_loss
    with pytest.raises(RankDiverged, match=rf"rank {rank} is alone in reading an output of graph_0 in {alone.__name__}"):
        alone(z, SOFT)
    dist.barrier()


def test_nothing_is_gathered_and_what_would_be_wrong_is_told(launch):
    launch(run_rest, world_size=2)
