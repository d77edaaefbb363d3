"""A `Model` of serving from the fields of its mask."""

from gdpa_kernels import Mask
from gdpa_kernels.serving import Model


def model_of(
    num_layers: object = 2, *, causal: object = True, window: object = None,
    num_contexts: object = 0, **options,
) -> Model:  # fmt: skip
    """A causal model by default."""
    return Model(num_layers, Mask(causal, window, num_contexts=num_contexts or None), **options)
