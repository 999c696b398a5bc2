"""Two models and more: adversaries, teachers, momentum encoders, weights that go from one to the other."""
from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from tests.scripts.models import adamw, classes, inputs, mlp, sgd, step, targets
from tests.scripts.use import use


def _maker_and_judge(outs=1):
    return (nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 16)),
            nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, outs)))


@use
def adversaries(hp):
    maker, judge = _maker_and_judge()
    make, score = hp.compile(maker), hp.compile(judge)
    ours, theirs, losses = adamw(maker), adamw(judge), []
    for _ in range(2):
        theirs.zero_grad()
        loss = F.softplus(-score(inputs())).mean() + F.softplus(score(make(targets()).detach())).mean()
        loss.backward()
        theirs.step()
        ours.zero_grad()
        other = F.softplus(-score(make(targets()))).mean()
        other.backward()
        ours.step()
        losses += [loss.item(), other.item()]
    return losses, maker, judge, ours, theirs


@use
def cycle(hp):
    """CycleGAN's: two makers, each after the other, with an optimizer for both."""
    there, back = nn.Linear(16, 16), nn.Linear(16, 16)
    go, come = hp.compile(there), hp.compile(back)
    optimizer = torch.optim.Adam([*there.parameters(), *back.parameters()], lr=0.01, eps=1e-4)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.l1_loss(come(go(inputs())), inputs()) + F.l1_loss(go(come(inputs())), inputs())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, there, back, optimizer


class Policy(nn.Module):
    def __init__(self, outs, hidden=32):
        super().__init__()
        self.body, self.head = nn.Linear(16, hidden), nn.Linear(hidden, outs)

    def forward(self, x):
        return self.head(self.body(x).tanh())


@use
def q_learning_with_a_target(hp):
    online = Policy(4)
    target = copy.deepcopy(online)
    q, q_target, optimizer, losses = hp.compile(online), hp.compile(target), adamw(online), []
    for number in range(4):
        with torch.no_grad():
            goal = 0.9 * q_target(inputs().flip(0)).max(1).values + targets()[:, 0]
        loss = F.smooth_l1_loss(q(inputs()).gather(1, classes()[:, None]).squeeze(1), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if number % 2:
            target.load_state_dict(online.state_dict())
    return losses, online, target


@use
def world_model_and_policy(hp):
    """Gradients flow through one model, whose own weights get none, into the other."""
    world, actor = Policy(16), Policy(16)
    dream, act = hp.compile(world), hp.compile(actor)
    optimizer = adamw(actor)
    world.requires_grad_(False)
    for _ in range(2):
        state = inputs()
        for _ in range(3):
            state = dream(state + act(state))
        loss = state.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss, actor, world


@use
def distills(hp):
    teacher, student = mlp(hidden=64).eval().requires_grad_(False), mlp(hidden=16)
    teach, learn, optimizer, losses = hp.compile(teacher), hp.compile(student), adamw(student), []
    for _ in range(3):
        with torch.no_grad():
            soft = (teach(inputs()) / 2).softmax(-1)
        logits = learn(inputs())
        loss = 4 * F.kl_div((logits / 2).log_softmax(-1), soft, reduction="batchmean") + F.cross_entropy(logits, classes())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, student, teacher, optimizer


class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(16, 8), nn.Linear(16, 8).requires_grad_(False)
        self.key.load_state_dict(self.query.state_dict())
        self.register_buffer("queue", F.normalize(torch.randn(8, 16), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x, other):
        q = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters()):
                slow.data = slow.data * 0.9 + fast.data * 0.1
            k = F.normalize(self.key(other), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], dim=1) / 0.2
        self.enqueue(k)
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, k):
        at = int(self.pointer)
        self.queue[:, at:at + len(k)] = k.t()
        self.pointer[0] = (at + len(k)) % 16


@use
def moco_with_a_queue(hp):
    model = MoCo()
    call, optimizer, losses = hp.compile(model), torch.optim.SGD(model.query.parameters(), 0.1), []
    for number in range(4):
        optimizer.zero_grad()
        loss = call(inputs(4), inputs(4).roll(number, 0))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model, optimizer


