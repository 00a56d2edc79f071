"""Code that several experiments share.

``runner``: the record of an experiment, and how it is run; ``results``: the tables, intervals and claims that it
returns. ``harness``: methods x settings x seeds, each run computed once and kept; ``trials``: the data of one seed.
``sine``: Fed-ensemble on sine functions; ``two_layer``: the problem of NTK-FL's theorems.
"""
