"""Clients chosen by their losses: power-of-choice, gradient-norm sampling, and IFCA on clustered clients."""
