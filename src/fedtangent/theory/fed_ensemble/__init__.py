"""Theorems of the Fed-ensemble papers."""
