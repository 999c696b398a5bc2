"""A model of the meta device -> shards with the values of one device, from its initialization or from files; it trains."""
from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
import transformers as T
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import hpml_compiler
from hpml_compiler.runtime.placements.inner_shard import InnerShard
from hpml_compiler.runtime.weights.weights_source import WeightsSource
from hpml_compiler.session import session
from passes.errors import BadInput
from tests.hpml_compiler.runtime.common import full

WIDTH, TOKENS = 16, 32
TEXT = torch.arange(32).reshape(4, 8)


class Block(nn.Module):
    """With a fused weight, whose halves do not fit its view."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.fused = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.fused(self.norm(x)).view(-1, 3, WIDTH).unbind(1)
        return x + self.down(F.gelu(self.up(a * b + c)))


class Language(nn.Module):
    """Tied embedding and head, and a bias that two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head, self.odd = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False), nn.Linear(WIDTH, 3)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return F.cross_entropy(self.head(x), (tokens + 1) % TOKENS) + self.odd(x).square().mean()


def on_meta():
    with torch.device("meta"):
        return Language()


def losses(model, steps=3, eager=0, **options):
    """Losses of steps of AdamW; `eager` of them before the model is compiled."""
    torch._dynamo.reset()
    call = torch.compile(model, backend="hpml", options={"compiler": "eager", **options}) if options else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    found = []
    for k in range(steps):
        optimizer.zero_grad()
        loss = (model if k < eager else call)(torch.arange(8) * (k + 1) % TOKENS)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def whole_model():
    """As one device makes it. (Tied weights: the embedding's draw comes first, then that of the head, which counts.)"""
    torch.manual_seed(0)
    model = on_meta()
    hpml_compiler.initialize(model)
    return model


def test_initialized_as_on_one_device():
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Embedding(4, 4), nn.LSTM(4, 4)),
                             nn.MultiheadAttention(8, 2)).state_dict()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Embedding(4, 4), nn.LSTM(4, 4)),
                              nn.MultiheadAttention(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(0)
    assert hpml_compiler.initialize(model) is model
    drawn = {name: value for name, value in model.state_dict().items() if not name.startswith("3.")}
    for name, value in drawn.items():
        assert torch.equal(value, expected[name]), name
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))


def run_initialize(rank, mesh):
    torch.manual_seed(0)
    model = hpml_compiler.initialize(on_meta(), mesh=mesh)
    sharded = [name for name, p in model.named_parameters() if p.to_local().shape != p.shape]
    assert "embedding.weight" in sharded and "odd.bias" not in sharded and model.head.weight is model.embedding.weight
    state = {name: full(value).tolist() for name, value in model.state_dict().items()}
    seen = losses(model, eager=1, mesh=mesh)
    assert model.blocks[1].fused.weight.placements == (InnerShard(0, 3),) * len(mesh), "its optimizer state has moved with it"
    return state, seen


@pytest.mark.parametrize("mesh", [{"tp": 2}, pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.slow)], ids=str)
def test_each_rank_initializes_its_shards(launch, mesh):
    model = whole_model()
    expected = {name: value.tolist() for name, value in model.state_dict().items()}
    alone = losses(model)
    for state, seen in launch(run_initialize, 2 * len(mesh), (mesh,)):
        assert state == expected
        torch.testing.assert_close(seen, alone, rtol=1e-5, atol=1e-6)


def of_transformers(kind):
    if kind == "gpt2":
        config = T.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0)
    else:
        config = T.LlamaConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=64, intermediate_size=64)
    config.use_cache = False
    return T.AutoModelForCausalLM.from_config(config)


def values(model):
    """Values of parameters and of all buffers, also of those that no state dict has."""
    return {name: full(value).tolist() for name, value in [*model.named_parameters(), *model.named_buffers()]}


def run_of_transformers(rank, folder):
    found = []
    for kind in ("gpt2", "llama"):
        with torch.device("meta"):
            model, other = of_transformers(kind), of_transformers(kind)
        torch.manual_seed(0)
        hpml_compiler.initialize(model)
        hpml_compiler.save(model, f"{folder}/{kind}")
        dist.barrier()
        hpml_compiler.load(other, f"{folder}/{kind}")
        found.append((values(model), values(other)))
    call = torch.compile(other.eval(), backend="hpml", options={"compiler": "eager", "mesh": {"dp": 2}})
    return found, call(input_ids=TEXT, labels=TEXT).loss.item()


def test_models_of_transformers(launch, tmp_path):
    """Each rank's shards are those of `initialize_weights` on one device; files give the same, with buffers that they lack."""
    expected = []
    for kind in ("gpt2", "llama"):
        model = of_transformers(kind)
        for module in model.modules():
            module.__dict__.pop("_is_hf_initialized", None)
        torch.manual_seed(0)
        model.initialize_weights()
        expected.append((values(model), values(model)))
    alone = model.eval()(input_ids=TEXT, labels=TEXT).loss.item()
    for found, loss in launch(run_of_transformers, args=(str(tmp_path),)):
        assert found == expected and loss == pytest.approx(alone, rel=1e-5)


