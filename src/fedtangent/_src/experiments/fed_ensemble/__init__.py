"""Experiments of the Fed-ensemble papers (FE-2021; FE-2024, IEEE TASE)."""
