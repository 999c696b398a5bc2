"""Unmodified scripts on two ranks -> a report of their steps; a wrong cluster -> a warning that names the class that is off."""
from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import hpml_compiler
from hpml_compiler.monitor import report as report_of_a_run
from hpml_compiler.monitor.kernel_classes import CLASSES
from hpml_compiler.session import session
from passes.errors import BadInput
from passes.hardware.cluster import Cluster, DeviceSheet
from passes.json_records import FrozenMap

X = torch.linspace(-1, 1, 16 * 32).view(16, 32).sin()
Y = torch.linspace(1, -1, 16 * 4).view(16, 4).cos()


class Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[int, str]] = []
        logging.getLogger("hpml").addHandler(self)
        logging.getLogger("hpml").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append((record.levelno, record.getMessage()))

    def of(self, level: int) -> list[str]:
        return [text for found, text in self.heard if found == level and "step time" in text]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4))


def compiled(model: nn.Module, **options):
    torch._dynamo.reset()
    session.reset()
    return torch.compile(model, backend="hpml", options={"compiler": "eager", "mesh": {"dp": 2}, **options})


def accumulate(model, call, optimizer, steps=9, times=3):
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(times):
            (F.mse_loss(call(X), Y) / times).backward()
        optimizer.step()
    return hpml_compiler.last_report()


def evaluate_and_two_optimizers(model, call, _):
    first, second = torch.optim.SGD(model[:2].parameters(), lr=0.1), torch.optim.Adam(model[2:].parameters())
    for step in range(9):
        F.mse_loss(call(X), Y).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        if step % 4 == 3:
            with torch.no_grad():
                for _ in range(3):
                    call(X[:4])
    return hpml_compiler.last_report()