def run_load(rank, folder):
    whole, model = hpml_compiler.load(Language(), f"{folder}/whole"), on_meta()
    optimizer = torch.optim.AdamW(model.parameters())  # made too early
    hpml_compiler.load(model, f"{folder}/whole")
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    del optimizer
    assert model.blocks[0].up.weight.to_local().shape == (2 * WIDTH, WIDTH)
    seen = losses(model, mesh={"dp": 2})
    assert model.blocks[0].fused.weight.placements == (InnerShard(0, 3),)
    hpml_compiler.save(model, f"{folder}/again", file_bytes=4000)
    session.reset()
    hpml_compiler.load(model, f"{folder}/whole")  # into shards
    expected = load_file(f"{folder}/whole/model.safetensors")
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), expected.get(name, expected["embedding.weight"])), name
    blocks = hpml_compiler.load(on_meta(), f"{folder}/whole").blocks
    blocks[0].compile(backend="hpml", options={"compiler": "eager", "mesh": {"dp": 2}})
    made = [block(torch.ones(4, WIDTH)).sum() for block in blocks]
    made[0].backward()
    for name in ("up", "fused"):  # what guards compare: equal blocks, compiled one by one, are compiled once
        assert len({id(getattr(block, name).weight._spec) for block in blocks}) == 1
    assert blocks[1].fused.bias.placements == (InnerShard(0, 3),)
    torch.testing.assert_close([x.item() for x in made], [block(torch.ones(4, WIDTH)).sum().item() for block in whole.blocks])
    checkpointer = hpml_compiler.Checkpointer(f"{folder}/run", model)
    checkpointer.save(0, wait=True)
    other = hpml_compiler.load(on_meta(), f"{folder}/run/step-00000001/model")
    assert all(torch.equal(full(a), full(b)) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    dist.barrier()
    return seen, {name: full(value).tolist() for name, value in other.state_dict().items()}


def test_each_rank_reads_its_shards(launch, tmp_path):
    model = whole_model()
    hpml_compiler.save(model, tmp_path / "whole")
    expected = losses(model)
    for seen, _ in launch(run_load, args=(str(tmp_path),)):
        torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-6)
    index = json.loads((tmp_path / "again" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2 and "head.weight" not in index["weight_map"]
    trained = hpml_compiler.load(Language(), tmp_path / "again")
    torch.testing.assert_close(trained.state_dict(), model.state_dict(), rtol=1e-4, atol=1e-5)


def test_dtypes_are_converted(tmp_path):
    model = whole_model()
    hpml_compiler.save(model.bfloat16(), tmp_path)
    again = hpml_compiler.load(on_meta(), tmp_path)
    assert again.odd.weight.dtype == torch.float32 and torch.equal(again.odd.weight, model.odd.weight.float())
    assert torch.equal(hpml_compiler.load(Language().double(), tmp_path).odd.weight, model.odd.weight.double())


def spoiled(folder, change):
    model = whole_model()
    hpml_compiler.save(model, folder)
    path = folder / "model.safetensors"
    state = load_file(path)
    change(state, folder)
    if path.exists():
        save_file(state, path)


@pytest.mark.parametrize(("change", "message"), [
    (lambda state, folder: state.pop("odd.bias"), "do not have odd.bias"),
    (lambda state, folder: state.update(other=torch.zeros(1)), "the model does not have other"),
    (lambda state, folder: state.update({"odd.bias": torch.zeros(4)}), "odd.bias is 4 in the files, and 3 in the model"),
    (lambda state, folder: (folder / "model.safetensors").unlink(), "has no safetensors files"),
    (lambda state, folder: (folder / "more.safetensors").write_bytes((folder / "model.safetensors").read_bytes()), "two files"),
    (lambda state, folder: (folder / "x.safetensors.index.json").write_text("{"), "no weight_map"),
    (lambda state, folder: (folder / "x.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}'), "not beside it"),
    (lambda state, folder: (folder / "x.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}'),
     "the index says that a file has a"),
])
def test_files_of_another_model(tmp_path, change, message):
    spoiled(tmp_path, change)
    with pytest.raises(BadInput, match=message) as raised:
        hpml_compiler.load(on_meta(), tmp_path)
    assert raised.value.where and raised.value.next_step


@pytest.mark.parametrize(("mesh", "message"), [({"pp": 1}, "pipeline stages yet"), ({"dp": 2}, "multiplies to 2")])
def test_meshes_that_do_not_fit(mesh, message):
    with pytest.raises(BadInput, match=message):
        hpml_compiler.initialize(on_meta(), mesh=mesh)


def test_what_has_no_values(tmp_path):
    model = on_meta()
    call = torch.compile(model, backend="hpml", options={"compiler": "eager"})
    with pytest.raises(BadInput, match="embedding.weight has no values"):
        call(torch.arange(8))
    torch.manual_seed(0)
    hpml_compiler.initialize(model)
    assert call(torch.arange(8)).requires_grad

    class Raw(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.register_buffer("angles", torch.ones(2), persistent=False)

    with torch.device("meta"):
        model = nn.Sequential(Raw())
    with pytest.raises(BadInput, match="Raw has parameters .* no reset_parameters"):
        hpml_compiler.initialize(model)
    with pytest.raises(BadInput, match="on the meta device: it has no values"):
        hpml_compiler.save(model, tmp_path)

    class Forgets(Raw):
        def reset_parameters(self):
            self.scale.data.fill_(1)

    with torch.device("meta"), pytest.raises(BadInput, match="Forgets's initialization leaves angles without values"):
        hpml_compiler.initialize(Forgets())
    save_file({"0.scale": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(BadInput, match="buffer 0.angles is on the meta device"):
        hpml_compiler.load(model, tmp_path)
    with pytest.raises(BadInput, match="does not exist"):
        WeightsSource(tmp_path / "nothing")
