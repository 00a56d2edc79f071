"""The exact federated flow: linear models follow it, networks approach it as they become wide."""
