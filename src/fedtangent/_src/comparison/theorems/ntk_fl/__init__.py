"""The theorems of NTK-FL, each checked against simulation."""
