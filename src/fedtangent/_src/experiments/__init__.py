"""Experiments: one file for each table, figure or claim of the papers, run by ``fedtangent experiment``.

An experiment's name is its module below this package: ``fed_ensemble.versus_fed_avg`` is the entry at the end of
``experiments/fed_ensemble/versus_fed_avg.py``; a figure that repeats another one's runs stands in its file.
``lab/`` has the code that several experiments share, and ``lab/runner.py`` explains what an experiment consists of.
"""
