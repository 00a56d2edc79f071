"""Experiments of NTK-FL and of CP-NTK-FL, which compresses and protects its messages (Yue et al., ICML 2022)."""
