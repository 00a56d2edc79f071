"""The exact flow, which every linear model follows and every network approaches."""
