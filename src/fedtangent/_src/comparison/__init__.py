"""Simulation and theory side by side: the only package that imports both."""
