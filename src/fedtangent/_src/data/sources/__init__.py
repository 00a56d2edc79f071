"""The data sets, one file for each source. ``fedtangent.data.load`` finds their ``ENTRIES`` by name."""
