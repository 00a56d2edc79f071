"""Theory of federated runs: quantities that a run must match, computed without a simulation.

Nothing here imports the simulation, so that theory and simulation cannot share a mistake. ``fedtangent.theory`` exports
the functions that users call, with an index of the theorems.
"""
