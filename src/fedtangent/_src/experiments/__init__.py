"""Experiments: a folder for each paper, with its tables, figures and claims, run by ``fedtangent experiment``.

A file ends with its entries. An entry is named after its folder and file, as ``fed_ensemble.versus_fed_avg``, or after
its folder and figure, as ``ntk_fl.fig6``, where figures that share runs or settings share a file.
``lab/`` has the code that several experiments share, and ``lab/runner.py`` explains what an experiment consists of.
"""
