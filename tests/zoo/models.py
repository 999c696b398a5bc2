"""The architectures of the zoo: the model that transformers trains for a task, tiny, and a batch for it."""
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.zoo.configs import IMAGE, VOCABULARY, tiny
from tests.zoo.overrides import GIVEN, LEFT_OUT

ROWS, LENGTH, LABELS = 4, 16, 3
LARGEST = 4_000_000  # parameters
TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION", "CTC", "SPEECH_SEQ_2_SEQ",
    "SEMANTIC_SEGMENTATION", "AUDIO_CLASSIFICATION", "SEQUENCE_CLASSIFICATION", "MASKED_IMAGE_MODELING",
    "VIDEO_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING",
)
"""Of the tasks that a model can be trained for, the first one is tried."""


@dataclass(frozen=True)
class Architecture:
    name: str
    """transformers' model type."""
    model: str
    """Name of the class."""
    task: str

    def make(self, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, dict[str, Any]]:
        """The model, with weights of this process's generator, and its batch."""
        import transformers

        torch.manual_seed(0)
        cls = getattr(transformers, self.model)
        config = tiny(cls.config_class, **GIVEN.get(self.name, {}))
        for each in (config, getattr(config, "text_config", None)):
            if each is not None and getattr(each, "pad_token_id", 0) is None:
                each.pad_token_id = 0
        decodes = self.task in ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
        if decodes and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 0  # else set by whoever trains, as T5's is
        if "CLASSIFICATION" in self.task:
            config.num_labels = LABELS
        with torch.device("meta"):
            size = sum(p.numel() for p in cls(config).parameters())
        if size > LARGEST:
            raise ValueError(f"not small: {size} parameters")
        model = cls(config).to(dtype).train()
        batch = {name: value.to(dtype) if value.is_floating_point() else value
                 for name, value in batch_of(model, config, self.task).items()}
        return model, batch


@functools.cache
def architectures() -> dict[str, Architecture]:
    """All architectures by name, each for one task."""
    from transformers.models.auto import configuration_auto, modeling_auto

    found: dict[str, Architecture] = {}
    for task in TASKS:
        for name, model in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            if name not in found and name in configuration_auto.CONFIG_MAPPING_NAMES and name not in LEFT_OUT:
                found[name] = Architecture(name, model if isinstance(model, str) else model[0], task)
    return dict(sorted(found.items()))


def pick(name: str) -> Architecture:
    return architectures()[name]


def batch_of(model: nn.Module, config: Any, task: str) -> dict[str, torch.Tensor]:
    """Arguments of `forward`, those of its signature that a training loop gives."""
    takes = inspect.signature(model.forward).parameters
    words = torch.randint(20, VOCABULARY, (ROWS, LENGTH))
    inputs: dict[str, Callable[[], torch.Tensor]] = {
        "input_ids": lambda: words,
        "pixel_values": lambda: _pixels(config),
        "input_values": lambda: torch.randn(ROWS, 1600),
        "input_features": lambda: torch.randn(ROWS, getattr(config, "num_mel_bins", 16), 32),
    }
    batch: dict[str, torch.Tensor] = {}
    main = next((name for name in (getattr(model, "main_input_name", ""), *inputs) if name in inputs and name in takes), None)
    if main is not None:
        batch[main] = inputs[main]()
    if "attention_mask" in takes and "input_ids" in batch:
        mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
        mask[-1, LENGTH - 3:] = 0  # a row that is padded
        batch["attention_mask"] = mask
    if "decoder_input_ids" in takes and "labels" not in takes:
        batch["decoder_input_ids"] = words
    batch.update(_labels(takes, words, config, task))
    return batch


def _labels(takes: Any, words: torch.Tensor, config: Any, task: str) -> dict[str, torch.Tensor]:
    if task == "QUESTION_ANSWERING":
        return {"start_positions": torch.tensor([1, 2, 3, 4]), "end_positions": torch.tensor([5, 6, 7, 8])}
    if "labels" not in takes:
        return {}
    if task == "TOKEN_CLASSIFICATION":
        return {"labels": words % LABELS}
    if "CLASSIFICATION" in task:
        return {"labels": torch.tensor([0, 1, 2, 1])}
    if task == "SEMANTIC_SEGMENTATION":
        return {"labels": torch.randint(0, config.num_labels, (ROWS, IMAGE, IMAGE))}
    if task == "CTC":
        return {"labels": torch.randint(1, 20, (ROWS, 3))}
    if task == "MASKED_IMAGE_MODELING":
        return {}
    return {"labels": words}


def _pixels(config: Any) -> torch.Tensor:
    size = getattr(config, "image_size", None) or IMAGE
    height, width = (size, size) if isinstance(size, int) else size
    frames = (getattr(config, "num_frames", None),) if getattr(config, "num_frames", None) else ()
    return torch.randn(ROWS, *frames, getattr(config, "num_channels", 3) or 3, height, width)
