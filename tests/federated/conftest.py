"""Data and models shared by the tests of the federated loop."""

from __future__ import annotations

import pytest

from fedtangent._src.types import FederatedData, Model

from .toys import two_layer, uneven_data


@pytest.fixture(scope="package")
def model() -> Model:
    """A two-layer network in float64."""
    return two_layer()


@pytest.fixture(scope="package")
def data() -> FederatedData:
    """Regression data on six uneven clients."""
    return uneven_data()
