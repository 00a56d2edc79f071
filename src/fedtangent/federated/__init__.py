"""The parts of federated algorithms, and the recipes made of them."""
