"""`HistoryRules` of serving from the fields of their mask."""

from gdpa_kernels import Mask
from gdpa_kernels.serving import HistoryRules


def rules_of(
    num_layers: object = 2, *, causal: object = True, window: object = None,
    num_contexts: object = 0, **options,
) -> HistoryRules:  # fmt: skip
    """Those of a causal model by default."""
    return HistoryRules(
        num_layers, Mask(causal, window, num_contexts=num_contexts or None), **options
    )
