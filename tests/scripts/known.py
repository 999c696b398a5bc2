"""What fails today, and why: data, not skips. A test turns red when an entry does not fail any more, so that it goes."""
from __future__ import annotations

ALL = ("dp", "tp", "unpinned")
CLASSES: dict[str, dict[str, tuple[str, ...]]] = {
    # class of failures: {use: the meshes on which it fails}
    "double backward: AOTAutograd's refusal comes through, which does not say what to do": {
        "loops.gradient_penalty": ALL, "control.double_backward": ALL,
    },
    "a parameter, in place in forward": {
        "parameters.embedding_with_a_largest_norm": ("tp",), "parameters.frozen_weights_changed_in_forward": ("tp",),
    },
    "a placed tensor that is no parameter, as input": {
        "parameters.a_mask_made_of_weights_as_input": ("tp",), "parameters.pruned_on_the_way": ("unpinned",),
        "parameters.functional_call_of_a_trained_model": ("unpinned",), "pairs.weights_given_to_another_model": ("dp",),
    },
    "two instances of a class run each other's graph": {"pairs.actor_and_critic_of_one_class": ("dp",)},
    "sparse gradients": {"parameters.sparse_adam": ("dp",)},
    "the monitor's weak references": {"parameters.parametrized": ("dp",)},
    "nn.init outside of no_grad": {"parameters.initialized_anew": ("dp",)},
    "a second derivative of a gathered parameter": {"parameters.maml_in_eager": ("unpinned",)},
    "planner: factors of a value": {"parameters.orthogonal": ("unpinned",)},
    "as a test of what tells when something works again": {"wrong_uses.works_again": ALL},
}
KNOWN = {(name, mesh): why for why, uses in CLASSES.items() for name, meshes in uses.items() for mesh in meshes}
"""(use, mesh) -> the class of its failure."""
