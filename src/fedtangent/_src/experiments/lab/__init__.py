"""What several experiments share.

``runner``: what an experiment is, and how any is run; ``results``: the tables, intervals and claims that it returns.
``harness``: methods x settings x seeds, each run computed once and kept; ``trials``: the data that they share.
``sine``: Fed-ensemble on sine functions; ``two_layer``: the problem of NTK-FL's theorems.
"""
