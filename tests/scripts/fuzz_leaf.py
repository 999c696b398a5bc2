"""Random scripts in which several graphs of a step read one leaf: `python -m tests.scripts.fuzz --of leaves`.

It is tied, sliced, viewed, looked up, read by eager code too, frozen between forward and backward, has hooks, and its gradients
come in any order and are accumulated.
"""
from __future__ import annotations

from hypothesis import strategies as st

HEAD = '''
import torch
from torch import nn
from torch.nn import functional as F

READS = {
    "whole": lambda x, w: x @ w,
    "transposed": lambda x, w: F.linear(x, w),
    "sliced": lambda x, w: x[:, :4] @ w[2:6],
    "columns": lambda x, w: torch.cat([x @ w[:, 4:], x[:, :4]], 1),
    "viewed": lambda x, w: x @ w.view(4, 16).view(8, 8),
    "flat": lambda x, w: x * w.view(-1)[8:16],
    "row": lambda x, w: x + w[3],
    "expanded": lambda x, w: (x.unsqueeze(1) * w.expand(len(x), 8, 8)).sum(1),
    "looked_up": lambda x, w: x + F.embedding(torch.arange(len(x)) * 3 % 8, w),
    "detached": lambda x, w: x @ (w.detach() + 0.5 * w),
    "normed": lambda x, w: F.normalize(x @ w, dim=1) * w.norm(),
}


class Part(nn.Module):
    def __init__(self, weight, reads):
        super().__init__()
        self.weight, self.reads, self.own = weight, reads, nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.own(READS[self.reads](x, self.weight)))


class Chain(nn.Module):
    def __init__(self, parts, breaks):
        super().__init__()
        self.parts, self.breaks = nn.ModuleList(parts), breaks

    def forward(self, x):
        results = []
        for k, part in enumerate(self.parts):
            x = part(x)
            results.append(x)
            if k in self.breaks:
                torch._dynamo.graph_break()
        return results


def script(hp):
    x = torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8).mul(7).sin()
    weight = nn.Parameter(torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8).mul(5).cos() / 3)
    seen = []
'''


@st.composite
def leaves(draw: st.DrawFn) -> str:
    """The text of a script."""
    reads = st.sampled_from(["whole", "transposed", "sliced", "columns", "viewed", "flat", "row", "expanded", "looked_up",
                             "detached", "normed"])
    chains = draw(st.lists(st.tuples(st.lists(reads, min_size=1, max_size=3), st.booleans()), min_size=1, max_size=3))
    lines = ["models = nn.ModuleList()"]
    for parts, broken in chains:
        made = ", ".join(f"Part(weight, {each!r})" for each in parts)
        lines.append(f"models.append(Chain([{made}], {set(range(len(parts) - 1)) if broken else set()}))")
    lines.append("calls = [hp.compile(model) for model in models]")
    hooks = draw(st.sets(st.sampled_from(["halved", "seen", "accumulated"])))
    lines += [text for name, text in (
        ("halved", "weight.register_hook(lambda g: g * 0.5)"),
        ("seen", "weight.register_hook(lambda g: seen.append(g.sum().item()))"),
        ("accumulated", "weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.abs().sum().item()))"),
    ) if name in hooks]
    lines.append("optimizer = torch.optim.SGD(models.parameters(), lr=0.05, momentum=0.9)")
    lines.append(f"for step in range({draw(st.integers(1, 3))}):")
    lines += [f"    {line}" for line in _step(draw, len(chains), "halved" not in hooks)]
    lines.append("return seen, models, optimizer")
    return HEAD + "\n".join(f"    {line}" for line in lines) + "\n"


def _step(draw: st.DrawFn, chains: int, may_freeze: bool) -> list[str]:
    lines = ["results = []"]
    for k in range(chains):
        given = "x" if k == 0 or draw(st.booleans()) else f"results[{k - 1}][-1]"
        lines.append(f"results.append(calls[{k}]({given}))")
    if draw(st.booleans()):
        lines.append("results.append([x @ " + "models[0].parts[0].weight * 2])")
    used = draw(st.lists(st.tuples(st.integers(0, chains - 1), st.booleans()), min_size=1, max_size=3))
    lines.append("losses = [" + ", ".join(
        f"results[{k}][{0 if first else -1}].square().mean()" for k, first in used) + "]")
    lines.append("if len(results) > " + str(chains) + ": losses.append(results[-1][0].sin().mean())")
    lines.append("seen.extend(loss.item() for loss in losses)")
    frozen = may_freeze and draw(st.booleans())
    lines += ["weights = models[0].parts[0].weight", "weights.requires_grad_(False)"] if frozen else []
    how = draw(st.sampled_from(["sum", "each", "reversed", "all"]))
    lines += {
        "sum": ["sum(losses).backward()"],
        "each": ["for loss in losses: loss.backward(retain_graph=True)"],
        "reversed": ["for loss in losses[::-1]: loss.backward(retain_graph=True)"],
        "all": ["torch.autograd.backward(losses)"],
    }[how]
    lines += ["weights.requires_grad_(True)"] if frozen else []
    lines.append("seen.append([p.grad is None for p in models.parameters()])")
    if draw(st.booleans()):
        lines.append("nn.utils.clip_grad_norm_(models.parameters(), 0.1)")
    lines += ["if step % 2 == 0: continue"] if draw(st.booleans()) else []  # accumulated
    return [*lines, "optimizer.step()", "optimizer.zero_grad()"]
