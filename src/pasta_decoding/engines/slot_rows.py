"""What the rows of a pass write and see in the slots of one KV cache.

Each token of a pass is a row with a list of the slots that it sees, of any length. So a prompt's
token and a thread's next one are rows alike, and requests need no padding. (PagedAttention, with
pages of one token.)

Shapes: Q rows, S slots, K slots from the first to the last that a request sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class SlotRows:
    """The rows of a pass. All tensors are int32 but `written_Q`, which is int64.

    written_Q:   the slot that each row writes.
    positions_Q: the position of each row's token. Sliding windows need it.
    positions_S: the position of the token in each slot, these rows included.
    starts_Q:    where each row's list begins in `lists`.
    lengths_Q:   how long it is, at least 1.
    """

    written_Q: Tensor
    positions_Q: Tensor
    positions_S: Tensor
    starts_Q: Tensor
    lengths_Q: Tensor
    lists: Tensor

    @cached_property
    def requests(self) -> list[tuple[slice, slice, Tensor]]:
        """For each request its rows, the K slots from the first to the last that they see, seen_QK.

        A request's rows write to slots that follow each other.
        """
        written_Q = self.written_Q.cpu().numpy()
        starts_Q = self.starts_Q.cpu().numpy()
        lengths_Q = self.lengths_Q.cpu().numpy()
        lists = self.lists.cpu().numpy()
        cuts = np.flatnonzero(np.diff(written_Q) != 1) + 1
        requests = []
        for rows in np.split(np.arange(len(written_Q)), cuts):
            seen_lists = [lists[starts_Q[row] :][: lengths_Q[row]] for row in rows]
            all_seen = np.concatenate(seen_lists)
            first_slot = int(all_seen.min())
            end_slot = int(all_seen.max()) + 1
            seen_QK = np.zeros((len(rows), end_slot - first_slot), dtype=np.bool_)
            for seen_K, seen_list in zip(seen_QK, seen_lists, strict=True):
                seen_K[seen_list - first_slot] = True
            mask_QK = torch.from_numpy(seen_QK).to(self.lists.device)
            rows_slice = slice(rows[0], rows[-1] + 1)
            requests.append((rows_slice, slice(first_slot, end_slot), mask_QK))
        return requests
