"""How lazy training is: the distance of networks to their kernel prediction, split into its parts."""
