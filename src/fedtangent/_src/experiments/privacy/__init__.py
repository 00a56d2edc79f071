"""Differential privacy beside theory."""
