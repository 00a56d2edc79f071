"""FedAvg on deep linear networks (DeepLin; papers: ``liu_deep_linear``)."""
