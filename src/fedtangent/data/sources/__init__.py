"""Where data sets come from: a file each, and what the files share (archives, images, TFDS builders)."""
