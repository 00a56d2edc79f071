"""Experiments of the Local-GD paper (many local steps in overparameterised linear models), sections 5 and B.1."""
