"""CPU seconds that planning takes for the families of torchvision, timm and diffusers; one JSON object, with the slowest ten.

    pip install --no-deps torchvision timm diffusers
    python benchmarks/plan_families.py                              # all of them on 1x8 and 8x8:a100-80g
    python benchmarks/plan_families.py --clusters 1x8:a100-80g,1x4:a100-80g --time-limit 2
    python benchmarks/plan_families.py unet2d maxvit_t              # some of them

Each is planned in a process of its own, without weights and without the cache, and traced once for all clusters and limits.
`cpu_s` is all of planning but tracing, which is `trace_cpu_s`; `describe_cpu_s`, a part of it, is before any search.
`largest_group`: operations that are placed together, at most.
"""
from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hpml_compiler.runtime.process.gc_pause import SELDOM

Target = tuple[nn.Module, Any]
ROWS = 64
CLUSTERS = "1x8:a100-80g,8x8:a100-80g"


class WithLoss(nn.Module):
    """A model that takes images and returns a tensor, a mapping or an object with `sample`, with the loss of its output."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> torch.Tensor:
        found = self.model(*args)
        found = found["out"] if isinstance(found, dict) and "out" in found else getattr(found, "sample", found)
        if isinstance(found, dict):  # a detector's losses
            return torch.stack([loss.sum() for loss in found.values()]).sum()
        return (found.float() ** 2).mean()


def images(side: int = 224, rows: int = ROWS, channels: int = 3) -> torch.Tensor:
    return torch.zeros(rows, channels, side, side, device="meta")


def of_torchvision(name: str, side: int = 224, folder: str = "models", **options: Any) -> Callable[[], Target]:
    def make() -> Target:
        import torchvision

        module = torchvision.models if folder == "models" else getattr(torchvision.models, folder)
        return WithLoss(getattr(module, name)(weights=None, **options)), (images(side),)

    return make


def of_timm(name: str) -> Callable[[], Target]:
    def make() -> Target:
        import timm

        return WithLoss(timm.create_model(name, pretrained=False)), (images(),)

    return make


def detector() -> Target:
    import torchvision

    model = torchvision.models.detection.retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91)
    return WithLoss(Heads(model)), (images(256, 16),)


class Heads(nn.Module):
    """A detector up to its classes and boxes: what matches them with the truth depends on values."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.backbone, self.head = model.backbone, model.head

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.head(list(self.backbone(x).values()))


def unet2d() -> Target:
    from diffusers import UNet2DModel

    model = UNet2DModel(sample_size=32, in_channels=3, out_channels=3, block_out_channels=(32, 64), layers_per_block=1,
                        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
                        norm_num_groups=8)
    return WithLoss(model), (images(32), torch.zeros(ROWS, dtype=torch.long, device="meta"))


def unet2d_condition() -> Target:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=32, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 64), norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=64, attention_head_dim=8)
    return WithLoss(model), (images(32, channels=4), torch.zeros(ROWS, dtype=torch.long, device="meta"),
                             torch.zeros(ROWS, 16, 64, device="meta"))


