"""Experiments: one file for each table, figure or claim of the papers, run by ``fedtangent experiment``.

An experiment's name is its module below this package: ``fed_ensemble.versus_fed_avg`` is the entry at the end of
``experiments/fed_ensemble/versus_fed_avg.py``; one that repeats another's runs stands in the file of the other. What
several share stands in ``lab/``; what one is, in ``lab/runner.py``.
"""
