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
def adversaries_with_noise_and_a_frozen_judge(hp):
    maker, judge = _maker_and_judge()
    make, score = hp.compile(maker), hp.compile(judge)
    ours, theirs = adamw(maker), adamw(judge)
    for _ in range(2):
        judge.requires_grad_(True)
        theirs.zero_grad()
        with torch.no_grad():
            fake = make(torch.randn(8, 4))
        (score(inputs()).mean() - score(fake).mean()).backward()
        theirs.step()
        for p in judge.parameters():
            p.data.clamp_(-0.1, 0.1)
        judge.requires_grad_(False)
        ours.zero_grad()
        score(make(torch.randn(8, 4))).mean().backward()
        ours.step()
    return maker, judge, ours, theirs


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
def actor_and_critic_of_one_class(hp):
    actor, critic = Policy(4), Policy(1)
    act, value = hp.compile(actor), hp.compile(critic)
    optimizers, losses = [adamw(actor), adamw(critic)], []
    for _ in range(2):
        advantage = targets()[:, 0] - value(inputs()).squeeze(-1)
        chosen = act(inputs()).log_softmax(-1).gather(1, classes()[:, None]).squeeze(1)
        loss = -(chosen * advantage.detach()).mean() + advantage.square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, actor, critic


@use
def clipped_policy_for_some_epochs(hp):
    """PPO's: ratios to what the policy said before, entropy, minibatches in an order of their own."""
    actor = Policy(4)
    call, optimizer, losses = hp.compile(actor), adamw(actor), []
    with torch.no_grad():
        before = call(inputs()).log_softmax(-1).gather(1, classes()[:, None]).squeeze(1)
    for _ in range(2):
        for rows in torch.randperm(8).split(4):
            logits = call(inputs()[rows]).log_softmax(-1)
            ratio = (logits.gather(1, classes()[rows][:, None]).squeeze(1) - before[rows]).exp()
            advantage = targets()[rows, 0]
            entropy = -(logits.exp() * logits).sum(-1).mean()
            loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean() - 0.01 * entropy
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
    return losses, actor, optimizer


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
def soft_target_updates(hp):
    online, target = Policy(4), Policy(4)
    target.load_state_dict(online.state_dict())
    target.requires_grad_(False)
    q, q_target, optimizer = hp.compile(online), hp.compile(target), sgd(online)
    for _ in range(3):
        loss = F.mse_loss(q(inputs()), q_target(inputs().flip(0)) * 0.9 + targets())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for slow, fast in zip(target.parameters(), online.parameters()):
            slow.data.copy_(0.9 * slow.data + 0.1 * fast.data)
    return online, target, optimizer


@use
def twin_critics(hp):
    """SAC's: two of one width, trained together, the smaller one counts."""
    one, two = Policy(1), Policy(1)
    a, b = hp.compile(one), hp.compile(two)
    optimizer, losses = torch.optim.Adam([*one.parameters(), *two.parameters()], lr=0.01, eps=1e-4), []
    for _ in range(2):
        optimizer.zero_grad()
        first, second = a(inputs()), b(inputs())
        loss = F.mse_loss(first, targets()[:, :1]) + F.mse_loss(second, targets()[:, :1]) - torch.min(first, second).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, one, two, optimizer


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


class Distiller(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = mlp(hidden=64).requires_grad_(False), mlp(hidden=16)

    def forward(self, x):
        with torch.no_grad():
            soft = self.teacher(x)
        return F.mse_loss(self.student(x), soft)


@use
def distills_in_one_module(hp):
    model = Distiller()
    call = hp.compile(model)
    optimizer, losses = torch.optim.Adam(model.student.parameters(), 0.01, eps=1e-4), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = call(inputs())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model, optimizer


class MeanTeacher(nn.Module):
    """A frozen copy that follows in forward."""

    def __init__(self):
        super().__init__()
        self.online = mlp()
        self.slow = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.online.parameters()):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            goal = self.slow(x.flip(1))
        return F.mse_loss(self.online(x), goal)


@use
def momentum_encoder_in_forward(hp):
    model = MeanTeacher()
    call, optimizer, losses = hp.compile(model), torch.optim.SGD(model.online.parameters(), 0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = call(inputs())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model, optimizer


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


class QueueByStep(nn.Module):
    """The same with the pointer as an int that varies from call to call."""

    def __init__(self):
        super().__init__()
        self.net, self.at = nn.Linear(16, 8), 0
        self.register_buffer("queue", torch.zeros(12, 8))

    def forward(self, x):
        out = self.net(x)
        loss = (out @ self.queue.clone().t()).logsumexp(1).mean()
        self.queue[self.at:self.at + len(x)] = out.detach()
        self.at = (self.at + len(x)) % 12
        return loss


@use
def queue_with_an_int_pointer(hp):
    model = QueueByStep()
    call, optimizer, losses = hp.compile(model), sgd(model), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = call(inputs(4))
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
def weights_given_to_another_model(hp):
    """The second model takes a tensor that was made of the first one's weight."""
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 16)

        def forward(self, x, w):
            return self.net(x) @ w

    first, second = mlp(), Given()
    call, use_it, seen = hp.compile(first), hp.compile(second), []
    ours, theirs = sgd(first), sgd(second)
    for _ in range(2):
        seen.append(step(call, ours, inputs(), targets()))
        w = first[0].weight.t().detach() * 2
        loss = use_it(targets(), w).square().mean()
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        seen.append(loss.item())
    return seen, first, second


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
def one_width_other_placements(hp):
    """Two of a class and width; one frozen in part, so that its plan is another."""
    one, two = Policy(4), Policy(4)
    two.body.requires_grad_(False)
    a, b, losses = hp.compile(one), hp.compile(two), []
    optimizers = [sgd(one), sgd(two)]
    for _ in range(2):
        for call, optimizer in zip((a, b), optimizers):
            losses.append(step(call, optimizer, inputs(), targets()))
    return losses, one, two


@use
def of_one_class_and_other_widths(hp):
    models = [Policy(4, hidden) for hidden in (16, 32, 24)]
    losses = []
    for model in models:
        losses += [step(hp.compile(model), sgd(model), inputs(), targets()) for _ in range(2)]
    return losses, models


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
def task_vectors(hp):
    base = mlp()
    tuned = copy.deepcopy(base)
    call = hp.compile(tuned)
    step(call, sgd(tuned), inputs(), targets())
    vector = {k: tuned.state_dict()[k] - v for k, v in base.state_dict().items()}
    merged = mlp()
    merged.load_state_dict({k: v + 0.5 * vector[k] for k, v in base.state_dict().items()})
    return merged(inputs()), merged, tuned


@use
def federated_rounds(hp):
    central = mlp()
    for _ in range(2):
        clients = []
        for rows in (slice(0, 4), slice(4, 8)):
            client = copy.deepcopy(central)
            step(hp.compile(client), sgd(client), inputs()[rows], targets()[rows])
            clients.append(client)
        with torch.no_grad():
            for p, *theirs in zip(central.parameters(), *(c.parameters() for c in clients)):
                p.copy_(sum(theirs) / len(theirs))
    return central


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
