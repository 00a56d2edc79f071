"""The theorems of Local-GD, each checked against simulation."""
