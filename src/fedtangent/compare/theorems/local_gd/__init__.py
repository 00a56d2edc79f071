"""Local-GD's theorems against simulation, each beside a wrong theory that must not pass."""
