"""NTK-FL's parts."""
