"""What one forward of several sequences does to KV, as tensors on the device.

Attention works in the codec's rotated space, like the torch engine: queries, keys and values are transformed once
after RoPE, tails and documents hold transformed KV, and the output is transformed back.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of a forward, those of sequences on one document side by side (a *group*).

    All tensors int32 on the device. R rows, G groups, both may be padded (a captured graph has fixed sizes): rows
    from ``group_rows[G]`` on are padding, their output is zero and they write nothing.

    `positions` ``[R]``: RoPE positions. `slots` ``[R]``: the tail a row belongs to. `tail_at` ``[R]``: where in that
    tail the row's key and value are written, -1 for nowhere (a re-fed token, padding). `tail_end` ``[R]``: the row
    attends to tail tokens ``[0, tail_end)``, its own included; 0 for none.
    `group_rows` ``[G + 1]``: group g has rows ``[group_rows[g], group_rows[g + 1])``. `group_tokens` ``[G]``: tokens
    of its document, all of which every row of the group attends to; 0 for no document. `block_tables`
    ``[G, max_blocks]``: the document's blocks in the pool, in order.
    `max_group_rows`, `max_tokens`: bounds (host numbers) on a group's rows and on a document's tokens, for launch
    sizes, the slots of the head that has most among the tokens. `max_tail`: bound on `tail_end`.
    `slot_first` ``[G]``: which block of its table is the first with slots of the document, 0 for none; None for a step
    in which no document has any.
    """

    positions: Tensor
    slots: Tensor
    tail_at: Tensor
    tail_end: Tensor
    group_rows: Tensor
    group_tokens: Tensor
    block_tables: Tensor
    max_group_rows: int
    max_tokens: int
    max_tail: int
    slot_first: Tensor | None = None

    @property
    def n_rows(self) -> int:
        return self.positions.shape[0]

    @property
    def n_groups(self) -> int:
        return self.group_tokens.shape[0]
