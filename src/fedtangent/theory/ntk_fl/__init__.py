"""Theorems of NTK-FL."""
