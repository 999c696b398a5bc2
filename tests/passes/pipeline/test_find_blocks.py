"""Traced models before -> the chain of their blocks after."""
from __future__ import annotations

import torch
from torch import nn

from passes.annotations import read
from passes.pipeline.find_blocks import BLOCK_CHAIN, FindBlocks
from tests.passes.traced import annotated_joint, transformer


def chain_of(model, *batch):
    graph_module = annotated_joint(model, *batch).gm
    FindBlocks()(graph_module)
    return read(BLOCK_CHAIN, graph_module)


def test_the_layers_of_a_language_model_hand_on_one_value_each():
    model, batch = transformer(32, 16, 2, 4, rows=2, length=8)
    chain = chain_of(model, *batch)
    blocks = [block.name for block in chain.blocks]
    assert [name for name in blocks if name.startswith("blocks.")] == [f"blocks.{k}" for k in range(4)]
    assert blocks[0] == "embedding" and blocks.index("head") > blocks.index("blocks.3")
    cuts = {cut.after: cut for cut in chain.cuts}
    assert all(cuts[f"blocks.{k}"].single and cuts[f"blocks.{k}"].bytes == 2 * 8 * 16 * 4 for k in range(3))
    assert ("blocks.0", "blocks.1", "blocks.2", "blocks.3") in chain.repetitions




class UNet(nn.Module):
    """Two levels down and two up, each up reading its level's down."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)])
        self.up = nn.ModuleList([nn.Sequential(nn.Linear(16, 8), nn.ReLU()) for _ in range(2)])

    def forward(self, x):
        first = self.down[0](x)
        second = self.down[1](first)
        up = self.up[0](torch.cat([second, second], -1))
        return self.up[1](torch.cat([up, first], -1)).square().mean()


def test_the_skip_of_a_u_net_crosses_its_middle():
    chain = chain_of(UNet(), torch.randn(4, 8))
    cuts = {cut.after: cut for cut in chain.cuts}
    assert cuts["down.0"].single and not cuts["down.1"].single and len(cuts["down.1"].values) == 2


class EncoderDecoder(nn.Module):
    """Both embed with the same table; every block of the decoder reads the encoder's result."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(16, 8)
        self.encoder, self.decoder = (nn.ModuleList([nn.Sequential(nn.Linear(8, 8)) for _ in range(2)]) for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens, targets):
        x = self.shared(tokens)
        for block in self.encoder:
            x = block(x)
        y = self.shared(targets)
        for block in self.decoder:
            y = block(y + x)
        return nn.functional.cross_entropy(self.head(y), targets)


def test_the_encoder_comes_first_and_its_result_crosses_the_decoder():
    chain = chain_of(EncoderDecoder(), torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.long))
    blocks = [block.name for block in chain.blocks]
    assert [name for name in blocks if "coder" in name] == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]
    cuts = {cut.after: cut for cut in chain.cuts}
    assert cuts["encoder.0"].single  # the second embedding is looked up after the encoder
    (over,) = set(cuts["decoder.0"].values) & {c.value for c in chain.crossings if c.source == "encoder.1"}
    assert over
    assert {"encoder.0", "encoder.1"} in map(set, chain.repetitions)
