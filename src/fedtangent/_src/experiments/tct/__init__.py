"""TCT (train, convexify, train): FedAvg trains a network, then a linear model is trained on its tangent features."""
