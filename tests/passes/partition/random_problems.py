"""Random small partition problems for hypothesis: chains, diamonds, values with many users, layers that feed themselves."""
from __future__ import annotations

from hypothesis import strategies as st

from passes.partition import Arc, Choice, Edge, Entity, Problem

LABELS = ("R", "S(0)", "S(1)", "P")
_AMOUNTS = st.one_of(st.integers(0, 12).map(float), st.floats(0.01, 1e6, allow_nan=False))


@st.composite
def arcs(draw) -> tuple[Arc, ...]:
    """Arcs between the labels: mostly from each to each, else any, one way only, several of unlike cost, free circles."""
    if draw(st.integers(0, 3)):
        return tuple(Arc(a, b, draw(_AMOUNTS)) for a in LABELS for b in LABELS if a != b)
    ends = st.sampled_from(LABELS)
    return tuple(draw(st.lists(st.builds(Arc, ends, ends, _AMOUNTS), max_size=10)))


@st.composite
def problems(draw, nothing: bool = True, budgets: bool = True, most_entities: int = 6) -> Problem:
    """nothing: labels may be None. Bytes and budgets are whole numbers, so that all sums of them are exact."""
    count = draw(st.integers(1, most_entities))
    supplied = st.sampled_from((*LABELS, None) if nothing and draw(st.integers(0, 3)) == 0 else LABELS)
    demanded = st.sampled_from((*LABELS, None) if nothing and draw(st.booleans()) else LABELS)
    # earlier -> later in any shape, now and then an entity to itself or back
    ends = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    pairs = [pair if draw(st.integers(0, 5)) == 0 else tuple(sorted(pair)) for pair in draw(st.lists(ends, max_size=9))]
    out_ports, in_ports = [0] * count, [0] * count
    spots = []
    for source, target in pairs:
        if out_ports[source] and draw(st.booleans()):  # one more user of a value that has one
            spot = draw(st.integers(0, out_ports[source] - 1))
        else:
            spot, out_ports[source] = out_ports[source], out_ports[source] + 1
        spots.append((source, spot, target, in_ports[target]))
        in_ports[target] += 1
    entities = tuple(
        Entity(f"entity {i}", "op", draw(st.integers(1, 4)), tuple(
            Choice(draw(_AMOUNTS), float(draw(st.integers(0, 20))),
                   tuple(draw(demanded) for _ in range(in_ports[i])), tuple(draw(supplied) for _ in range(out_ports[i])))
            for _ in range(draw(st.integers(1, 5)))))
        for i in range(count)
    )
    shared = draw(arcs())
    edges = tuple(
        Edge(*spot, draw(st.integers(0, 4)), shared if draw(st.booleans()) else draw(arcs()), f"edge {i}")
        for i, spot in enumerate(spots)
    )
    budget = float(draw(st.integers(0, 120))) if budgets and draw(st.booleans()) else None
    return Problem(entities, edges, budget)
