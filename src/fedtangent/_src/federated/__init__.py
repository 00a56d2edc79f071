"""The parts of federated algorithms (local training, schedules, channels, ..), and the algorithms made of them."""
