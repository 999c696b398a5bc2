"""Pruning with masks: torch.nn.utils.prune on a compiled model, once before training and once more in its middle.

    python examples/pruning.py                     # on one device
    hpml run --nproc 2 examples/pruning.py         # on two: the same losses and the same masks

A mask is a buffer that `prune` multiplies with the original weight in each forward. The second pruning chooses new masks from
the trained weights, as on one device, and writes them into these buffers; the graph stays the same.
"""
from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn.utils import prune


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="")
    parser.add_argument("--compiler", default="inductor")
    given = parser.parse_args()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))
    layers = [layer for layer in net if isinstance(layer, nn.Linear)]
    for layer in layers:
        prune.l1_unstructured(layer, "weight", amount=0.3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = torch.compile(net, backend="hpml", options={"compiler": given.compiler})
    for number in range(6):
        if number == 3:
            for layer in layers:
                weight = layer.weight_orig.detach().abs() * layer.weight_mask
                least = weight.flatten().kthvalue(weight.numel() // 2).values
                layer.weight_mask.copy_(weight > least)
        inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(number))
        loss = nn.functional.cross_entropy(model(inputs), (inputs.sum(1) > 0).long())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {number} loss {loss.item():.6f}")
    masks = torch.cat([layer.weight_mask.flatten() for layer in layers])
    print(f"evaluation {masks.mean().item():.4f} of the weights are left")


if __name__ == "__main__":
    main()
