"""The theorems of DeepLin (FedAvg on deep linear networks), each checked against simulation."""
