"""Quantization-aware training by torchao: weights are rounded to int4 in forward while they train, and converted afterwards.

    python examples/quantization_aware.py                     # on one device
    hpml run --nproc 2 examples/quantization_aware.py         # on two: the same losses

`quantize_` with QATConfig puts the rounding into the model before it is compiled. The trained weights are gathered into a plain
model, which torchao converts as it does on one device.
"""
from __future__ import annotations

import argparse

import torch
from torch import nn
from torchao.quantization import IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerAxis
from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

import hpml_compiler


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64, bias=False), nn.GELU(), nn.Linear(64, 2, bias=False))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="")
    parser.add_argument("--compiler", default="inductor")
    given = parser.parse_args()
    net = network()
    weights = IntxFakeQuantizeConfig(torch.int4, "per_channel")
    quantize_(net, QATConfig(weight_config=weights, step="prepare"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = torch.compile(net, backend="hpml", options={"compiler": given.compiler})
    for number in range(4):
        inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(number))
        loss = nn.functional.cross_entropy(model(inputs), (inputs.sum(1) > 0).long())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {number} loss {loss.item():.6f}")

    state = hpml_compiler.full_state_dict(net)
    if not state:  # rank 0 has it
        return
    trained = network()
    trained.load_state_dict(state)
    quantize_(trained, IntxWeightOnlyConfig(torch.int4, PerAxis(0)))
    inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        right = (trained(inputs).argmax(-1) == (inputs.sum(1) > 0).long()).float().mean()
    print(f"evaluation {right.item():.4f}")


if __name__ == "__main__":
    main()
