"""Random scripts: a small model of random blocks, and a random loop around it. What is drawn is the script's text."""
from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

WIDTH = 8
Draw = Callable[[st.SearchStrategy[Any]], Any]

HEADER = f'''
import copy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

W = {WIDTH}


def rows(count, phase=0.0):
    return (torch.arange(count * W, dtype=torch.float64).view(count, W) * 0.7 + phase).sin()

'''

# Each block: lines of __init__, lines of forward. {i} is the block's number, {k} that of an earlier layer (0 is always there).
BLOCKS = {
    "linear": (["self.l{i} = nn.Linear(W, W)"], ["h = self.l{i}(h)"]),
    "no bias": (["self.l{i} = nn.Linear(W, W, bias=False)"], ["h = self.l{i}(h).tanh()"]),
    "residual": (["self.a{i}, self.b{i} = nn.Linear(W, 2 * W), nn.Linear(2 * W, W)"],
                 ["h = h + self.b{i}(F.gelu(self.a{i}(h)))"]),
    "gated": (["self.a{i}, self.b{i} = nn.Linear(W, W), nn.Linear(W, W)"], ["h = self.a{i}(h) * self.b{i}(h).sigmoid()"]),
    "shared layer": ([], ["h = self.l{k}(h)"]),
    "shared weight": (["self.l{i} = nn.Linear(W, W)", "self.l{i}.weight = self.l{k}.weight"], ["h = self.l{i}(h)"]),
    "weight by hand": ([], ["h = F.linear(h, self.l{k}.weight.t()) * 0.5"]),
    "weight in a sum": ([], ["h = h + 0.01 * self.l{k}.weight.square().sum()"]),
    "weight's row": ([], ["h = h + self.l{k}.weight[1]"]),
    "frozen": (["self.f{i} = nn.Linear(W, W).requires_grad_(False)"], ["h = h + self.f{i}(h)"]),
    "frozen and changed": (["self.f{i} = nn.Linear(W, W).requires_grad_(False)"],
                           ["with torch.no_grad():", "    self.f{i}.weight.mul_(0.9).add_(self.l{k}.weight, alpha=0.1)",
                            "h = h + self.f{i}(h)"]),
    "layer norm": (["self.n{i} = nn.LayerNorm(W)"], ["h = self.n{i}(h)"]),
    "rms norm": (["self.n{i} = nn.RMSNorm(W)"], ["h = self.n{i}(h)"]),
    "batch norm": (["self.n{i} = nn.BatchNorm1d(W)"], ["h = self.n{i}(h)"]),
    "group norm": (["self.n{i} = nn.GroupNorm(2, W)"], ["h = self.n{i}(h)"]),
    "activation": ([], ["h = F.silu(h)"]),
    "softmax": ([], ["h = h.softmax(-1) * W"]),
    "break": ([], ["torch._dynamo.graph_break()"]),
    "branch on data": ([], ["if h[0].sum().item() > 0.123:", "    h = h * 0.5"]),
    "in place": ([], ["h = h * 1.0", "h.mul_(0.9).add_(x, alpha=0.1)"]),
    "column in place": ([], ["h = h.clone()", "h[:, 1] = 0.5", "h[0] += 1"]),
    "input in place": ([], ["x.mul_(0.9)"]),
    "buffer": (["self.register_buffer('c{i}', torch.zeros(W))"],
               ["if self.training:", "    self.c{i}.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)", "h = h - self.c{i}"]),
    "buffer anew": (["self.register_buffer('c{i}', torch.zeros(()))"],
                    ["self.c{i} = self.c{i} + h.detach().abs().mean()", "h = h / (1 + self.c{i})"]),
    "vector added": (["self.p{i} = nn.Parameter(torch.randn(W) / 2)"], ["h = h + self.p{i}"]),
    "vector times": (["self.p{i} = nn.Parameter(torch.rand(W) + 0.5)"], ["h = h * self.p{i}"]),
    "scalar": (["self.p{i} = nn.Parameter(torch.tensor(0.5))"], ["h = h * self.p{i} + x"]),
    "all rows": ([], ["h = h + 0.1 * (h @ x.t()).softmax(-1) @ x"]),
    "mean of rows": ([], ["h = h - h.mean(0) + h.amax(0)"]),
    "spread of rows": ([], ["h = h / (1 + h.std(0))"]),
    "heads": ([], ["q = h.view(-1, 2, W // 2)", "h = h + (q @ q.transpose(1, 2)).softmax(-1).matmul(q).reshape(h.shape)"]),
    "halves": ([], ["a, b = h.chunk(2, -1)", "h = torch.cat([b, a.tanh()], -1)"]),
    "rows turned": ([], ["h = h.flip(0) + h.roll(1, 0)"]),
    "running sum": ([], ["h = h.cumsum(0) * 0.2"]),
    "lookup": (["self.e{i} = nn.Embedding(8, W)"], ["h = h + self.e{i}((x[:, 0] * 3).long() % 8)"]),
    "no gradient": (["self.l{i} = nn.Linear(W, W)"], ["with torch.no_grad():", "    t = self.l{i}(h)", "h = h + t"]),
    "detached": ([], ["h = h + h.detach().tanh() * x"]),
    "checkpointed": (["self.l{i} = nn.Linear(W, W)"],
                     ["h = checkpoint(lambda v: self.l{i}(v).sigmoid(), h, use_reentrant=False)"]),
    "dropout off": ([], ["h = F.dropout(h, 0.5, False) + F.dropout(h, 0.0, True)"]),
    "noise": ([], ["h = h + 0.1 * torch.randn_like(h)"]),
    "side": ([], ["side = side + h.square().mean()"]),
}

