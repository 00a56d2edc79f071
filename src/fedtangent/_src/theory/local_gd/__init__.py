"""Local-GD in overparameterised linear models: the implicit bias of many local steps (papers: ``localgd``)."""
