"""The data sets: one file for each source; its ``ENTRIES`` are what ``fedtangent._src.data.load`` finds by name."""
