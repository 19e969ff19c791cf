"""Budget of a step whose drafts a device makes.

The host does not see this step's confidences there. It sends a number, and the device verifies the drafts that are
likeliest to be kept. Only the coupled law has drafters on a device, and it admits any choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.control.policy import NONE

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy import int64
    from numpy.typing import NDArray

    RowDrafts = tuple[NDArray[int64], NDArray[int64]]  # drafts of each row, and their drafter. [n] each

MORE_DRAFTS = 2  # of a row, than allocated
ROWS_TO_CHOOSE = 4  # from which on the choice pays for one more draft pass; not measured on a GPU yet


def with_budget(
    late: Collection[int], planned: RowDrafts, stopped: RowDrafts
) -> tuple[NDArray[int64], int | None]:
    """Return each row's depth, and the drafts to verify; None without a device.

    late: drafters on the target's device. planned: as allocated, and as many are verified. stopped: as stop rules
    let rows draft. Rows of a device draft a little deeper than allocated, so that it has drafts to choose from.
    Each depth is a pass: many rows draft one more than the deepest allocated of their drafter, few rows none.
    """
    (allocated, _), (ks, drafters) = planned, stopped
    on_device = np.isin(drafters, list(late)) & (allocated > 0)
    if not on_device.any():
        return ks, None
    deepest = np.zeros(max(drafters.max(), NONE) + 2, np.int64)  # by drafter, the last one NONE
    np.maximum.at(deepest, drafters, allocated)
    passes = deepest + (np.count_nonzero(on_device) >= ROWS_TO_CHOOSE)
    deeper = np.minimum(allocated + MORE_DRAFTS, passes[drafters])
    return np.where(on_device, np.minimum(ks, deeper), ks), int(allocated.sum())
