"""What fails today, and why: data, not skips. A test turns red when an entry does not fail any more, so that it goes."""
from __future__ import annotations

ALL = ("dp", "tp", "unpinned")
CLASSES: dict[str, dict[str, tuple[str, ...]]] = {
    # class of failures: {use: the meshes on which it fails}
    "double backward: AOTAutograd's refusal comes through, which does not say what to do": {
        "loops.gradient_penalty": ALL, "control.double_backward": ALL,
    },
    "gradients that share memory": {
        "control.gradients_over_a_break_are_apart": ("tp",), "control.a_gradient_passed_through_is_apart": ("unpinned",),
    },
    "an int that varies from call to call": {
        "control.an_annealed_scalar": ("tp",), "control.slices_that_move": ("unpinned",),
        "control.with_a_cache_of_keys": ("dp",),
    },
    "a parameter, in place in forward": {
        "parameters.embedding_with_a_largest_norm": ("tp",), "parameters.frozen_weights_changed_in_forward": ("tp",),
        "pairs.moco_with_a_queue": ("dp",),
    },
    "a placed tensor that is no parameter, as input": {
        "parameters.pruned_on_the_way": ("unpinned",), "parameters.functional_call_of_a_trained_model": ("unpinned",),
        "pairs.weights_given_to_another_model": ("dp",), "pairs.gradients_given_to_another_model": ("unpinned",),
    },
    "two instances of a class run each other's graph": {
        "pairs.actor_and_critic_of_one_class": ("dp",), "ranks.one_model_per_task_with_an_embedding_in_common": ("tp",),
    },
    "a parametrization is taken off a placed parameter": {"parameters.parametrized": ("dp",)},
    "hpml_compiler.reset": {"ranks.resets_between_models": ("tp",)},
    "export and TorchScript of a placed model": {
        "ranks.exported_after_training": ("dp",), "ranks.traced_after_training": ("tp",),
    },
    "safetensors asks placed tensors for their storage": {"ranks.safetensors_of_a_trained_model": ("dp",)},
    "an asynchronous checkpoint while training goes on, both on one process group of gloo": {
        "state.saved_in_the_background": ("dp",),
    },
    "as a test of what tells when something works again": {"wrong_uses.works_again": ALL},
}
KNOWN = {(name, mesh): why for why, uses in CLASSES.items() for name, meshes in uses.items() for mesh in meshes}
"""(use, mesh) -> the class of its failure."""
