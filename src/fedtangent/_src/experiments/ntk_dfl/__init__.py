"""NTK-DFL: clients on a graph that evolve the kernel of their neighbourhoods (Thompson et al., ICML 2025)."""
