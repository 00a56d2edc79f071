"""The exact federated dynamics."""
