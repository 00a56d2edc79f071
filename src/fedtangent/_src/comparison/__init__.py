"""Simulation and theory side by side: besides ``experiments`` the only package that imports both."""
