"""Sinks of a run's figures besides its files: TensorBoard, W&B, MLflow, and Prometheus on the loopback interface."""
from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from hpml_compiler.monitor import tensorboard_scalars
from passes.errors import BadInput, MissingDependency

log = logging.getLogger("hpml")
CALLED = "hpml_compiler.Monitor"
LOOPBACK = "127.0.0.1"
Scalars = Mapping[str, float]


class RecordSink(Protocol):
    def write(self, scalars: Scalars, step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoardSink:
    def __init__(self, folder: Path) -> None:
        _needed("tensorboard", "tensorboard")
        self._writer = tensorboard_scalars.open_writer(str(folder))

    def write(self, scalars: Scalars, step: int) -> None:
        tensorboard_scalars.write_scalars(self._writer, dict(scalars), step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """The script's run of W&B or, without one, a new run, which W&B's environment variables describe. The step is one of the
    values, since a script may count W&B's own steps."""

    def __init__(self, folder: Path) -> None:
        self._wandb = _needed("wandb", "wandb")
        self._made = self._wandb.run is None
        self._run = self._wandb.run or self._wandb.init(dir=str(folder), name=folder.name)

    def write(self, scalars: Scalars, step: int) -> None:
        self._run.log({**scalars, "hpml/step": step})

    def close(self) -> None:
        if self._made:
            self._run.finish()


class MlflowSink:
    """The script's active run of MLflow or, without one, a new run. Figures are sent by MLflow's own thread."""

    def __init__(self, folder: Path) -> None:
        self._mlflow = _needed("mlflow", "mlflow")
        self._made = self._mlflow.active_run() is None
        if self._made:
            self._mlflow.start_run(run_name=folder.name)

    def write(self, scalars: Scalars, step: int) -> None:
        self._mlflow.log_metrics(dict(scalars), step=step, synchronous=False)

    def close(self) -> None:
        if self._made:
            self._mlflow.end_run()


class PrometheusSink:
    """Gauges at http://127.0.0.1:PORT/metrics. port: of the server, also where 0 was given, for any that is free."""

    def __init__(self, port: int) -> None:
        self._client = _needed("prometheus_client", "metrics_port", "prometheus-client")
        self._registry = self._client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = self._client.start_http_server(port, addr=LOOPBACK, registry=self._registry)
        except OSError as error:
            raise BadInput(f"cannot listen on port {port} of {LOOPBACK}: {error.strerror}", f"{CALLED}, metrics_port",
                           "give another port, or metrics_port=0 for any that is free") from error
        self.port = int(self._server.server_address[1])

    def write(self, scalars: Scalars, step: int) -> None:
        for name, value in {**scalars, "hpml/step": float(step)}.items():
            gauge = re.sub(r"[^a-zA-Z0-9_]", "_", name)
            gauge = f"_{gauge}" if gauge[0].isdigit() else gauge
            if gauge not in self._gauges:
                self._gauges[gauge] = self._client.Gauge(gauge, name, registry=self._registry)
            self._gauges[gauge].set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


SINKS: dict[str, Callable[[Path], RecordSink]] = {"tensorboard": TensorBoardSink, "wandb": WandbSink, "mlflow": MlflowSink}


def _needed(package: str, sink: str, distribution: str = "") -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingDependency(f"{sink} needs the package {package}, which cannot be imported: {error}", CALLED,
                                f"pip install {distribution or package}, or leave {sink} out") from error


class AllSinks:
    """Writes to all sinks; one that fails is logged and dropped, and training continues."""

    def __init__(self, sinks: Mapping[str, RecordSink]) -> None:
        self._sinks = dict(sinks)

    def write(self, scalars: Scalars, step: int) -> None:
        for name, sink in [*self._sinks.items()]:
            try:
                sink.write(scalars, step)
            except Exception:
                log.exception("%s: the figures of a run could not be written, and no more are", name)
                del self._sinks[name]

    def close(self) -> None:
        for name, sink in self._sinks.items():
            try:
                sink.close()
            except Exception:
                log.exception("%s did not close", name)
        self._sinks.clear()


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Figures of a record of steps by tag: ms, MiB, rates and shares, and the script's values by their own names."""
    found = {f"hpml/{name}": float(record[name]) for name in (
        "samples_per_s", "tokens_per_s", "mfu", "communication", "bubble") if name in record}
    found["hpml/step_ms"], found["hpml/longest_step_ms"] = 1e3 * record["step_s"], 1e3 * record["longest_s"]
    if "predicted_s" in record:
        found["hpml/predicted_step_ms"] = 1e3 * record["predicted_s"]
    found |= {f"hpml/memory_MiB/{name}": nbytes / 2**20 for name, nbytes in record.get("memory", {}).items()}
    return {**found, **record.get("values", {})}
