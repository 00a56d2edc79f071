"""Experiments: a folder for each paper, with its tables, figures and claims, run by ``fedtangent experiment``.

Each module ends with ``ENTRIES``, its experiments. An experiment is named after folder and file, as
``fed_ensemble.versus_fed_avg``, or after folder and figure, as ``ntk_fl.fig6``: figures that share runs or settings
share a file. ``lab/`` has the code that several experiments share; ``lab/runner.py`` explains how to write one.
"""
