"""Known failures with their causes, as data instead of skips. A test fails when an entry passes, so that it is removed."""
from __future__ import annotations

import torch

ALL = ("dp", "tp", "unpinned", "parts", "stages")
CLASSES: dict[str, dict[str, tuple[str, ...]]] = {
    # class of failures: {use: the meshes on which it fails}
    "a parametrization is taken off a placed parameter": {"parameters.parametrized": ALL},
    "safetensors asks placed tensors for their storage": {"ranks.safetensors_of_a_trained_model": ALL},
    "as a test of what tells when something works again": {"wrong_uses.works_again": ALL},
}
if torch.__version__ < (2, 12):  # of torch itself
    CLASSES |= {
        "inductor's C++ code that transposes rows selected at run time does not compile":
            {"strides.of_most_by_inductor": ("dp", "parts")},
        "strides by inductor: offsets of slices": {"strides.of_most_by_inductor": ("stages",)},
    }
else:
    CLASSES["strides by inductor: a gradient of a convolution in a loop over microbatches, offsets of slices"] = {
        "strides.of_most_by_inductor": ("unpinned", "parts", "stages")}
KNOWN = {(name, mesh): why for why, uses in CLASSES.items() for name, meshes in uses.items() for mesh in meshes}
"""(use, mesh) -> the class of its failure."""
