"""NTK-DFL, NTK-FL without a server: clients on a graph evolve their neighbourhoods' kernels (Thompson et al., ICML 2025)."""
