"""Experiments of NTK-FL and CP-NTK-FL (Yue et al., ICML 2022)."""
