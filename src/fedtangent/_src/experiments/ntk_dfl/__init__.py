"""NTK-DFL, NTK-FL without a server, where clients exchange Jacobians on a graph (Thompson et al., ICML 2025)."""
