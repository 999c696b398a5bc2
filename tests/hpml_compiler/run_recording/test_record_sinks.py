"""Records -> figures in TensorBoard, W&B, MLflow and Prometheus; a sink that fails is dropped."""
from __future__ import annotations

import importlib.util
import logging
import socket
import sys
import types
import urllib.request

import pytest

from hpml_compiler.run_recording.record_sinks import SINKS, AllSinks, PrometheusSink, scalars_of
from passes.errors import BadInput, MissingDependency

RECORD = {"step": 12, "steps": 4, "step_s": 0.25, "longest_s": 0.5, "samples_per_s": 32.0, "mfu": 0.4, "predicted_s": 0.2,
          "memory": {"resident": 2**21}, "values": {"loss": 2.5}}
SCALARS = {"hpml/samples_per_s": 32.0, "hpml/mfu": 0.4, "hpml/step_ms": 250.0, "hpml/longest_step_ms": 500.0,
           "hpml/predicted_step_ms": 200.0, "hpml/memory_MiB/resident": 2.0, "loss": 2.5}


def test_scalars():
    assert scalars_of(RECORD) == SCALARS


class Calls:
    """Records calls of any name."""

    def __init__(self, **known) -> None:
        self.made: list = []
        vars(self).update(known)

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.made.append((name, args, kwargs))


@pytest.mark.parametrize("own", [False, True], ids=["new run", "the script's run"])
def test_wandb(monkeypatch, tmp_path, own):
    run = Calls()
    module = types.SimpleNamespace(run=run if own else None, init=lambda **kwargs: run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    sink = SINKS["wandb"](tmp_path)
    sink.write(SCALARS, 12)
    sink.close()
    assert run.made == [("log", ({**SCALARS, "hpml/step": 12},), {}), *([] if own else [("finish", (), {})])]


@pytest.mark.parametrize("own", [False, True], ids=["new run", "the script's run"])
def test_mlflow(monkeypatch, tmp_path, own):
    module = Calls(active_run=lambda: object() if own else None)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    sink = SINKS["mlflow"](tmp_path)
    sink.write(SCALARS, 12)
    sink.close()
    assert [name for name, *_ in module.made] == (["log_metrics"] if own else ["start_run", "log_metrics", "end_run"])
    assert ("log_metrics", (SCALARS,), {"step": 12, "synchronous": False}) in module.made


def test_prometheus(monkeypatch):
    if importlib.util.find_spec("prometheus_client") is None:
        with pytest.raises(MissingDependency, match="pip install prometheus-client, or leave metrics_port out"):
            PrometheusSink(0)
        pytest.skip("prometheus_client is not installed")
    sink = PrometheusSink(0)
    sink.write(SCALARS, 12)
    found = urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics").read().decode()
    with pytest.raises(BadInput, match="give another port, or metrics_port=0"):
        PrometheusSink(sink.port)
    sink.close()
    assert "\nhpml_step_ms 250.0\n" in found and "\nloss 2.5\n" in found and "\nhpml_step 12.0\n" in found
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", sink.port), timeout=1):
        pass


@pytest.mark.parametrize("name", SINKS)
def test_a_sink_that_is_not_installed_is_refused(monkeypatch, tmp_path, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependency, match=f"pip install {name}, or leave {name} out"):
        SINKS[name](tmp_path)


def test_a_sink_that_fails_is_dropped(caplog):
    class Broken(Calls):
        def write(self, scalars, step):
            raise OSError("no connection")

    whole = Calls()
    sinks = AllSinks({"broken": Broken(), "whole": whole})
    with caplog.at_level(logging.ERROR, "hpml"):
        sinks.write(SCALARS, 1)
        sinks.write(SCALARS, 2)
    assert len(caplog.messages) == 1 and len(whole.made) == 2
