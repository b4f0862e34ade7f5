"""A recorded iteration as one that saves more would be: a longer text, a larger picture, more steps of a solver's batch.

For scripts whose iterations differ in size, so that a plan may be made for more than the recorded one. What is computed from inputs grows,
and so do workspaces beside it; parameters, their gradients and state do not. How much is told by the elements that autograd saves, weights
among them, which stay; bytes that follow the square of a length (attention matrices) grow like the others here. Times stay as recorded.
"""

from __future__ import annotations

from memopt.estimators.elsewhere.batch import scaled_by, sized_by_inputs
from memopt.estimators.elsewhere.recording import amounts_of, with_amounts
from memopt.growth import saved_elements
from memopt.trace import Trace

PARTS = 1000
"""Of which a factor is a whole number."""


def grown(trace: Trace, factor: float) -> Trace:
    """`trace` as of an iteration that saves `factor` times as many elements; a factor of 1 or less changes nothing."""
    parts = round(_of_activations(trace, factor) * PARTS)
    if parts <= PARTS:
        return trace
    return with_amounts(trace, scaled_by(trace, amounts_of(trace), sized_by_inputs(trace), PARTS, parts))


def _of_activations(trace: Trace, factor: float) -> float:
    """By how much what is no weight grows. Steps of a recurrent layer that save the same weights grow in number, with what else they save."""
    saved = saved_elements(trace)
    growing = saved.growing + saved.again
    return 1 + (factor - 1) * (growing + saved.weights) / growing if saved.growing else 1.0
