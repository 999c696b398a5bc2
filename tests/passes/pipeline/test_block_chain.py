"""Handmade calls -> blocks in order, values that cross, and possible cuts."""
from __future__ import annotations

from passes.pipeline.block_chain import FIRST, ForwardCall, chain_of_blocks


def chain_of(*rows):
    """(name, path, what it reads); every value has 8 bytes."""
    return chain_of_blocks([ForwardCall(name, path, tuple(reads.split()), 8.0, name.rstrip("0123456789")) for name, path,
                            reads in rows])


def names(chain):
    return [block.name for block in chain.blocks]


def layers(count, path="h"):
    """Blocks of two calls with a skip inside."""
    rows = [("a0", f"{path}.0", "x"), ("b0", f"{path}.0", "a0 x")]
    for k in range(1, count):
        rows += [(f"a{k}", f"{path}.{k}", f"b{k - 1}"), (f"b{k}", f"{path}.{k}", f"a{k} b{k - 1}")]
    return rows


def test_layers_one_after_another_may_be_cut_anywhere():
    chain = chain_of(*layers(4))
    assert names(chain) == ["h.0", "h.1", "h.2", "h.3"]
    assert [(cut.after, cut.values, cut.bytes, cut.single) for cut in chain.cuts] == [
        (f"h.{k}", (f"b{k}",), 8.0, True) for k in range(3)]
    assert chain.dominators == {"h.0": FIRST, "h.1": "h.0", "h.2": "h.1", "h.3": "h.2"}
    assert chain.articulation_points == {"h.1", "h.2"}


def test_blocks_that_do_the_same_with_the_same_wiring_are_repetitions():
    other = [("a4", "h.4", "b3"), ("b4", "h.4", "b3 a4")]  # its sum has the operands the other way around
    inside = [(n, p, r.replace("x", "e")) for n, p, r in layers(4)]
    chain = chain_of(("e", "embedding", "x"), *inside, *other, ("y", "head", "b4"))
    assert chain.repetitions == (("embedding",), ("h.0", "h.1", "h.2", "h.3"), ("h.4",), ("head",))


def test_what_the_model_calls_itself_before_and_after_its_blocks_is_two_blocks():
    chain = chain_of(("e", "", "x"), *[(n, p, r.replace("x", "e")) for n, p, r in layers(2)], ("loss", "", "b1"))
    assert names(chain) == ["", "h.0", "h.1", "@1"]


def test_a_block_that_is_called_again_on_what_it_made_is_another_one():
    chain = chain_of(("a0", "layer.0", "x"), ("a1", "layer.0", "a0"), ("n", "norm", "a1"), ("a2", "layer.0", "n"))
    assert names(chain) == ["layer.0", "norm", "layer.0@1"]
    assert [block.pieces for block in chain.blocks] == [("a0", "a1"), ("n",), ("a2",)]


def test_an_encoder_and_a_decoder_that_reads_it_in_every_block():
    encoder = [("e0", "encoder.0", "x"), ("e1", "encoder.1", "e0")]
    chain = chain_of(*encoder, ("d0", "decoder.0", "t e1"), ("d1", "decoder.1", "d0 e1"), ("d2", "decoder.2", "d1 e1"))
    assert names(chain) == ["encoder.0", "encoder.1", "decoder.0", "decoder.1", "decoder.2"]
    assert [(cut.values, cut.single) for cut in chain.cuts] == [
        (("e0",), True), (("e1",), True), (("e1", "d0"), False), (("e1", "d1"), False)]
    assert chain.dominators["decoder.1"] == chain.dominators["decoder.0"] == "encoder.1"
    assert chain.graph.edges["encoder.1", "decoder.2"] == {"bytes": 8.0, "values": ("e1",)}


def test_a_u_net_has_no_cheap_cut_in_the_middle():
    """down.0 -> down.1 -> middle -> up.1 (reads down.1) -> up.0 (reads down.0) -> head."""
    chain = chain_of(("stem", "stem", "x"), ("p0", "down.0", "stem"), ("p1", "down.1", "p0"), ("m", "middle", "p1"),
                     ("u1", "up.1", "m p1"), ("u0", "up.0", "u1 p0"), ("y", "head", "u0"))
    assert [cut.after for cut in chain.cuts if cut.single] == ["stem", "down.0", "up.0"]
    assert {cut.after: cut.bytes for cut in chain.cuts} == {
        "stem": 8.0, "down.0": 8.0, "down.1": 16.0, "middle": 24.0, "up.1": 16.0, "up.0": 8.0}
    assert chain.articulation_points == {"down.0", "up.0"}
    assert chain.dominators["up.0"] == "down.0"  # around the middle, over the skip connection


def test_what_anybody_can_compute_crosses_nothing():
    pieces = [ForwardCall("mask", "", ("tokens",), 64.0, free=True)]
    pieces += [ForwardCall(f"a{k}", f"h.{k}", ("mask", f"a{k - 1}" if k else "x"), 8.0) for k in range(3)]
    chain = chain_of_blocks(pieces)
    assert [cut.bytes for cut in chain.cuts] == [0.0, 8.0, 8.0]
    assert [crossing.value for crossing in chain.crossings] == ["a0", "a1"]


def test_a_block_comes_after_what_it_reads_though_it_starts_before():
    chain = chain_of(("i", "late", "x"), ("a", "early", "x"), ("b", "late", "i a"), ("c", "last", "b"))
    assert names(chain) == ["early", "late", "last"]
