"""DeepLin: FedAvg on deep linear networks."""