OUTPUTS = {
    "h": ("return h + side", "out"),
    "pair": ("return h, side", "out[0] + out[1]"),
    "dict": ("return {'h': h, 'side': side, 'n': 3, 'x': x}", "out['h'] + out['side']"),
    "views": ("return h, h.t(), h[1:], h.detach()", "out[0] + out[1].t() + out[2].mean()"),
    "nested": ("return (h, [side, {'top': h.amax(-1)}])", "out[0] + out[1][0] + out[1][1]['top'].mean()"),
}

OPTIMIZERS = {
    "sgd": "torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)",
    "plain sgd": "torch.optim.SGD(model.parameters(), 0.1)",
    "adamw": "torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)",
    "adam, one by one": "torch.optim.Adam(model.parameters(), 0.01, eps=1e-3, foreach=False)",
    "rmsprop": "torch.optim.RMSprop(model.parameters(), 0.01, eps=1e-2)",
}

ZEROS = ["optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)", "model.zero_grad()",
         "for p in model.parameters():\n    p.grad = None"]

# What may happen to gradients between backward and step.
EDITS = {
    "clip": """
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3))
    """,
    "clip value": """
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
    """,
    "clip in place": """
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_((0.5 / (p.grad.norm() + 1e-6)).clamp(max=1))
    """,
    "halve one": """
        if model.l0.weight.grad is not None:
            model.l0.weight.grad.mul_(0.5)
    """,
    "halve the last": """
        for p in [p for p in model.parameters() if p.grad is not None][-1:]:
            p.grad.mul_(0.5)
    """,
    "log": """
        for p in model.parameters():
            if p.grad is not None:
                total += p.grad.norm()
                total.add_(p.abs().sum().detach())
    """,
    "replace": """
        for p in model.parameters():
            if p.grad is not None:
                p.grad = p.grad * 0.5 + 0.01 * p.detach()
    """,
}

# What may happen between steps.
EVENTS = {
    "evaluate": """
        model.eval()
        with torch.no_grad():
            seen.append(call(rows(4, 0.3)))
        model.train()
    """,
    "infer": """
        with torch.inference_mode():
            kept = call(rows(8, 0.4))
            seen += [v.clone() for v in torch.utils._pytree.tree_leaves(kept) if isinstance(v, torch.Tensor)]
    """,
    "reload": """
        saved = {k: v.clone() for k, v in model.state_dict().items()}
        with torch.no_grad():
            model.l0.weight.zero_()
        model.load_state_dict(saved)
    """,
    "load others": """
        model.load_state_dict(Model().state_dict())
    """,
    "reload optimizer": """
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    """,
    "new optimizer": """
        optimizer = make(model)
    """,
    "scale weights": """
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
    """,
    "move a weight": """
        with torch.no_grad():
            model.l0.weight.copy_(model.l0.weight.t() * 0.5)
            model.l0.weight[2] = 0.1
    """,
    "weights by data": """
        model.l0.weight.data = model.l0.weight.data * 0.8
        model.l0.weight.data.add_(0.01)
    """,
    "average": """
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for a, b in zip(twin.parameters(), model.parameters()):
                a.lerp_(b, 0.5)
        seen.append(twin(rows(4)))
    """,
    "go on with a copy": """
        model = copy.deepcopy(model)
        call = hp.compile(model)
        optimizer = make(model)
    """,
    "another model": """
        model = Model()
        call = hp.compile(model)
        optimizer = make(model)
    """,
    "freeze": """
        model.l0.requires_grad_(False)
    """,
    "thaw": """
        model.l0.requires_grad_(True)
    """,
    "eager call": """
        seen.append(model(rows(4, 0.2)))
    """,
    "penalty": """
        optimizer.zero_grad()
        (0.1 * sum(p.norm() for p in model.parameters() if p.requires_grad and p.dim())).backward()
        optimizer.step()
    """,
    "learning rate": """
        for group in optimizer.param_groups:
            group['lr'] *= 0.5
    """,
    "look": """
        seen += [p.detach().norm() for p in model.parameters()] + [model.l0.weight[0], float(model.l0.weight.sum())]
    """,
}


