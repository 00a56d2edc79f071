"""Shuffled Jacobians: what the aggregation server of CP-NTK-FL still reads (Yue et al., 2022, section 4.2).

The paper permutes "rows and columns in synchronization". The update ``sum_j J_{:j:}' R_{:j}`` (9b) does not change if
the examples are permuted (rows of every ``J_{:j:}``, of ``f`` and of ``Y``), nor if the outputs ``j`` are, with the
columns of ``f`` and ``Y``. Neither hides an image: a row is reconstructed as before, only whose it is, is lost, and the
order of the outputs stands in the derivatives by the last layer's biases. That "considering the high dimensionality of
the neural network weight" the attack becomes infeasible fits a third permutation, of the columns of ``J_{:j:}``, which
are weights: the kernel does not change, but the update comes out permuted, and whoever knows the order must put it
back. It hides the places of an image's pixels, until a client tells the server of examples of its own:
``order_from_known``.
"""

from __future__ import annotations

import jax
import numpy as np

from fedtangent.attacks.observation import Observed
from fedtangent.types import Array


def shuffle_rows(seen: Observed, order: Array) -> Observed:
    """Examples in another order: row ``i`` of the result is row ``order[i]`` [m]."""
    return jax.tree.map(lambda leaf: leaf[order], seen)


def shuffle_weights(seen: Observed, order: Array) -> Observed:
    """Weights in another order, one for all examples and outputs: column ``p`` of the result is ``order[p]`` [P]."""
    return jax.tree.map(lambda leaf: leaf[..., order], seen)


def order_from_known(known: np.ndarray, shuffled: np.ndarray) -> np.ndarray:
    """The order [P] of ``shuffle_weights`` from Jacobians [m, C, P] known in both orders.

    ``shuffled`` are rows as the server got them, ``known`` the same examples' as a colluding client computes them:
    columns are sorted by their numbers and matched, so the numbers must be the very same. Weights whose columns are
    equal in all of the known examples (zero for a pixel that is dark in all of them) cannot be told apart and are
    matched in any order.

    Raises ``ValueError`` for other shapes and for columns that are no permutation of the known ones.
    """
    if known.ndim != 3 or known.shape != shuffled.shape:
        raise ValueError(f"known: got {known.shape} and shuffled {shuffled.shape}, must be equal, [m, C, P]")
    columns = [np.asarray(rows).reshape(-1, rows.shape[-1]) for rows in (known, shuffled)]
    places = [np.lexsort(part) for part in columns]
    if not np.array_equal(columns[0][:, places[0]], columns[1][:, places[1]]):
        raise ValueError("shuffled: its columns are no permutation of the known ones, the order cannot be found")
    order = np.empty(known.shape[-1], int)
    order[places[1]] = places[0]
    return order
