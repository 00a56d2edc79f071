"""The implementation. Users import ``fedtangent`` and the modules beside this folder, which list the public names."""
