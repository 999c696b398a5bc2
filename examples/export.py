"""torch.export and ONNX of a model that was trained over several devices.

    python examples/export.py                     # on one device
    hpml run --nproc 2 examples/export.py         # on two: the same losses, the same files

Exporters read parameters of one device, so the trained state is gathered into a plain model (on all ranks; rank 0 writes).
"""
from __future__ import annotations

import argparse
from pathlib import Path

import onnx
import onnx.reference
import torch
from torch import nn

import hpml_compiler


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 2))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="export_output")
    parser.add_argument("--compiler", default="inductor")
    given = parser.parse_args()
    folder = Path(given.output)
    folder.mkdir(parents=True, exist_ok=True)
    net = network()
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
    plain = network().eval()
    plain.load_state_dict(state)
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(99))
    expected = plain(inputs).detach()
    exported = torch.export.export(plain, (inputs,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    torch.export.save(exported, folder / "model.pt2")
    torch.testing.assert_close(torch.export.load(folder / "model.pt2").module()(inputs), expected)
    torch.onnx.export(exported, dynamo=True, verbose=False).save(folder / "model.onnx")
    (found,) = onnx.reference.ReferenceEvaluator(onnx.load(folder / "model.onnx")).run(None, {"input": inputs.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-5)
    print(f"evaluation {expected.abs().sum().item():.5f}")


if __name__ == "__main__":
    main()
