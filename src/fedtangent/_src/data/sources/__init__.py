"""The data sets: one file for each source; its ``ENTRIES`` are what ``fedtangent.data.load`` finds by name."""