@st.composite
def scripts(draw: Draw) -> str:
    """The text of a module with a function `script(hp)`, as a use of `tests.scripts.use` is."""
    lines = [HEADER.strip("\n"), *_model(draw), "", "", "def script(hp):", *_indent(_loop(draw))]
    return "\n".join(lines) + "\n"


def _model(draw: Draw) -> list[str]:
    names = draw(st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=6))
    make, run, layers = ["self.l0 = nn.Linear(W, W)"], ["side = x.new_zeros(())", "h = self.l0(x)"], [0]
    for number, name in enumerate(names, 1):
        inits, forwards = BLOCKS[name]
        numbers = {"i": number, "k": draw(st.sampled_from(layers)) if "{k}" in str((inits, forwards)) else 0}
        make += [_filled(line, numbers) for line in inits]
        run += [_filled(line, numbers) for line in forwards]
        if any("self.l{i} =" in line for line in inits):
            layers.append(number)
    output, loss = OUTPUTS[draw(st.sampled_from(list(OUTPUTS)))]
    return ["", "", "class Model(nn.Module):", "    def __init__(self):", "        super().__init__()", *_indent(make, 2), "",
            "    def forward(self, x):", *_indent([*run, output], 2), "", "", "def loss_of(out, y):",
            f"    return ({loss} - y).square().mean()"]


def _filled(line: str, numbers: dict[str, int]) -> str:
    for name, number in numbers.items():
        line = line.replace(f"{{{name}}}", str(number))
    return line


def _loop(draw: Draw) -> list[str]:
    two = draw(st.booleans())
    lines = ["def make(model):", f"    return {OPTIMIZERS[draw(st.sampled_from(list(OPTIMIZERS)))]}", "",
             "model, seen, total = Model(), [], torch.zeros(())", "call, optimizer = hp.compile(model), make(model)"]
    if two:
        lines += ["other = Model()", "call_other, optimizer_other = hp.compile(other), make(other)"]
    for _ in range(draw(st.integers(1, 3))):
        lines += _step(draw, two)
        if draw(st.booleans()):
            lines += _lines(EVENTS[draw(st.sampled_from(list(EVENTS)))])
    lines += _step(draw, two)
    return [*lines, f"return seen, total, model, optimizer{', other, optimizer_other' if two else ''}"]


def _step(draw: Draw, two: bool) -> list[str]:
    zero = draw(st.sampled_from(ZEROS)).splitlines()
    count = draw(st.sampled_from([8, 8, 4, 6, 5]))
    lines = list(zero)
    for part in range(draw(st.sampled_from([1, 1, 2]))):
        lines += [f"loss = loss_of(call(rows({count}, {part / 10})), rows({count}, 1.0))"]
        if two and draw(st.booleans()):
            lines += ["optimizer_other.zero_grad()",
                      f"loss = loss + loss_of(call_other(rows({count}, 0.7)), rows({count}, 2.0))"]
        lines += ["if loss.requires_grad:", "    loss.backward()", "seen.append(loss.item())"]
    for name in draw(st.lists(st.sampled_from(sorted(EDITS)), max_size=2, unique=True)):
        lines += _lines(EDITS[name])
    lines += ["optimizer.step()"]
    return [*lines, "optimizer_other.step()"] if two else lines


def _lines(text: str) -> list[str]:
    return textwrap.dedent(text).strip("\n").splitlines()


def _indent(lines: list[str], depth: int = 1) -> list[str]:
    return [f"{'    ' * depth}{line}" if line else "" for text in lines for line in text.splitlines() or [""]]
