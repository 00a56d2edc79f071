"""The parts of federated algorithms, and the algorithms made of them."""