class Labeled(nn.Module):
    """DiT takes its labels by name."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, step: torch.Tensor, label: torch.Tensor) -> Any:
        return self.model(x, timestep=step, class_labels=label)


def dit() -> Target:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=4, sample_size=16,
                                  patch_size=2, num_embeds_ada_norm=10, norm_num_groups=4)
    numbers = torch.zeros(ROWS, dtype=torch.long, device="meta")
    return WithLoss(Labeled(model)), (images(16, channels=4), numbers, numbers)


def autoencoder_kl() -> Target:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(block_out_channels=(32, 64), layers_per_block=1, latent_channels=4, norm_num_groups=8, sample_size=32,
                          down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)
    return WithLoss(model), (images(32),)


TARGETS: dict[str, Callable[[], Target]] = {
    "unet2d": unet2d,
    "unet2d_condition": unet2d_condition,
    "autoencoder_kl": autoencoder_kl,
    "dit": dit,
    "maxvit_t": of_torchvision("maxvit_t"),
    "swin_t": of_torchvision("swin_t"),
    "efficientnet_b0": of_torchvision("efficientnet_b0"),
    "retinanet": detector,
    "deeplabv3": of_torchvision("deeplabv3_resnet50", folder="segmentation", weights_backbone=None),
    "convnext_tiny": of_torchvision("convnext_tiny"),
    "vit_b_16": of_torchvision("vit_b_16"),
    "resnet50": of_torchvision("resnet50"),
    "timm_maxvit_tiny": of_timm("maxvit_tiny_tf_224"),
    "timm_swin_tiny": of_timm("swin_tiny_patch4_window7_224"),
    "timm_efficientnet_b0": of_timm("efficientnet_b0"),
    "timm_convnext_tiny": of_timm("convnext_tiny"),
    "timm_vit_base": of_timm("vit_base_patch16_224"),
    "timm_resnet50": of_timm("resnet50"),
}


def planned(target: str, clusters: Sequence[str], limits: Sequence[float | None]) -> Iterator[dict[str, Any]]:
    """On each cluster with each time limit, in this process; the model is traced and described once."""
    from hpml_compiler.options import Options
    from hpml_compiler.planner import offline_planner, traced_model
    from passes.hardware.cluster import Cluster
    from passes.sharding.strategies import axis_strategies

    with torch.device("meta"):
        model, batch = TARGETS[target]()
    trace, annotate, groups_of = traced_model.trace, traced_model.annotate, axis_strategies.groups_of
    took, largest = {"trace": 0.0, "annotate": 0.0}, [0]

    def timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            began = time.process_time()
            found = function(*args, **more)
            took[part] += time.process_time() - began
            return found

        return call

    def measured(*args: Any) -> Any:
        found = groups_of(*args)
        largest[0] = max(largest[0], *(len(group.operations) for group in found))
        return found

    traced_model.trace, traced_model.annotate, axis_strategies.groups_of = timed(trace, "trace"), timed(annotate,
                                                                                                        "annotate"), measured
    traced = traced_model.TracedModel(model, batch, Options.parse({}))
    for cluster, limit in itertools.product(clusters, limits):
        traced.options = Options.parse({"cluster": cluster} | ({} if limit is None else {"time_limit": limit}))
        before, began = sum(took.values()), time.process_time()
        plan: Any = offline_planner.plan_traces(traced, Cluster.parse(cluster))
        cpu_s = time.process_time() - began - (sum(took.values()) - before) + took["annotate"]
        yield {"target": target, "cluster": cluster, "time_limit": traced.options.time_limit, "cpu_s": cpu_s,
               "trace_cpu_s": took["trace"], "describe_cpu_s": took["annotate"], "largest_group": largest[0],
               "graphs": len(plan.graphs),
               **{key: plan.summary_json().get(key) for key in ("step_time_s", "bound_s", "gap", "status", "mesh")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"some of {', '.join(TARGETS)}")
    parser.add_argument("--clusters", default=CLUSTERS)
    parser.add_argument("--time-limit", default="", help="seconds; several, each of them")
    parser.add_argument("--here", action="store_true", help="in this process")
    args = parser.parse_args()
    if args.here:
        gc.set_threshold(*SELDOM)  # as `hpml plan` does
        limits = [float(each) for each in args.time_limit.split(",") if each] or [None]
        for target in args.targets:
            for result in planned(target, args.clusters.split(","), limits):
                print(json.dumps(result), flush=True)
        return
    found: list[dict[str, Any]] = []
    for target in args.targets or TARGETS:
        command = [sys.executable, __file__, target, "--clusters", args.clusters, "--here", "--time-limit", args.time_limit]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HPML_CACHE": "0"})
        results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        results += [{"target": target, "error": done.stderr[-2000:]}] if done.returncode else []
        print(target, *(f"{each['cluster']}: {each['cpu_s']:.1f} s" if "cpu_s" in each else each for each in results),
              file=sys.stderr, flush=True)
        found += results
    slowest = sorted((each for each in found if "cpu_s" in each), key=lambda each: -each["cpu_s"])[:10]
    print(json.dumps({"benchmark": "plan_families", "plans": found,
                      "slowest": [[each[key] for key in ("target", "cluster", "cpu_s", "largest_group")] for each in slowest]}))


if __name__ == "__main__":
    main()
