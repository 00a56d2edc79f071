"""Experiments of the Local-GD paper."""