@use
def byol(hp):
    online, head = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)), nn.Linear(8, 8)
    target = copy.deepcopy(online).requires_grad_(False)
    see, aim, predict = hp.compile(online), hp.compile(target), hp.compile(head)
    optimizer, losses = torch.optim.SGD([*online.parameters(), *head.parameters()], lr=0.1), []
    for _ in range(2):
        one, two = inputs(), inputs().roll(1, 1)
        with torch.no_grad():
            goals = aim(one), aim(two)
        loss = -(F.cosine_similarity(predict(see(one)), goals[1]) + F.cosine_similarity(predict(see(two)), goals[0])).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters()):
                slow.lerp_(fast, 0.1)
        losses.append(loss.item())
    return losses, online, head, target, optimizer


@use
def a_square_weight_given_to_another_model(hp):
    """As many rows as the batch has: its placement must not be taken for the batch's."""
    first = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    second = nn.Linear(8, 8)
    call, see = hp.compile(first), hp.compile(lambda x, w: second(x) * w)
    step(call, sgd(first), inputs(8, 8), targets(8))
    out = see(inputs(8, 8), first[0].weight.detach())
    out.sum().backward()
    return out, first, second


@use
def gradients_given_to_another_model(hp):
    """A learned optimizer: what it is told are the first model's gradients."""
    learner, rule = nn.Linear(16, 4), nn.Linear(1, 1)
    call, update = hp.compile(learner), hp.compile(rule)
    optimizer = sgd(rule, lr=0.01)
    for _ in range(2):
        loss = F.mse_loss(call(inputs()), targets())
        learner.zero_grad()
        loss.backward()
        change = update(learner.weight.grad.reshape(-1, 1))
        optimizer.zero_grad()
        change.square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            learner.weight.sub_(change.detach().view_as(learner.weight) * 0.1)
    return learner, rule


@use
def an_ensemble_in_one_step(hp):
    models = nn.ModuleList([Policy(4), Policy(4), Policy(4)])
    calls, optimizer, losses = [hp.compile(model) for model in models], adamw(models), []
    for _ in range(2):
        optimizer.zero_grad()
        outs = torch.stack([call(inputs()) for call in calls])
        loss = F.mse_loss(outs.mean(0), targets()) - 0.1 * outs.var(0).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, models, optimizer


@use
def eager_and_compiled_share_weights(hp):
    """The same module, compiled in one place and called as it is in another."""
    model = mlp()
    call, optimizer, losses = hp.compile(model), adamw(model), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.mse_loss(call(inputs()), targets()) + 0.1 * model(inputs().flip(0)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model, optimizer


@use
def encoder_shared_by_two_heads(hp):
    """Two compiled models with a module in common, trained in turn."""
    encoder = nn.Linear(16, 16)
    one, two = nn.Sequential(encoder, nn.Tanh(), nn.Linear(16, 4)), nn.Sequential(encoder, nn.ReLU(), nn.Linear(16, 4))
    a, b, losses = hp.compile(one), hp.compile(two), []
    for number in range(4):
        call, model = ((a, one), (b, two))[number % 2]
        losses.append(step(call, sgd(model, momentum=0), inputs(), targets()))
    return losses, one, two


@use
def soup(hp):
    """Weights averaged over runs and put into a third model."""
    base = mlp()
    runs = [copy.deepcopy(base) for _ in range(2)]
    for number, model in enumerate(runs):
        call, optimizer = hp.compile(model), sgd(model)
        for _ in range(2):
            step(call, optimizer, inputs().roll(number, 0), targets())
    states = [model.state_dict() for model in runs]
    base.load_state_dict({k: torch.stack([state[k] for state in states]).mean(0) for k in states[0]})
    return hp.compile(base)(inputs()), base


@use
def siamese_with_a_compiled_half(hp):
    model = mlp()
    call, optimizer = hp.compile(model), adamw(model)
    for _ in range(2):
        optimizer.zero_grad()
        one, two = call(inputs()), call(inputs().flip(0))
        distance = F.pairwise_distance(one, two)
        same = (classes() == classes().flip(0)).double()
        loss = (same * distance.square() + (1 - same) * F.relu(1 - distance).square()).mean()
        loss.backward()
        optimizer.step()
    return loss, model, optimizer
