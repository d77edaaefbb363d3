"""Inference over cached histories: a paged KV cache, scores of candidates, stored sums.

A model scores candidates for a user by the history of that user's events. `PagedCache` (cache.py)
keeps the keys and values of the history, and `HistoryRules` (validity.py) say which of them stay
right when it changes. `extend` and `candidates` (layers.py) run a layer over the cache, `score`
(scores.py) the operator alone. `StoredSums` (sums.py) keep the output of fixed queries instead.
Beside them are page tables (pages.py), kernels (joined.py, diagonal.py, rows.py; common.py
says when they run), the lock (exclusive.py) and checks (arguments.py).

The words of this room, in docstrings, arguments and locals:

| word              | meaning                                                                      |
|-------------------|------------------------------------------------------------------------------|
| history, event    | all that a user did, in order, and one of these                              |
| epoch             | a value that changes whenever the past of a history does: version or hash    |
| token, row        | an event or a candidate in a layer, and its row of q, k or v                 |
| candidates        | tokens that are scored behind a history, not cached; the targets of `Mask`   |
| cache entry       | `CacheEntry`: what the cache holds of a user's history                       |
| page pool, page   | the memory of all pages; the rows of `page_size` tokens of one user          |
| slot              | the number of a token's place in the pool (gdpa/device/page_layout.py)       |
| page table        | `Pages`: where the tokens of a batch of users lie; the arguments `pages`,    |
|                   | `history`, `new` and `whole` are page tables                                 |
| span              | `HistorySpan`: tokens [begin, end) of one history, in a page table           |
| whole             | of a page table: all events of each history are in it                        |
| paged KV          | `gdpa.batch.PagedKV`: a layer of the pool and a page table, for a kernel     |
| term              | what one event gives to a stored sum                                         |
"""

from gdpa_kernels.serving.cache import PagedCache
from gdpa_kernels.serving.layers import candidates, extend
from gdpa_kernels.serving.pages import Pages
from gdpa_kernels.serving.scores import score
from gdpa_kernels.serving.sums import StoredSums
from gdpa_kernels.serving.validity import HistoryRules

__all__ = ["HistoryRules", "PagedCache", "Pages", "StoredSums", "candidates", "extend", "score"]
