"""How lazy training is: the distance of networks to their prediction, split into its parts."""
