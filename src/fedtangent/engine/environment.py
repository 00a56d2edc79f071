"""What a result was computed with: versions and device."""

from __future__ import annotations

import importlib
import platform

import jax
import jaxlib
import numpy as np


def environment() -> dict[str, str]:
    """Versions and device: what a repetition needs to know besides the configuration."""
    # The root imports this module: its version can be had when called, not by a statement.
    root = importlib.import_module("fedtangent")
    return {
        "fedtangent": root.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }
