"""TCT (train, convexify, train): a second phase of training in which a network is linear in its weights."""
