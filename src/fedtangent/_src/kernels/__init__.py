"""Tangent kernels: analytic kernels, and kernels of finite networks."""
