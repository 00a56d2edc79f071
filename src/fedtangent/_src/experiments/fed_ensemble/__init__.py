"""Experiments of the two Fed-ensemble papers, FE-2021 and FE-2024 (IEEE TASE)."""
