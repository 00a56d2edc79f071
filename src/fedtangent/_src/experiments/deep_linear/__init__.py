"""FedAvg on deep linear networks (DeepLin): one file for each figure or claim."""
