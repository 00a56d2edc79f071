"""How convolutions and pooling are computed where that is faster."""
