"""Operator calls on fake tensors -> the operators' results, also when cached."""
from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from passes.transforms.rewriting.fake_results import FakeResults

aten = torch.ops.aten
MODE = FakeTensorMode()


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with MODE:
        return torch.empty(shape, dtype=dtype)


def part() -> torch.Tensor:
    with MODE:
        return torch.empty(8, 6).t()[1:5, 2:]


CALLS = {
    "add": lambda x: (aten.add.Tensor, (x, 1.5), {}),
    "twice the same": lambda x: (aten.mul.Tensor, (x, x), {}),
    "mm": lambda x: (aten.mm.default, (x, fake(x.shape[1], 3)), {}),
    "cat": lambda x: (aten.cat.default, ([x, x, fake(*x.shape)], 1), {}),
    "sum": lambda x: (aten.sum.dim_IntList, (x, [0], True), {}),
    "cast": lambda x: (torch.ops.prims.convert_element_type.default, (x, torch.bfloat16), {}),
    "full": lambda x: (aten.full.default, ([2, 3], 0.0), {"dtype": torch.int64, "device": torch.device("cpu")}),
    "clone": lambda x: (aten.clone.default, (x,), {"memory_format": torch.contiguous_format}),
    "permute": lambda x: (aten.permute.default, (x, [1, 0]), {}),
    "slice": lambda x: (aten.slice.Tensor, (x, 0, 1, 3), {}),
    "select": lambda x: (aten.select.int, (x, 0, 1), {}),
    "reshape": lambda x: (aten.reshape.default, (x, [2, x.shape[0] // 2, x.shape[1]]), {}),
    "reshape that may copy": lambda x: (aten.reshape.default, (x, [x.numel()]), {}),
    "several results": lambda x: (aten.split.Tensor, (x, 2), {}),
    "identity": lambda x: (aten.expand.default, (x, list(x.shape)), {}),
}


def alike(found: object, expected: object, given: torch.Tensor, other: torch.Tensor) -> None:
    if not isinstance(expected, torch.Tensor):
        assert isinstance(found, (list, tuple)) and isinstance(expected, (list, tuple)) and len(found) == len(expected)
        for a, b in zip(found, expected):
            alike(a, b, given, other)
        return
    assert isinstance(found, torch.Tensor)
    for of in (lambda x: x.shape, lambda x: x.stride(), lambda x: x.storage_offset(), lambda x: x.dtype, lambda x: x.device):
        assert of(found) == of(expected)
    assert (found.untyped_storage()._cdata == given.untyped_storage()._cdata) == (
        expected.untyped_storage()._cdata == other.untyped_storage()._cdata)


@pytest.mark.parametrize("operand", [lambda: fake(4, 6), part], ids=["whole", "part of another"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_each_time_as_the_operator_says(call, operand):
    results = FakeResults(MODE)
    for _ in range(3):
        given, other = operand(), operand()
        found = results(*call(given))
        target, args, kwargs = call(other)
        with MODE:
            alike(found, target(*args, **kwargs), given, other)


def test_equal_calls_are_asked_for_once():
    results, x = FakeResults(MODE), fake(4, 6)
    first = results(aten.add.Tensor, (x, 1), {})
    with patch.object(FakeTensorMode, "dispatch", side_effect=AssertionError):
        second = results(aten.add.Tensor, (x, 1), {})
    assert second is not first and second.untyped_storage()._cdata != first.untyped_storage()._cdata


@pytest.mark.parametrize("other", [
    (aten.add.Tensor, (fake(4, 6), 1.0), {}), (aten.add.Tensor, (fake(4, 6), True), {}),
    (aten.add.Tensor, (fake(4, 6, dtype=torch.int64), 1), {}), (aten.add.Tensor, (fake(6, 4), 1), {}),
    (aten.add.Tensor, (fake(4, 6), 1), {"alpha": 2}),
])
def test_other_operands_and_constants_are_other_calls(other):
    results = FakeResults(MODE)
    results(aten.add.Tensor, (fake(4, 6), 1), {})
    with patch.object(FakeTensorMode, "dispatch", side_effect=AssertionError), pytest.raises(AssertionError):
        results(*other)


def test_what_writes_is_called_each_time():
    results, x = FakeResults(MODE), fake(4)
    for _ in range(2):
        assert results(aten.add_.Tensor, (x, 1), {}) is x


def test_real_tensors_are_computed_each_time():
    results = FakeResults(None)
    assert [float(results(aten.add.Tensor, (torch.tensor(k), 1.0), {})) for k in (1.0, 2.0)] == [2.0, 3.0]
