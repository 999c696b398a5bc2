"""Read blocks of tensors from safetensors files into the parts that a rank has (DCP's planner finds the overlaps)."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem

from hpml_compiler.runtime.placements.unsharded_params import invalidate
from hpml_compiler.runtime.weights.safetensors_files import SafetensorsReader
from passes import compat


def read_blocks(targets: Mapping[str, torch.Tensor], metadata: Metadata, files: Mapping[MetadataIndex, tuple[str, str]],
                opened: Callable[[str], Any]) -> None:
    """Fill tensors, or this rank's parts of them, converting dtypes. files: by block, its file and its key there. opened: opens
    a file by its path."""
    invalidate(targets.values())
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with compat.plain_torch_functions(), torch.no_grad():
        planner.set_up_planner(dict(targets), metadata, is_coordinator=True)
        by_file: dict[str, list[tuple[str, ReadItem]]] = defaultdict(list)
        for item in planner.create_local_plan().items:
            path, key = files[item.storage_index]
            by_file[path].append((key, item))
        for path, items in by_file.items():
            with opened(path) as stream:
                reader = SafetensorsReader(stream, path)
                for key, item in items:
                    planner.resolve_tensor(item).detach().copy_(reader.read(key, item.storage_offsets, item.lengths))