def _reports(rank: int, cluster: str):
    report_of_a_run.SHORT_US = 0.0  # the models are toys
    found, model = {}, net()
    call = compiled(model)
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        hpml_compiler.last_report()
    except BadInput as error:
        found["none yet"] = str(error)
    found["accumulate"] = accumulate(model, call, optimizer)
    found["plan"] = hpml_compiler.last_plan()
    model = net()
    found["two optimizers"] = evaluate_and_two_optimizers(model, compiled(model), None)
    listener, model = Listener(), net()
    call, optimizer = compiled(model, cluster=cluster), torch.optim.AdamW(model.parameters())
    found["losses"] = []
    for _ in range(19):
        optimizer.zero_grad()
        loss = F.mse_loss(call(X), Y)
        loss.backward()
        optimizer.step()
        found["losses"].append(loss.item())
    found["wrong"], found["heard"] = hpml_compiler.last_report(), (listener.of(logging.INFO), listener.of(logging.WARNING))
    model = net()
    call, optimizer = compiled(model, monitor=False), torch.optim.AdamW(model.parameters())
    found["unmonitored"] = []
    for _ in range(19):
        optimizer.zero_grad()
        loss = F.mse_loss(call(X), Y)
        loss.backward()
        optimizer.step()
        found["unmonitored"].append(loss.item())
    found["off"] = session.current().monitor
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What both ranks found, told that each of them is a hundred times faster than this machine."""
    from tests.helpers.ranks import run_ranks

    folder = tmp_path_factory.mktemp("cluster")
    group = Cluster.local(2, "cpu").group
    rates = FrozenMap({dtype: 100 * rate for dtype, rate in group.device.peak_flops_per_s.items()})
    device = replace(group.device, peak_flops_per_s=rates, launch_latency_us=group.device.launch_latency_us / 100,
                     memory_bandwidth_bytes_per_s=100 * group.device.memory_bandwidth_bytes_per_s)
    links = [replace(link, latency_us=link.latency_us / 100, bandwidth_bytes_per_s=100 * link.bandwidth_bytes_per_s)
             for link in (group.intra_node, group.inter_node)]
    Cluster.homogeneous(1, 2, DeviceSheet(device, *links)).save(folder / "fast.json")
    return run_ranks(folder, _reports, args=(str(folder / "fast.json"),), timeout_s=100)


@pytest.mark.timeout(120)
def test_accumulated_steps_are_compared_with_three_calls(ranks):
    for found in ranks:
        report, plan = found["accumulate"], found["plan"].graphs[0]
        assert report.runs == f"{plan.name} (3 forward, 3 backward)"
        graphs_us = plan.predicted.step_time_us - plan.predicted.optimizer_us
        assert report.step_time.predicted == pytest.approx(3 * graphs_us + plan.predicted.optimizer_us)
        assert 0 < report.graphs_us < report.step_time.measured
        assert 0 < report.optimizer_us < report.step_time.measured


def test_a_plan_says_where_the_time_before_the_first_step_went(ranks):
    phases = ["trace", "annotate", "solve", "rewrite", "compile forward", "compile backward"]
    for found in ranks:
        seconds = found["plan"].seconds
        assert [phase for phase in seconds if phase != "look"] == phases and min(seconds.values()) >= 0


def test_memory_is_measured_part_by_part(ranks):
    for found in ranks:
        parts = {part.name: part for part in found["accumulate"].memory_parts}
        assert parts["parameters"].measured == parts["parameters"].predicted == 4 * sum(p.numel() for p in net().parameters())
        assert parts["gradients"].measured == parts["gradients"].predicted
        assert parts["optimizer"].measured == pytest.approx(parts["optimizer"].predicted, abs=100), "and counts of steps"
        assert parts["activations"].measured > 0
        peak = found["accumulate"].peak_memory
        assert peak.measured == sum(part.measured for part in parts.values())


def test_evaluations_and_several_optimizers_do_not_confuse_it(ranks):
    for found in ranks:
        report = found["two optimizers"]
        assert report.runs.count("graph_") == 1 and "(1 forward, 1 backward)" in report.runs
        assert report.step_time.predicted > 0


def test_a_wrong_cluster_is_reported_by_rank_0(ranks):
    lines, warnings = ranks[0]["heard"]
    assert not warnings, "there was one mesh to choose from"
    warning = replace(ranks[0]["wrong"], rival_us=0.0).time_warning()
    assert len(lines) == 1 and "ratio 0.0" in lines[0]
    named = warning.split("The largest part is ")[1].split(":")[0]
    assert named in CLASSES
    classes = {c.name: c for c in ranks[0]["wrong"].classes}
    assert abs(classes[named].predicted - classes[named].measured) == \
        max(abs(c.predicted - c.measured) for c in classes.values())
    assert classes["matmul"].measured > 0 and classes["collective"].measured > 0
    assert ranks[1]["heard"] == ([], [])
    assert ranks[1]["wrong"].step_time.measured > 0


def test_monitoring_changes_nothing(ranks):
    for found in ranks:
        assert found["losses"] == found["unmonitored"] and found["off"] is None
        assert "no training step was measured yet" in found["none yet"]


def _refused(rank: int, folder: str):
    if importlib.util.find_spec("tensorboard") is None:
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as refusal:
            compiled(net(), tensorboard=folder)(X)
        return str(refusal.value)
    model = net()
    call, optimizer = compiled(model, tensorboard=folder), torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate(model, call, optimizer, steps=20, times=1)
    return "written" if dist.get_rank() == 0 else "other rank"


@pytest.mark.timeout(120)
def test_tensorboard(launch, tmp_path):
    folder = tmp_path / "scalars"
    said = launch(_refused, args=(str(folder),), timeout_s=100)
    if "pip install tensorboard" in said[0]:
        assert not folder.exists()
        return
    assert said == ["written", "other rank"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags = EventAccumulator(str(folder)).Reload().Tags()["scalars"]
    assert {"hpml/step_time_ms/predicted", "hpml/step_time_ms/measured", "hpml/peak_memory_ratio"} <= set(tags)
