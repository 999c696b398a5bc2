"""accelerate wraps a compiled model in DDP -> one device's training, and whole checkpoints."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.hpml_compiler.runtime.common import assert_close, assert_same_parameters, full

pytest.importorskip("accelerate", reason="accelerate not installed: pip install -e '.[examples]'")

ROWS, STEPS = 16, 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)).double()


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(ROWS * STEPS, 6, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(inputs, torch.randint(3, (ROWS * STEPS,), generator=generator))


def one_device() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    model = network()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for inputs, target in torch.utils.data.DataLoader(data(), batch_size=ROWS):
        loss = nn.functional.cross_entropy(model(inputs), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses


def train(rank, folder):
    from accelerate import Accelerator
    from safetensors.torch import load_file

    from hpml_compiler.integrations.ddp_shim import SplitDDP

    accelerator, model = Accelerator(cpu=True), network()
    compiled = torch.compile(model, backend="hpml", options={"compiler": "eager"})
    wrapped, optimizer, loader = accelerator.prepare(
        compiled, torch.optim.AdamW(compiled.parameters(), lr=1e-2), torch.utils.data.DataLoader(data(), batch_size=ROWS // 2))
    assert isinstance(wrapped, SplitDDP) and accelerator.num_processes == 2
    reference, _, expected = one_device()
    losses = []
    for inputs, target in loader:
        loss = nn.functional.cross_entropy(wrapped(inputs), target)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()[None]).mean().item())
    assert losses == pytest.approx(expected, abs=1e-9)
    assert_same_parameters(model, reference, atol=1e-9)
    accelerator.save_state(folder)
    saved = load_file(f"{folder}/model.safetensors")
    assert {name.removeprefix("_orig_mod.") for name in saved} == set(reference.state_dict())
    for name, value in reference.state_dict().items():
        assert_close(saved[f"_orig_mod.{name}"], value, atol=1e-9)
    # loaded into what is placed: training goes on from there
    before = {name: full(value).clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(folder)
    for name, value in model.state_dict().items():
        assert_close(value, before[name], atol=0)


def test_ddp_of_accelerate(launch, tmp_path):
    launch(train, world_size=2, args=(str(tmp_path / "state"),), init=False)
