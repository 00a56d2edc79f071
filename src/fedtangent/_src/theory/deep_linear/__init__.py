"""FedAvg on deep linear networks (DeepLin, papers: ``liu_deep_linear``); examples are rows here, columns in the paper.

The scale of the network, eq. (1), is printed without d_out (erratum `deep_linear.coefficient`).

Where to find the paper's equations: (1), (5) in ``models.linear_networks`` and ``gram.products``; (3), (4) in the loss
``squared_error_sum``; (6) to (8), (10), (17) in ``rounds``; (14) to (16) in ``gram``; (18), Theorem IV.2 and its
hypotheses A to C in ``theorem``; (23) to (26), the terms of (17) along runs, in ``experiments.deep_linear.theorem``.
``comparison.theorems.deep_linear`` compares all of it with simulation.
"""
