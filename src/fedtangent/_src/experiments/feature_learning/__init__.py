"""Networks that learn features at every width: the maximal-update parameterization (Yang and Hu, 2021)."""
