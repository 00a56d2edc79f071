"""Theory of NTK-FL (Yue et al., ICML 2022)."""
