"""The checks of the exact federated flow."""
