"""The op `expert_predictor`."""
