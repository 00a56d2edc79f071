"""The theorems of Fed-ensemble (FE-2021 and FE-2024), each checked against simulation."""
