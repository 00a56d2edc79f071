"""Parameters drawn by NumPy, for tests that do not ask how a model starts: nothing is compiled for them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def parameters(model: Any, seed: int = 0, scale: float = 1.0, shift: float = 0.0) -> Any:
    """``shift + scale N(0, 1)`` in the structure, shapes and dtypes of ``model.init``'s."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda s: jnp.asarray((shift + scale * rng.standard_normal(s.shape)).astype(s.dtype)), shapes)
