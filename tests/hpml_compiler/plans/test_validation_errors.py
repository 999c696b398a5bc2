"""pydantic's errors -> one plain line with the place, the expected and the given value."""
from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from hpml_compiler.options import Options
from hpml_compiler.plan_api.model_plan import Plan
from passes.errors import BadInput
from tests.helpers.plans import gpt_plan

PYDANTICS = re.compile(r"Input should|valid (integer|number|string|dictionary|boolean)|Extra inputs|Field required|Value error"
                       r"|pydantic|validation error|unable to parse")

OPTIONS: list[tuple[str, Any, str]] = [
    ("microbatches", 0, "microbatches: expected a number of at least 1, got 0"),
    ("microbatches", "2", "microbatches: expected an integer, got '2'"),
    ("microbatches", 1.5, "microbatches: expected an integer, got 1.5"),
    ("microbatches", True, "microbatches: expected an integer, got true"),
    ("mesh", [2], "mesh: expected an object, got an array"),
    ("mesh", "dp2", "mesh: expected an object, got 'dp2'"),
    ("mesh", {"dp": 0}, "mesh: the size of axis 'dp' is 0, not a positive integer"),
    ("zero", 7, "zero: expected 'auto', 0, 1, 2 or 3, got 7"),
    ("time_limit", -1, "time_limit: expected a number above 0, got -1"),
    ("time_limit", math.inf, "time_limit: expected a finite number, got inf"),
    ("time_limit", None, "time_limit: expected a number, got null"),
    ("schedule", "x", "expected 'auto', 'gpipe', '1f1b', 'interleaved', 'zero_bubble' or 'zbv', got 'x'"),
    ("monitor", "yes", "monitor: expected true or false, got 'yes'"),
    ("cluster", 3, "cluster: expected a string, got 3"),
    ("plan", 3, "plan: expected a string or an object, got 3"),
    ("plan", {}, "plan.torch_version: the key is missing"),
]


@pytest.mark.parametrize(("name", "value", "said"), OPTIONS)
def test_options(name, value, said):
    with pytest.raises(BadInput) as error:
        Options.parse({name: value})
    assert said in error.value.what and not PYDANTICS.search(str(error.value))


def walk(content: Any, path: tuple = ()):
    yield path
    for key, value in content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ():
        yield from walk(value, (*path, key))


@pytest.mark.parametrize("wrong", [None, True, -1, 1.5, "x", [], {}, [[]], {"x": 1}], ids=repr)
def test_no_value_anywhere_in_a_plan_brings_pydantics_words(wrong):
    """Each value of a plan in turn is another: it is read, or refused in plain words that name the place."""
    text = gpt_plan().to_json()
    refused = 0
    first_of_each = [path for path in walk(json.loads(text)) if path and not any(isinstance(key, int) and key for key in path)]
    for path in first_of_each:
        content = json.loads(text)
        inner = content
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = wrong
        try:
            Plan.from_json(json.dumps(content))
        except BadInput as error:
            refused += 1
            assert not PYDANTICS.search(str(error)), error
            assert str(path[0]) in str(error), error
    assert refused > 10
